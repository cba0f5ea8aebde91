"""Ranks in different collective calls: all hear of both, and are in step afterwards."""

import gc
import itertools
import re
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mok_torch import MoELayer, MoKConfig, RankTimeoutError
from mok_torch.host_process_test_support import raised_by, run_processes
from mok_torch.meetings import CallWatch, EngineCall
from mok_torch.self_test import run_on_ranks

TIMEOUT = 3
CONFIG = MoKConfig(timeout_seconds=TIMEOUT, num_threads=1)
PATIENT = MoKConfig(timeout_seconds=60, num_threads=1)
HIDDEN = 32
FORWARD = "a forward or build_schedule"

# What a rank may call while another one is in a forward that meets nobody on the host: its name in
# errors, and the call.
MEETING_CALLS = {
    "global_expert_load": lambda layer: layer.global_expert_load(),
    "full_state_dict": lambda layer: layer.full_state_dict(),
    "a first forward, get_workspace or grow": lambda layer: layer.reserve(50),
}


def make_layer(group, config=CONFIG):
    layer = MoELayer(HIDDEN, 16, num_experts=4, top_k=2, group=group, config=config)
    with torch.no_grad():
        layer.router.weight.copy_(torch.linspace(-1, 1, 4 * HIDDEN).view(4, HIDDEN))
    return layer


def make_tokens(rank=0):
    return torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(rank))


def assert_in_step(layer, rank):
    """After a timeout: everything that ranks do together, each call once."""
    layer.reserve(10)
    layer(make_tokens(rank)).sum().backward()
    assert int(layer.global_expert_load().sum()) == 2 * 10 * layer.group.size
    assert layer.full_state_dict()["experts.w_up"].shape[0] == 4


def check_engine_against_meetings(group, rank, barrier):
    """Rank 1 makes another call while the others are in a forward or backward."""
    layer = make_layer(group)
    for call, make in MEETING_CALLS.items():
        for config, engine_call in ((CONFIG, FORWARD), (PATIENT, FORWARD), (CONFIG, "a backward")):
            layer.reserve(10)
            out = layer(make_tokens(rank))
            layer.config = config  # of the meeting: the workspace's is always the short one
            others = (
                out.sum().backward if engine_call == "a backward" else lambda: layer(make_tokens())
            )
            barrier()
            begin = time.monotonic()
            error = raised_by(make, layer) if rank == 1 else raised_by(others)
            assert time.monotonic() - begin < 30
            layer.config = CONFIG
            assert_names_both_calls(error, rank, call, engine_call)
            barrier()
            assert_in_step(layer, rank)


def assert_names_both_calls(error, rank, call, engine_call):
    """Of rank 1, which has made the call, and of the others, which were in the engine's."""
    assert isinstance(error, RankTimeoutError), repr(error)
    pattern = rf"^rank {rank}, .* missing rank 1 .*\(rank 1 called {call}\)$"
    if rank == 1:
        reason = rf": rank \d gave up .* in {engine_call}: .*\(rank 1 called {call}\)"
        note = rf" within .*rank 0 was last in {engine_call}, since"
        pattern = rf"^rank 1: ranks \[0.*\] of .* did not come to {call}({reason}|{note})"
    assert re.search(pattern, str(error)), error


def test_the_engine_against_meetings_of_threads():
    barrier = threading.Barrier(2)
    run_on_ranks(
        lambda member, rank: check_engine_against_meetings(member, rank, lambda: barrier.wait(60)),
        2,
    )


def engine_against_meetings(rank, size, folder):
    check_engine_against_meetings(dist.group.WORLD, rank, dist.barrier)


def test_the_engine_against_meetings_of_processes(tmp_path):
    run_processes(engine_against_meetings, 3, tmp_path, store="tcp")


def come_after_the_others_gave_up(rank, size, folder):
    """Rank 0 has waited in vain for a forward of rank 1, which comes with other calls."""
    layer = make_layer(dist.group.WORLD)
    for call, make in MEETING_CALLS.items():
        layer(make_tokens(rank))
        if rank == 0:
            assert isinstance(raised_by(layer, make_tokens()), RankTimeoutError)
        dist.barrier()
        if call == "a first forward, get_workspace or grow":
            # What both need now, so rank 1 meets rank 0's next call.
            assert layer.reserve(50) is None
            layer(make_tokens(rank))
            continue
        if rank == 1:
            begin = time.monotonic()
            error = raised_by(make, layer)
            assert time.monotonic() - begin < TIMEOUT  # told at once
            told = rf"^rank 1: ranks \[0\] .* to {call}: rank 0 gave up at .* in {FORWARD}: "
            assert isinstance(error, RankTimeoutError) and re.search(told, str(error)), error
        assert_in_step(layer, rank)


def test_who_comes_after_the_others_gave_up_is_told_at_once(tmp_path):
    run_processes(come_after_the_others_gave_up, 2, tmp_path, store="tcp")


