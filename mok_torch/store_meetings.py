"""Meetings of the ranks of a torch.distributed group that end in time and name who is missing.

A collective ends with whatever its backend says of a dead rank, after the process group's timeout.
Here the ranks leave small values for each other in the group's store instead, which every group
has, whatever its backend, and which answers questions about a rank that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mok_torch.errors import RankTimeoutError
from mok_torch.meetings import CallWatch, EngineCall, Failure, Position, values_of_call

# Ranks usually come within a millisecond of each other; the store is asked less often later.
_FIRST_PAUSE_SECONDS = 20e-6
_LAST_PAUSE_SECONDS = 5e-3
# How much longer than the timeout the store may take to answer.
_GRACE_SECONDS = 2.0
_COMPLETE = "complete"
_GROUP = "the process group"

# Of each group. Nothing in it refers to its group.
_meetings_of_group: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def meetings_of(group: dist.ProcessGroup) -> StoreMeetings:
    """The meetings of a group, whose ranks count them together."""
    meetings = _meetings_of_group.get(group)
    if meetings is None:
        meetings = _meetings_of_group[group] = _make_meetings(group)
    return meetings


def _make_meetings(group: dist.ProcessGroup) -> StoreMeetings:
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
    except KeyError as error:
        raise RuntimeError("the process group of this workspace has been destroyed") from error
    if store is None:
        raise ValueError(
            "group: expected a process group with a store (init_process_group with any init_method "
            f"or store), got one of backend {dist.get_backend(group)}"
        )
    return StoreMeetings(
        store, dist.get_rank(group), dist.get_world_size(group), _keeper_of(store, group)
    )


def _keeper_of(store: dist.Store, group: dist.ProcessGroup) -> int | None:
    """The rank of the group whose process ends the store when it ends, if there is one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not isinstance(store, dist.TCPStore) or kept_by_launcher:
        return None
    try:
        return dist.get_group_rank(group, 0)  # the default group's rank 0, as PyTorch makes it
    except ValueError:
        return None


