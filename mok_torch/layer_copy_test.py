"""Copies of MoELayer: copy, pickle and torch.save, with and without a group."""

import copy
import io
import pickle

import pytest
import torch

from mok_torch.groups import InProcessGroup
from mok_torch.layer import MoELayer
from mok_torch.self_test import run_on_ranks

HIDDEN = 32


def make_layer(group=None):
    return MoELayer(HIDDEN, 24, 5, 2, scoring="sigmoid", shared_intermediate_size=16, group=group)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("warm", [False, True])
def test_copies_share_the_group(warm, copier):
    group = InProcessGroup(2)
    layers = [make_layer(group.member(rank)) for rank in range(2)]
    x = torch.randn(6, HIDDEN)

    def work(_, rank):
        layer = layers[rank]
        if warm:
            layer(x)
        copied = copier(layer)
        assert copied.group is layer.group
        shared = copied.experts.w_up.data_ptr() == layer.experts.w_up.data_ptr()
        assert shared == (copier is copy.copy)
        expected = layer(x)
        assert torch.equal(copied(x), expected)
        with torch.no_grad():
            copied.experts.w_down.zero_()
        assert torch.equal(layer(x), expected) == (copier is copy.deepcopy)

    run_on_ranks(work, 2)


def fused_layer():
    layer = MoELayer(HIDDEN, 24, 5, 2, gradient_accumulation_fusion=True)
    buffer = torch.zeros(sum(parameter.numel() for parameter in layer.parameters()))
    begin = 0
    for parameter in layer.parameters():
        part = buffer[begin : begin + parameter.numel()]
        parameter.main_grad = part.view_as(parameter)
        begin += parameter.numel()
    return layer


def test_a_deep_copy_wants_main_grads_of_its_own():
    layer = fused_layer()
    x = torch.randn(6, HIDDEN)
    copied = copy.deepcopy(layer)
    assert copied.gradient_accumulation_fusion
    with pytest.raises(ValueError, match=r"w_gate.main_grad: expected a tensor .* got none"):
        copied(x)
    for parameter in copied.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    for each in (layer, copied):
        each(x).sum().backward()
    for parameter, own in zip(layer.experts.parameters(), copied.experts.parameters(), strict=True):
        assert parameter.main_grad.any() and torch.equal(parameter.main_grad, own.main_grad)


def test_a_pickle_keeps_main_grads():
    layer = fused_layer()
    x = torch.randn(6, HIDDEN)
    layer(x).sum().backward()
    copied = pickle.loads(pickle.dumps(layer))
    expected = layer.experts.w_up.main_grad.clone()
    assert torch.equal(copied.experts.w_up.main_grad, expected)
    copied(x).sum().backward()
    assert torch.equal(copied.experts.w_up.main_grad, 2 * expected)
    assert torch.equal(layer.experts.w_up.main_grad, expected)


def test_pickle_of_a_layer_with_a_group_says_what_to_save():
    layer = make_layer(InProcessGroup(2).member(0))
    with pytest.raises(TypeError, match=r"cannot be pickled.*state_dict\(\)"):
        pickle.dumps(layer)
    with pytest.raises(TypeError, match=r"cannot be pickled.*state_dict\(\)"):
        torch.save(torch.nn.Sequential(layer), io.BytesIO())


def test_layer_of_one_rank_pickles():
    layer = make_layer()
    x = torch.randn(6, HIDDEN)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(copied(x), expected)
