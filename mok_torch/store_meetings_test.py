"""Meetings through a store: all values or one verdict for all ranks, and nothing left behind."""

import concurrent.futures
import random
import threading
import time

import pytest
import torch.distributed as dist

from mok_torch import RankTimeoutError
from mok_torch.meetings import EngineCall
from mok_torch.store_meetings import StoreMeetings

PATIENCE = 60  # seconds, for a loaded machine
CALL = "call"
TIMEOUT = 2  # within which ranks come that a barrier lets go


@pytest.fixture(params=["hash", "tcp", "file"])
def open_store(request, tmp_path):
    """A function that opens the same store for each rank."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "store"))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    # The default argument keeps the server.
    return lambda server=server: dist.TCPStore("127.0.0.1", server.port, is_master=False)


def on_ranks(size, body):
    """body(rank) in a thread for each rank; what they return, or raise, in rank order."""

    def guarded(rank):
        try:
            return body(rank)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def num_keys(store):
    """In a HashStore or TCPStore, whose server adds one of its own."""
    return store.num_keys() - isinstance(store, dist.TCPStore)


@pytest.mark.parametrize("keeper", [None, 0, 2])
def test_everybody_gets_every_value_and_few_keys_stay(open_store, keeper):
    ready = threading.Barrier(3)

    def body(rank):
        store = open_store()
        meetings = StoreMeetings(store, rank, 3, keeper)
        for turn in range(20):
            value = {"rank": rank, "turn": turn, "bytes": bytes(range(256)) * rank}
            values = meetings.exchange(CALL, value, PATIENCE)
            assert [value["rank"] for value in values] == [0, 1, 2]
            assert {value["turn"] for value in values} == {turn}
            assert [len(value["bytes"]) for value in values] == [0, 256, 512]
        ready.wait(PATIENCE)
        # Values, marks of having left, a verdict, of the last meeting, and the incarnations.
        return 0 if isinstance(store, dist.FileStore) else num_keys(store)

    results = on_ranks(3, body)
    assert all(isinstance(result, int) and result <= 3 + 3 + 1 + 3 for result in results), results


def test_a_missing_rank_is_named_and_learns_of_it_when_it_comes(open_store):
    together, given_up = threading.Barrier(2), threading.Barrier(3)
    begin = time.monotonic()

    def body(rank):
        meetings = StoreMeetings(open_store(), rank, 3, 1)
        meetings.exchange(CALL, "all are here", PATIENCE)
        (given_up if rank == 2 else together).wait(PATIENCE)
        with pytest.raises(RankTimeoutError) as caught:
            meetings.exchange(CALL, "without 2", TIMEOUT)
        if rank != 2:
            given_up.wait(PATIENCE)
        # They are in step again.
        assert meetings.exchange(CALL, rank, PATIENCE) == [0, 1, 2]
        assert time.monotonic() - begin >= TIMEOUT
        return str(caught.value)

    text = f"ranks [2] of the process group did not come to call within {TIMEOUT} s"
    assert on_ranks(3, body) == [
        f"rank 0: {text}",
        f"rank 1: {text}",
        f"rank 2 came too late: {text}",
    ]


def test_the_shortest_timeout_ends_the_meeting_for_all(open_store):
    together = threading.Barrier(2)

    def body(rank):
        if rank == 2:
            return 0
        meetings = StoreMeetings(open_store(), rank, 3, None)
        together.wait(PATIENCE)
        begin = time.monotonic()
        with pytest.raises(RankTimeoutError, match=rf"ranks \[2\] .* within {TIMEOUT} s"):
            meetings.exchange(CALL, None, (TIMEOUT, PATIENCE)[rank])
        return time.monotonic() - begin

    assert max(on_ranks(3, body)) < PATIENCE / 2


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_share_the_verdict_however_close_it_is(open_store, seed):
    """Ranks come about when the others give up."""
    turns = 40

    def body(rank):
        delays = random.Random(100 * seed + rank)
        meetings = StoreMeetings(open_store(), rank, 3, None)
        verdicts = []
        for turn in range(turns):
            time.sleep(delays.random() * 0.02)
            try:
                assert meetings.exchange(CALL, turn, 0.01) == [turn] * 3
                verdicts.append(True)
            except RankTimeoutError:
                verdicts.append(False)
        return verdicts

    first, *others = on_ranks(3, body)
    assert len(first) == turns and all(other == first for other in others)


def test_a_group_made_anew_on_the_same_store_finds_nothing_of_the_last(open_store):
    for incarnation in range(3):

        def body(rank, incarnation=incarnation):
            time.sleep(0.05 * rank)  # what the last one left would be there already
            meetings = StoreMeetings(open_store(), rank, 2, None)
            return [meetings.exchange(CALL, (incarnation, turn), PATIENCE) for turn in range(2)]

        expected = [[(incarnation, turn)] * 2 for turn in range(2)]
        assert on_ranks(2, body) == [expected] * 2


def test_ranks_in_different_incarnations_of_a_group_are_told_so(open_store):
    """Only rank 0 has made the group anew; once rank 1 has too, they meet again."""
    told = threading.Barrier(2)

    def body(rank):
        stores = [open_store() for _ in range(2)]
        first, second = (StoreMeetings(store, rank, 2, None) for store in stores)
        first.exchange(CALL, None, PATIENCE)
        where = "rank 0 is in its group number 2 .*, rank 1 in its number 1"
        if rank == 1:
            where = "rank 1 is in its group number 1 .*, rank 0 in its number 2"
        with pytest.raises(RankTimeoutError, match=rf"did not come to call within .*{where}"):
            (first if rank == 1 else second).exchange(CALL, None, TIMEOUT)
        told.wait(PATIENCE)
        if rank == 0:
            # In its second incarnation all the same.
            return second.exchange(CALL, rank, PATIENCE)
        second._next = second._next.next_era()  # rank 0 has missed it in the first
        return second.exchange(CALL, rank, PATIENCE)

    assert on_ranks(2, body) == [[0, 1]] * 2


def test_notices_reach_who_comes_late(open_store):
    first, late = (StoreMeetings(open_store(), rank, 2, None) for rank in range(2))
    on_ranks(2, lambda rank: (first, late)[rank].exchange(CALL, None, PATIENCE))
    assert late.find_notice("a workspace") is None
    first.give_up("a workspace", "gone")
    late.give_up("a workspace", "gone too")
    assert first.find_notice("a workspace") == late.find_notice("a workspace") == "gone"
    assert late.find_notice("another") is None


def test_one_key_stays_of_each_workspace_that_is_lost():
    store = dist.HashStore()
    ranks = [StoreMeetings(store, rank, 2, None) for rank in range(2)]

    def meet():
        return on_ranks(2, lambda rank: ranks[rank].exchange(CALL, rank, PATIENCE))

    assert meet() == [[0, 1]] * 2
    before = num_keys(store)
    for lost in range(5):
        for meetings in ranks:
            meetings.give_up(f"workspace {lost}", "gone")
        assert meet() == [[0, 1]] * 2
        assert num_keys(store) == before + lost + 1


def test_a_value_that_cannot_be_sent_leaves_the_ranks_in_step(open_store):
    def body(rank):
        meetings = StoreMeetings(open_store(), rank, 2, None)
        value, error = ((lambda: 0), Exception) if rank == 1 else (0, RankTimeoutError)
        with pytest.raises(error):
            meetings.exchange(CALL, value, 0.1)
        return meetings.exchange(CALL, rank, PATIENCE)

    assert on_ranks(2, body) == [[0, 1]] * 2


def test_a_store_that_answers_late_counts_the_group_once(monkeypatch):
    """Two meetings wait for the first answer at once; the second one's is still in time."""
    monkeypatch.setattr("mok_torch.store_meetings._GRACE_SECONDS", 0.1)
    store = dist.HashStore()

    class StoppedStore(dist.PrefixStore):
        calls, released = 0, threading.Event()

        def add(self, key, amount):
            StoppedStore.calls += 1
            StoppedStore.released.wait(PATIENCE)
            return super().add(key, amount)

    stores = (StoppedStore("group", store), dist.PrefixStore("group", store))

    def body(rank):
        meetings = StoreMeetings(stores[rank], rank, 2, None)
        with pytest.raises(RankTimeoutError):
            meetings.exchange(CALL, "in vain", 0.1)
        if rank == 0:
            threading.Timer(0.2, StoppedStore.released.set).start()
        return meetings.exchange(CALL, rank, TIMEOUT)

    assert on_ranks(2, body) == [[0, 1]] * 2
    assert StoppedStore.calls == 1


