"""full_state_dict where one rank fails or has drifted."""

import pytest
import torch

from mok_torch import MoELayer
from mok_torch.self_test import run_on_ranks


def make_layer(member) -> MoELayer:
    layer = MoELayer(16, 24, num_experts=4, top_k=2, scoring="sigmoid", group=member)
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
