"""What fails on one rank while a workspace is made or grows raises on every rank."""

import contextlib
import gc
import weakref

import pytest
import torch

from mok_torch import InProcessGroup, RankTimeoutError
from mok_torch.agreement import together
from mok_torch.groups import ONE_RANK
from mok_torch.self_test import run_on_ranks


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.OutOfMemoryError("full"), RuntimeError, "OutOfMemoryError: full"),
        (MemoryError("full"), MemoryError, "full"),
        (ValueError("wrong"), ValueError, "wrong"),
    ],
)
def test_an_error_of_one_rank_raises_on_every_rank(error, kind, text):
    def on_rank(member, rank):
        def action():
            return fail(error) if rank == 1 else rank

        with pytest.raises(kind) as raised:
            together(member, 60, action)
        own = rank == 1
        assert raised.value is error if own else str(raised.value) == f"rank 1: {text}"
        assert raised.value.is_shared  # nobody is told once more
        return together(member, 60, lambda: rank)

    assert run_on_ranks(on_rank, 3) == [0, 1, 2]


def test_each_rank_raises_its_own_error():
    def on_rank(member, rank):
        with pytest.raises(ValueError, match=f"^of {rank}$"):
            together(member, 60, lambda: fail(ValueError(f"of {rank}")))

    run_on_ranks(on_rank, 2)


def test_a_rank_whose_error_nobody_hears_raises_it():
    member = InProcessGroup(2).member(0)
    with pytest.raises(ValueError, match=r"^wrong$") as raised:
        together(member, 0.01, lambda: fail(ValueError("wrong")))
    assert isinstance(raised.value.__cause__, RankTimeoutError)
    with pytest.raises(RankTimeoutError, match=r"ranks \[1\]"):
        together(member, 0.01, lambda: None)


def test_what_failed_is_not_kept_by_the_error():
    """Memory that was allocated before the failure is free once the error has been handled."""
    made = []

    def action():
        memory = torch.zeros(8)
        made.append(weakref.ref(memory))
        raise MemoryError("full")

    gc.disable()
    try:
        with contextlib.suppress(MemoryError):
            together(ONE_RANK, 1, action)
        assert made[0]() is None
    finally:
        gc.enable()