def test_who_tries_again_in_a_workspace_that_is_lost_gives_up_once():
    """The others hear of it in one call, and meet in the next one."""
    barrier = threading.Barrier(2)

    def work(member, rank):
        layer = make_layer(member)
        layer(make_tokens(rank))
        if rank == 0:
            for _ in range(2):
                assert isinstance(raised_by(layer, make_tokens()), RankTimeoutError)
        barrier.wait(60)
        if rank == 1:
            assert isinstance(raised_by(layer.global_expert_load), RankTimeoutError)
        return layer.global_expert_load()

    first, second = run_on_ranks(work, 2)
    assert torch.equal(first, second)


def test_who_comes_just_when_the_others_give_up_is_told_after_the_next_meeting():
    """Its own call succeeds, so it has not been away for the timeout when it is in the next one."""
    gave_up = threading.Barrier(2)

    def work(member, rank):
        layer = make_layer(member, PATIENT)
        layer(make_tokens(rank))
        if rank == 0:
            with pytest.raises(RankTimeoutError), layer._workspace.host_call(FORWARD):
                raise RankTimeoutError("missing rank 1")  # in place of the engine
        else:
            with layer._workspace.host_call(FORWARD):
                pass
        gave_up.wait(60)
        if rank == 1:
            begin = time.monotonic()
            told = rf"rank 0 gave up at .* in {FORWARD}: missing rank 1"
            with pytest.raises(RankTimeoutError, match=f"to global_expert_load: {told}"):
                layer.global_expert_load()
            with pytest.raises(RankTimeoutError, match=f"^rank 1 came too late: {told}"):
                layer(make_tokens(rank))
            assert time.monotonic() - begin < PATIENT.timeout_seconds / 2
        assert_in_step(layer, rank)

    run_on_ranks(work, 2)


@pytest.mark.parametrize("is_users, use_reentrant", [(True, False), (False, False), (False, True)])
def test_an_error_in_a_recomputation_is_told_once(is_users, use_reentrant):
    """The backward around it does not send the others again what has come from one of them.

    With use_reentrant there is no backward of the layer around it, to tell of the user's error.
    """

    def work(member, rank):
        layer = make_layer(member)
        layer.reserve(10)
        calls = itertools.count(1)

        def block(x):
            if next(calls) == 2 and rank == 0:
                if is_users:
                    raise RuntimeError("no recomputation")
                x = x[:, :8]
            return layer(x)

        x = make_tokens(rank).requires_grad_()
        out = checkpoint(block, x, use_reentrant=use_reentrant)
        error = raised_by(out.sum().backward)
        assert str(error).startswith("rank 0: ") == (rank == 1)
        assert_in_step(layer, rank)

    run_on_ranks(work, 2)


def check_that_ranks_go_on_after_a_call_of_one(group, rank):
    """Rank 1 waits in vain in a meeting that the others never come to: they are in a forward, with
    more patience, where rank 1 comes after that."""
    layer = make_layer(group, PATIENT)
    layer.reserve(10)
    for call, make in MEETING_CALLS.items():
        if rank == 1:
            layer.config = CONFIG
            error = raised_by(make, layer)
            layer.config = PATIENT
            ended = rf"^rank 1: ranks \[0, 2\] .* did not come to {call} within {TIMEOUT} s"
            assert isinstance(error, RankTimeoutError) and re.search(ended, str(error)), error
            assert f"was last in {FORWARD}" in str(error)
        for _ in range(2):
            layer(make_tokens(rank)).sum().backward()
            assert int(layer.global_expert_load().sum()) == 2 * 10 * layer.group.size
        layer.full_state_dict()


def test_threads_go_on_after_a_call_of_one():
    run_on_ranks(check_that_ranks_go_on_after_a_call_of_one, 3)


def processes_go_on_after_a_call_of_one(rank, size, folder):
    check_that_ranks_go_on_after_a_call_of_one(dist.group.WORLD, rank)


def test_processes_go_on_after_a_call_of_one(tmp_path):
    run_processes(processes_go_on_after_a_call_of_one, 3, tmp_path, store="tcp")


def test_only_calls_that_last_are_told():
    class Told:
        def __init__(self):
            self.texts = []

        def tell(self, text):
            self.texts.append(text)

    told = Told()
    watch = CallWatch(told.tell)
    watch._is_watching = True  # by hand
    state = (None, None)
    for call in (None, "short", "other", None):
        watch.set_current(call and EngineCall(call, 0.0))
        state = watch.look(*state)
    assert told.texts == []
    watch.set_current(EngineCall("long", 0.0))
    for _ in range(4):
        state = watch.look(*state)
    assert len(told.texts) == 1 and told.texts[0].startswith("long, since")
    watch.set_current(EngineCall("next", 0.0))
    for _ in range(4):
        state = watch.look(*state)
    assert told.texts[1] == "" and told.texts[2].startswith("next, since")
    watch.set_current(None)
    for _ in range(2):
        state = watch.look(*state)
    assert told.texts[3:] == [""]


def test_a_watch_keeps_nobody_alive():
    class Owner:
        def __init__(self):
            self.watch = CallWatch(self.tell)

        def tell(self, text):
            pass

    owner = Owner()
    owner.watch.set_current(EngineCall("call", 0.0))
    threads = threading.active_count()
    references = weakref.ref(owner), weakref.ref(owner.watch)
    del owner
    gc.collect()
    deadline = time.monotonic() + 60
    while threading.active_count() >= threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() < threads
    assert [reference() for reference in references] == [None, None]
