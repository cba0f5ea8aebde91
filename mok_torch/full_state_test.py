"""full_state_dict where one rank fails or has drifted."""

import pytest
import torch

from mok_torch import MoELayer, full_state
from mok_torch.self_test import run_on_ranks


def make_layer(member, **options) -> MoELayer:
    layer = MoELayer(16, 24, num_experts=4, top_k=2, scoring="sigmoid", group=member, **options)
    layer.router.weight.data.fill_(1.0)  # the same on every rank
    return layer


def test_an_error_of_one_rank_reaches_the_others():
    def work(member, rank):
        layer = make_layer(member)

        def fail(*_):
            raise OSError("no room")

        hook = layer.register_state_dict_post_hook(fail) if rank == 1 else None
        with pytest.raises(Exception, match="^no room" if rank == 1 else "^rank 1: .*no room"):
            layer.full_state_dict()
        if hook is not None:
            hook.remove()
        return layer.full_state_dict()  # the ranks are in step

    first, second = run_on_ranks(work, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_biases_that_have_drifted_apart_are_noticed():
    def work(member, rank):
        layer = make_layer(member)
        layer.router.expert_bias.fill_(float(rank))
        with pytest.raises(ValueError, match="router's weight or bias on rank 1 is not that on"):
            layer.full_state_dict()

    run_on_ranks(work, 2)


@pytest.mark.parametrize("name", ["w_gate", "w_up", "w_down", "gate_weight"])
def test_shared_experts_that_have_drifted_apart_are_noticed(name):
    """By one bit of one weight, or by two weights that have changed places."""

    def swap(weights):
        weights[..., :2] = weights[..., :2].flip(-1)

    def flip_a_bit(weights):
        weights.view(torch.int32)[..., 5] ^= 1

    def work(member, rank):
        layer = make_layer(member, shared_intermediate_size=8, shared_gate=True)
        generator = torch.Generator().manual_seed(0)  # threads share PyTorch's
        for parameter in layer.shared_expert.parameters():
            parameter.data.normal_(generator=generator)
        weights = getattr(layer.shared_expert, name).data
        before = weights.clone()
        for change in (swap, flip_a_bit):
            if rank == 2:
                change(weights)
            with pytest.raises(
                ValueError, match="the shared expert on rank 2 is not that on rank 0"
            ):
                layer.full_state_dict()
            weights.copy_(before)
            layer.full_state_dict()

    run_on_ranks(work, 3)


def test_digests_do_not_depend_on_how_many_words_are_taken_at_once(monkeypatch):
    tensor = torch.randn(3, 1001).bfloat16()
    expected = full_state._digest_of_tensor(tensor)
    monkeypatch.setattr(full_state, "_WORDS_AT_ONCE", 7)
    assert full_state._digest_of_tensor(tensor) == expected
    assert full_state._digest_of_tensor(tensor.flip(0)) != expected


def test_digests_tell_any_two_words_apart():
    words = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(0))
    inverse = pow(full_state._MULTIPLIER, -1, 2**64)  # below 2^63
    mixed = words * full_state._MULTIPLIER
    assert torch.equal(mixed * inverse, words)
    complements = ~mixed * inverse  # of what is shifted and added: signs must not be shifted in
    assert (full_state._mix(words) != full_state._mix(complements)).all()
    assert (full_state._mix(words) < 0).any()


def test_a_digest_takes_tensors_of_any_shape():
    scalar = full_state._digest_of_tensor(torch.tensor(1.0))
    assert scalar == full_state._digest_of_tensor(torch.ones(3)[1:2]) != 0
    assert full_state._digest_of_tensor(torch.ones(0)) == 0