class SilentStore:
    """A store whose process is stopped: calls do not return."""

    def __init__(self):
        self.released = threading.Event()

    def add(self, key, amount):
        self.released.wait(PATIENCE)
        raise dist.DistNetworkError("gone")


def test_a_store_that_does_not_answer_ends_in_time(monkeypatch):
    monkeypatch.setattr("mok_torch.store_meetings._GRACE_SECONDS", 0.1)
    store = SilentStore()
    meetings = StoreMeetings(store, 1, 2, 0)
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError, match="kept by rank 0, cannot be reached: no answer"):
        meetings.exchange(CALL, None, 0.1)
    assert time.monotonic() - begin < PATIENCE / 2
    store.released.set()
    with pytest.raises(RankTimeoutError, match="kept by rank 0, cannot be reached: gone"):
        meetings.exchange(CALL, None, PATIENCE)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_gives_up_in_the_engine_ends_the_wait_of_the_others(open_store, size):
    """They are in, or come to, a meeting without rank 0; all are in step in their next one."""
    waiting = threading.Barrier(size)

    def body(rank):
        meetings = StoreMeetings(open_store(), rank, size, None)
        meetings.exchange(CALL, None, PATIENCE)
        waiting.wait(PATIENCE)
        begin = time.monotonic()
        if rank == 0:
            meetings.give_up("a workspace", "gone")  # perhaps before they have come
        else:
            ended = r"ranks \[0.*\] of the process group did not come to another call: gone"
            with pytest.raises(RankTimeoutError, match=ended):
                meetings.exchange("another call", None, PATIENCE)
            assert time.monotonic() - begin < PATIENCE / 2
        assert meetings.era == 1
        return meetings.exchange(CALL, rank, PATIENCE)

    assert on_ranks(size, body) == [list(range(size))] * size