class StoreMeetings:
    """Numbered meetings of ranks through a store that all of them reach.

    In a meeting each rank posts its call and its value and waits for the others'. Whether all came
    is decided once, by whoever is first to see or to miss them all (compare_set): either every rank
    gets all values, or every rank raises, one that comes too late included. A failure begins a new
    era (Position), so the ranks stay in step, and may meet again.

    Keys live under "mok/<incarnation>/<era>/<meeting>/". A rank posts for a meeting only after it
    has read the one before, so whoever completes one may delete what it posted for earlier ones.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, keeper: int | None):
        """keeper: the rank whose process ends the store when it ends; None: none of these."""
        self._group_store = store
        self._store: dist.Store | None = None
        self._incarnation = 0  # how often a group of this store and name has been made
        # A thread that nobody waits for any more may still be in the middle of it.
        self._opening = threading.Lock()
        self._rank = rank
        self._size = size
        self._keeper = keeper
        self._next = Position(0, 0)
        # The last meeting, while this rank does not know how it has ended: whatever failed, the
        # other ranks count it.
        self._undecided: _Meeting | None = None
        self._posted: list[tuple[Position, str]] = []  # own keys in the store
        self._watch = CallWatch(self._tell)
        self._engine_calls = 0  # begun since the last meeting that all ranks came to

    @property
    def era(self) -> int:
        """How many failures this rank has heard of."""
        return self._next.era

    def exchange(
        self, call: str, value: Any, timeout_seconds: float, *, resumes: bool = False
    ) -> list[Any]:
        """The values of all ranks, in rank order. Collective.

        Args:
          call: what all ranks have called, for errors.
          resumes: the call makes what ranks need after one of them has given up in the engine: if
            one has, and this rank has not heard of it, that is no error.

        Raises:
          RankTimeoutError: on every rank, when one does not come within the timeout of another.
          ValueError: on every rank, if they have made different calls.
        """
        meeting = _Meeting(call, timeout_seconds, resumes, self._next)
        if self._undecided is not None and self._undecided.at.era == self._next.era:
            meeting.after = self._undecided
        self._undecided = meeting
        meeting.payload = pickle.dumps((call, value))
        # In a thread: a call of a store whose process is stopped, not dead, never returns.
        thread = threading.Thread(target=self._run, args=(meeting,), daemon=True)
        thread.start()
        try:
            thread.join(timeout_seconds + _GRACE_SECONDS)
        finally:
            meeting.abandoned = True
        if meeting.error is not None:
            raise meeting.error
        if meeting.failure is not None:
            self._undecided, self._next = None, meeting.at.next_era()
            raise RankTimeoutError(meeting.failure.text(self._rank, call, _GROUP))
        if meeting.values is None:
            raise RankTimeoutError(f"{self._store_is_gone()}: no answer in {timeout_seconds} s")
        self._undecided, self._next, self._engine_calls = None, meeting.at.following(), 0
        return values_of_call([pickle.loads(posted) for posted in meeting.values])

    def give_up(self, name: str, text: str) -> str:
        """Tells the others that this rank has waited in vain in the engine. Not collective.

        It ends the era. Ranks that are in a meeting raise; others find_notice(name).

        Returns:
          What the other ranks have called instead, as far as they wait in a meeting; for errors.
        """
        at, self._next = self._next, self._next.next_era()

        def tell() -> str:
            calls = self._calls_at(at)
            told = text + calls
            # Never deleted: a rank may hold on to the workspace, and come to it, for as long as it
            # likes. One of some hundred bytes for each workspace that is lost, which takes a rank
            # the whole timeout: a few kilobytes an hour at worst, with the default one.
            self._store.compare_set(f"notice/{name}", "", json.dumps([at.era, told]))
            self._posted.append((at, _end_key(at.era)))
            self._store.compare_set(_end_key(at.era), "", told)
            return calls

        return _in_time(tell) or ""

    def find_notice(self, name: str) -> str | None:
        """What the first rank has left under that name in give_up, or None. Not collective."""

        def find() -> str | None:
            store, key = self._open_store(), f"notice/{name}"
            return store.get(key).decode() if store.check([key]) else None

        notice = _in_time(find)
        if notice is None:
            return None
        era, text = json.loads(notice)
        if era == self._next.era:  # now this rank has heard of it
            self._next = self._next.next_era()
        return text

    def enter_engine(self, call: EngineCall | None):
        """Says in which call of the engine this rank is from now on, for errors of the others."""
        self._watch.set_current(call)
        self._engine_calls += call is not None

    def _tell(self, engine_call: str):
        self._open_store().set(f"engine/{self._rank}", engine_call)

    def _run(self, meeting: _Meeting):
        try:
            self._meet(meeting)
        except dist.DistNetworkError as error:
            meeting.error = RankTimeoutError(f"{self._store_is_gone()}: {error}")
            meeting.error.__cause__ = error
        except Exception as error:  # raised by the thread that waits
            meeting.error = error

    def _meet(self, meeting: _Meeting):
        """Leaves in the meeting how it has ended, and where it was."""
        store = self._open_store()
        self._find_place(meeting)
        at = meeting.at
        if meeting.abandoned:
            return
        self._post(at, _key(at, self._rank), meeting.payload)
        if self._rank == 0:
            self._posted.append((at, _verdict_key(at)))
        keys = [_key(at, peer) for peer in range(self._size)]
        missing = self._await(keys, meeting, until_decided=True)
        verdict = self._claim(at, self._describe(missing, meeting) if missing else None)
        if verdict is not None and verdict.is_past(self._rank, self._engine_calls):
            meeting.at = at.next_era()
            self._meet(meeting)
            return
        if verdict is not None:
            meeting.failure = verdict
            return
        if store.has_extended_api():
            values = store.multi_get(keys)
        else:
            values = [store.get(key) for key in keys]
        self._leave(meeting)
        meeting.values = values

    def _find_place(self, meeting: _Meeting):
        """Finds out which meeting this is, if the last one is undecided, or the era has ended."""
        if meeting.after is not None:
            self._find_place(meeting.after)
            last, meeting.after = meeting.after, None
            unheard = Failure([self._rank], last.call, last.timeout_seconds)
            unheard = unheard._replace(engine_calls=self._engine_calls)
            failed = self._claim(last.at, unheard) is not None
            meeting.at = last.at.next_era() if failed else last.at.following()
        while meeting.resumes and self._store.check([_end_key(meeting.at.era)]):
            meeting.at = meeting.at.next_era()

    def _claim(self, at: Position, failure: Failure | None) -> Failure | None:
        """How the meeting has ended, which the first claim decides; None: all came."""
        claim = _COMPLETE if failure is None else json.dumps(failure)
        verdict = self._store.compare_set(_verdict_key(at), "", claim).decode()
        return None if verdict == _COMPLETE else Failure(*json.loads(verdict))

    def _describe(self, missing: list[int], meeting: _Meeting) -> Failure:
        end = _end_key(meeting.at.era)
        reason = self._store.get(end).decode() if self._store.check([end]) else ""
        note = "" if reason else self._in_engine(missing) + self._elsewhere(missing)
        seconds, calls = meeting.timeout_seconds, self._engine_calls
        return Failure(missing, meeting.call, seconds, reason, note, calls)

    def _calls_at(self, at: Position) -> str:
        """Says what the other ranks have called that are in that meeting."""
        store, calls = self._open_store(), []
        for peer in range(self._size):
            if peer != self._rank and store.check([_key(at, peer)]):
                calls.append(f"rank {peer} called {pickle.loads(store.get(_key(at, peer)))[0]}")
        return f" ({', '.join(calls)})" if calls else ""

    def _in_engine(self, ranks: list[int]) -> str:
        """Says which of them are in a call of the engine, as far as they have told."""
        calls = []
        for rank in ranks:
            key = f"engine/{rank}"
            told = self._store.get(key).decode() if self._store.check([key]) else ""
            if told:
                calls.append(f"rank {rank} was last in {told}")
        return f" ({', '.join(calls)})" if calls else ""

    def _open_store(self) -> dist.Store:
        """The part of the group's store for this incarnation of the group, counted once."""
        with self._opening:
            if self._store is None:
                # A group that is made anew on the same store gets the same prefix from PyTorch, and
                # must not find what the last one left there.
                self._incarnation = self._group_store.add(_incarnation_key(self._rank), 1)
                self._store = dist.PrefixStore(f"mok/{self._incarnation}", self._group_store)
            return self._store

    def _elsewhere(self, ranks: list[int]) -> str:
        """Says which of them are in another incarnation of the group, as far as the store knows."""
        store, places = self._group_store, []
        for rank in ranks:
            key = _incarnation_key(rank)
            number = int(store.get(key)) if store.check([key]) else self._incarnation
            if number != self._incarnation:
                places.append(f"rank {rank} in its number {number}")
        if not places:
            return ""
        return (
            f" (rank {self._rank} is in its group number {self._incarnation} of this name on this "
            f"store, {', '.join(places)}: a group that is destroyed and made anew has to be so on "
            "every rank)"
        )

    def _post(self, at: Position, key: str, value: bytes):
        self._posted.append((at, key))
        self._store.set(key, value)

    def _await(self, keys: list[str], meeting: _Meeting, *, until_decided: bool) -> list[int]:
        """Waits for a key of each rank, or for the end of the meeting; the ranks without one."""
        pause = _FIRST_PAUSE_SECONDS
        ends = [_verdict_key(meeting.at), _end_key(meeting.at.era)]
        while not self._store.check(keys):
            # Asked for late: they rarely come before the keys.
            asks = until_decided and pause == _LAST_PAUSE_SECONDS
            if meeting.is_over() or (asks and any(self._store.check([key]) for key in ends)):
                return [peer for peer, key in enumerate(keys) if not self._store.check([key])]
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        return []

    def _leave(self, meeting: _Meeting):
        """Deletes what nobody reads any more, and says that this rank has read everything."""
        stale = [key for at, key in self._posted if at != meeting.at]
        self._posted = [posted for posted in self._posted if posted[0] == meeting.at]
        for key in stale:
            self._store.delete_key(key)
        if self._keeper is None:
            return
        self._post(meeting.at, _left_key(meeting.at, self._rank), b"")
        if self._rank == self._keeper:
            # Its process may end right after this meeting, and the store with it. The next meeting
            # will miss a rank that dies meanwhile.
            keys = [_left_key(meeting.at, peer) for peer in range(self._size)]
            self._await(keys, meeting, until_decided=False)

    def _store_is_gone(self) -> str:
        keeper = "none of its ranks" if self._keeper is None else f"rank {self._keeper}"
        return f"rank {self._rank}: the process group's store, kept by {keeper}, cannot be reached"


