"""What goes wrong on a GPU is named, and the next call works."""

import dataclasses

import pytest
import torch

from mok_torch import functional
from mok_torch.functional import moe
from mok_torch.self_test import Case, run_layer, run_on_ranks
from mok_torch.test_support import routed_batch

CASE = Case("errors", (40,), hidden=64, intermediate=40, experts=4, topk=2)


def inputs(**changes):
    batch = routed_batch(CASE, torch.bfloat16)
    tensors = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights)
    names = ("x", "topk_idx", "topk_weight", "w_gate", "w_up", "w_down")
    given = {name: t.detach().cuda() for name, t in zip(names, tensors, strict=True)}
    return given | changes


def workspace(**changes):
    sizes = {"device": "cuda", "num_local_tokens": 40, "hidden_size": 64, "topk": 2} | changes
    return functional.create_workspace(**sizes)


def test_an_expert_id_out_of_range_surfaces_at_the_next_call():
    space = workspace()
    arguments = inputs(workspace=space)
    expected = moe(**arguments)
    text = r"expert id of rank 0, token 3, k 1: expected -1 to 3, got 4"
    for wrong, message in ((4, text), (-2, text.replace("got 4", "got -2"))):
        idx = arguments["topk_idx"].clone()
        idx[3, 1] = wrong
        moe(**arguments | {"topk_idx": idx})
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=message):
            moe(**arguments)
        assert torch.equal(moe(**arguments), expected)
        moe(**arguments | {"topk_idx": idx})
        with pytest.raises(ValueError, match=message):
            space.check()
        space.check()
        assert torch.equal(moe(**arguments), expected)


@pytest.mark.parametrize("name", ["topk_idx", "topk_weight", "w_gate", "w_up", "w_down"])
def test_tensors_of_another_device(name):
    arguments = inputs()
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ValueError, match=f"{name}: expected device cuda:0, got cpu"):
        moe(**arguments)


def test_a_workspace_of_another_device():
    host = functional.create_workspace(num_local_tokens=40, hidden_size=64, topk=2)
    with pytest.raises(ValueError, match="x: expected device cpu, got cuda:0"):
        moe(**inputs(workspace=host))


def test_fp32_is_refused():
    with pytest.raises(TypeError, match=r"dtype: expected torch\.bfloat16 on a GPU"):
        workspace(dtype=torch.float32)
    arguments = {name: t.float() if t.is_floating_point() else t for name, t in inputs().items()}
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16 on a GPU"):
        moe(**arguments)


def test_devices_that_are_none():
    with pytest.raises(ValueError, match="device: expected cuda:0 to cuda:"):
        workspace(device="cuda:99")


def test_too_many_tokens_for_several_ranks():
    case = dataclasses.replace(CASE, tokens=(20, 20))
    batch = routed_batch(case, torch.bfloat16)
    assert run_layer(case, batch, "cuda")["out"].shape == (40, 64)
    with pytest.raises(ValueError, match="experts: expected 4, which the ranks' experts add up"):
        moe(**inputs(num_experts=5))


def test_several_ranks_hear_of_an_invalid_id():
    case = dataclasses.replace(CASE, tokens=(20, 20))
    batch = routed_batch(case, torch.bfloat16)
    wrong = batch.topk_idx.clone()
    wrong[21, 0] = 9
    with pytest.raises(ValueError, match="rank 1, token 1, k 0: expected -1 to 3, got 9"):
        run_layer(case, dataclasses.replace(batch, topk_idx=wrong), "cuda")


def inputs_of_rank(member, rank):
    """Of two ranks with the same tokens."""
    space = functional.create_workspace(
        group=member, device="cuda", num_local_tokens=40, hidden_size=64, topk=2
    )
    arguments = inputs(workspace=space)
    for name in ("w_gate", "w_up", "w_down"):
        arguments[name] = arguments[name][2 * rank : 2 * rank + 2]
    return arguments


@pytest.mark.parametrize("num_experts", [None, 4])
def test_ranks_that_share_the_gpu_hear_of_an_invalid_id_in_the_same_call(num_experts):
    def run(member, rank):
        arguments = inputs_of_rank(member, rank) | {"num_experts": num_experts}
        expected = moe(**arguments)
        wrong = arguments["topk_idx"].clone()
        if rank == 1:
            wrong[3, 1] = 4
        moe(**arguments | {"topk_idx": wrong})
        with pytest.raises(ValueError, match=r"expert id of rank 1, token 3, k 1: .* got 4"):
            moe(**arguments)
        assert torch.equal(moe(**arguments), expected)

    run_on_ranks(run, 2)


def test_an_error_of_one_rank_that_shares_the_gpu_reaches_the_other():
    def run(member, rank):
        arguments = inputs_of_rank(member, rank)
        expected = moe(**arguments)
        with pytest.raises(TypeError, match=r"topk_weight: expected torch\.float32"):
            weight = arguments["topk_weight"]
            moe(**arguments | {"topk_weight": weight.double() if rank == 1 else weight})
        assert torch.equal(moe(**arguments), expected)

    run_on_ranks(run, 2)
