"""Same inputs, same bits: of out and of every gradient, whatever runs them."""

import dataclasses
import functools

import pytest
import torch

from mok_torch.functional import MoKConfig
from mok_torch.self_test import Case, run_layer
from mok_torch.test_support import assert_same_bits, routed_batch

# 3 experts per token over 7 experts: no EP size divides the experts, some ranks own none at R = 8.
CASE = Case(
    "determinism",
    (240,),
    hidden=72,
    intermediate=48,
    experts=7,
    topk=3,
    shared=40,
    scaled_shared=True,
    no_route_share=0.1,
)


@functools.cache
def expected(dtype=torch.bfloat16):
    config = MoKConfig(num_threads=1)
    return run_layer(dataclasses.replace(CASE, config=config), routed_batch(CASE, dtype))


def check(dtype=torch.bfloat16, tokens=CASE.tokens, **options):
    case = dataclasses.replace(CASE, tokens=tokens, config=MoKConfig(**options))
    actual, reference = run_layer(case, routed_batch(CASE, dtype)), expected(dtype)
    if len(tokens) > 1:
        # Each rank makes its part of a replicated weight's gradient; adding them is up to data
        # parallelism, and rounds.
        part = ("d_shared_gate", "d_shared_up", "d_shared_down")
        for name in part:
            torch.testing.assert_close(
                actual[name], reference[name].float(), atol=0.1, rtol=2e-2, msg=name
            )
        actual = {name: value for name, value in actual.items() if name not in part}
        reference = {name: value for name, value in reference.items() if name not in part}
    else:
        actual = {name: value.to(reference[name].dtype) for name, value in actual.items()}
    assert_same_bits(actual, reference)


@pytest.mark.parametrize("repeat", range(3))
def test_repeats(repeat):
    check(num_threads=2)


@pytest.mark.parametrize("num_threads", range(1, 9))
def test_threads(num_threads):
    check(num_threads=num_threads)


@pytest.mark.parametrize("forward, backward", [(1, 0), (0, 1), (1, 2), (3, 1)])
def test_communication_workers(forward, backward):
    check(fwd_num_comm_sms=forward, bwd_num_comm_sms=backward, num_threads=2)


@pytest.mark.parametrize("minibatch", [1, 128, 384, 10_000])
@pytest.mark.parametrize("macrobatch", [None, 1, 256, 640, -1])
def test_minibatch_and_macrobatch(minibatch, macrobatch):
    check(minibatch_size=minibatch, macrobatch_size=macrobatch, num_threads=2)


SPLITS = {
    2: (130, 110),
    3: (100, 0, 140),
    4: (60, 60, 60, 60),
    8: (31, 32, 33, 0, 1, 63, 50, 30),
}


@pytest.mark.parametrize("ep_size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"minibatch_size": 128, "macrobatch_size": 256},
        {"fwd_num_comm_sms": 1, "bwd_num_comm_sms": 1, "macrobatch_size": 128},
    ],
    ids=["default", "small ring", "communication threads"],
)
def test_ep_size(ep_size, options):
    check(tokens=SPLITS[ep_size], num_threads=1, **options)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_float32(ep_size):
    check(torch.float32, tokens=SPLITS[ep_size], macrobatch_size=128)