def _incarnation_key(rank: int) -> str:
    return f"mok/incarnation/{rank}"


def _key(at: Position, rank: int) -> str:
    """Where a rank posts its call and value."""
    return f"{at.era}/{at.index}/{rank}"


def _verdict_key(at: Position) -> str:
    """How the meeting has ended."""
    return f"{at.era}/{at.index}/verdict"


def _left_key(at: Position, rank: int) -> str:
    """There once a rank has read all values."""
    return f"{at.era}/{at.index}/{rank}/left"


def _end_key(era: int) -> str:
    """There once a rank has given up in the engine in that era."""
    return f"{era}/end"


def _in_time(ask: Callable[[], Any]) -> Any:
    """What the store answers; None if it fails or does not answer: nobody depends on it."""
    answers = []

    def run():
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_GRACE_SECONDS)
    return answers[0] if answers else None


class _Meeting:
    """One meeting as one rank sees it; shared by the thread that meets and the one that waits.

    Attributes:
      at: where it is; before the thread has begun, where it is if the last one was complete.
      after: the last meeting, if it is not known how that has ended.
      values, failure, error: how it has ended; all None: the store has not answered.
      abandoned: nobody waits for the result any more.
    """

    def __init__(self, call: str, timeout_seconds: float, resumes: bool, at: Position):
        self.call = call
        self.timeout_seconds = timeout_seconds
        self.resumes = resumes
        self.at = at
        self.after: _Meeting | None = None
        self.payload = b""
        self.values: list[bytes] | None = None
        self.failure: Failure | None = None
        self.error: Exception | None = None
        self.abandoned = False
        self._deadline = time.monotonic() + timeout_seconds

    def is_over(self) -> bool:
        """Whether nobody waits for the result any more."""
        return self.abandoned or time.monotonic() >= self._deadline