@pytest.mark.parametrize("resumes", [False, True])
def test_who_comes_after_one_has_given_up(open_store, resumes):
    """A call that makes things anew meets the others' next one; any other call is told."""
    first, late = (StoreMeetings(open_store(), rank, 2, None) for rank in range(2))
    on_ranks(2, lambda rank: (first, late)[rank].exchange(CALL, None, PATIENCE))
    for _ in range(2):
        first.give_up("a workspace", "gone")
    if not resumes:
        for _ in range(2):
            with pytest.raises(RankTimeoutError, match=r"^rank 1: .* to a call: gone$"):
                late.exchange("a call", None, PATIENCE)

    def body(rank):
        return (first, late)[rank].exchange(CALL, rank, PATIENCE, resumes=resumes)

    assert on_ranks(2, body) == [[0, 1]] * 2


def test_ranks_that_make_different_calls_hear_of_both_and_stay_in_step(open_store):
    def body(rank):
        meetings = StoreMeetings(open_store(), rank, 2, None)
        text = "disagree on the collective call: rank 0 called call 0, rank 1 called call 1"
        with pytest.raises(ValueError, match=text):
            meetings.exchange(f"call {rank}", None, PATIENCE)
        return meetings.exchange(CALL, rank, PATIENCE)

    assert on_ranks(2, body) == [[0, 1]] * 2


def test_who_comes_too_late_with_another_call_hears_of_both(open_store):
    given_up = threading.Barrier(2)

    def body(rank):
        meetings = StoreMeetings(open_store(), rank, 2, None)
        if rank == 1:
            given_up.wait(PATIENCE)
        with pytest.raises(RankTimeoutError) as caught:
            meetings.exchange(f"call {rank}", None, 0.1)
        if rank == 0:
            given_up.wait(PATIENCE)
        assert meetings.exchange(CALL, rank, PATIENCE) == [0, 1]
        return str(caught.value)

    text = "ranks [1] of the process group did not come to call 0 within 0.1 s"
    late = "rank 1, which called call 1, came too late"
    assert on_ranks(2, body) == [f"rank 0: {text}", f"{late}: {text}"]


def test_a_notice_is_heard_of_once(open_store):
    """Whoever has found it is in the era of the rank that has left it."""
    first, late = (StoreMeetings(open_store(), rank, 2, None) for rank in range(2))
    on_ranks(2, lambda rank: (first, late)[rank].exchange(CALL, None, PATIENCE))
    first.give_up("a workspace", "gone")
    for _ in range(2):
        assert late.find_notice("a workspace") == "gone"
        assert late.era == first.era == 1
    values = on_ranks(2, lambda rank: (first, late)[rank].exchange(CALL, rank, PATIENCE))
    assert values == [[0, 1]] * 2


@pytest.mark.parametrize("was_with_the_others", [False, True])
def test_who_has_been_with_the_others_since_a_meeting_is_not_late_for_it(
    open_store, was_with_the_others
):
    """Then it has not made that call at all, and meets their next one."""
    given_up = threading.Barrier(2)
    engine_call = EngineCall("a forward", 0.0)

    def body(rank):
        meetings = StoreMeetings(open_store(), rank, 2, None)
        if rank == 0:  # in vain, say: counted no more after the next meeting
            meetings.enter_engine(engine_call)
        meetings.exchange(CALL, None, PATIENCE)
        if rank == 1:
            with pytest.raises(RankTimeoutError):
                meetings.exchange("a call", None, 0.1)
        given_up.wait(PATIENCE)
        if was_with_the_others:
            meetings.enter_engine(engine_call)
        elif rank == 0:
            with pytest.raises(RankTimeoutError, match=r"rank 0.* came too late: ranks \[0\]"):
                meetings.exchange(CALL, None, PATIENCE)
        return meetings.exchange(CALL, rank, PATIENCE)

    assert on_ranks(2, body) == [[0, 1]] * 2
