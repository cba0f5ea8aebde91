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

# Ranks usually come within a millisecond of each other; the store is asked less often later.
_FIRST_PAUSE_SECONDS = 20e-6
_LAST_PAUSE_SECONDS = 5e-3
# How much longer than the timeout the store may take to answer.
_GRACE_SECONDS = 2.0
_COMPLETE = "complete"

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

    In a meeting each rank posts its value and waits for the others'. Whether all came is decided
    once, by whoever is first to see or to miss them all (compare_set): either every rank gets all
    values, or every rank raises, one that comes too late included. So the ranks stay in step, and
    may meet again.

    Keys live under "mok/<incarnation>/<meeting>/". A rank posts for meeting n + 1 only after it has
    read n, so whoever completes n + 1 may delete what it posted for n.
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
        self._next_meeting = 0
        self._posted: list[str] = []  # own keys in the store, of this meeting and earlier ones

    def exchange(self, value: Any, timeout_seconds: float) -> list[Any]:
        """The values of all ranks, in rank order. Collective.

        Raises:
          RankTimeoutError: on every rank, when one does not come within the timeout of another.
        """
        index = self._next_meeting
        self._next_meeting += 1  # whatever fails: the other ranks count this meeting
        meeting = _Meeting(index, timeout_seconds, pickle.dumps(value))
        # In a thread: a call of a store whose process is stopped, not dead, never returns.
        thread = threading.Thread(target=self._run, args=(meeting,), daemon=True)
        thread.start()
        try:
            thread.join(timeout_seconds + _GRACE_SECONDS)
        finally:
            meeting.abandoned = True
        if meeting.error is not None:
            raise meeting.error
        if meeting.values is None:
            raise RankTimeoutError(f"{self._store_is_gone()}: no answer in {timeout_seconds} s")
        return [pickle.loads(posted) for posted in meeting.values]

    def leave_notice(self, name: str, text: str):
        """Leaves a text for ranks that come late, unless one is there. Not collective."""
        _in_time(lambda: self._open_store().compare_set(f"notice/{name}", "", text))

    def find_notice(self, name: str) -> str | None:
        """What leave_notice left, or None. Not collective."""

        def find() -> str | None:
            store, key = self._open_store(), f"notice/{name}"
            return store.get(key).decode() if store.check([key]) else None

        return _in_time(find)

    def _run(self, meeting: _Meeting):
        try:
            meeting.values = self._meet(meeting)
        except dist.DistNetworkError as error:
            meeting.error = RankTimeoutError(f"{self._store_is_gone()}: {error}")
            meeting.error.__cause__ = error
        except Exception as error:  # raised by the thread that waits
            meeting.error = error

    def _meet(self, meeting: _Meeting) -> list[bytes]:
        store = self._open_store()
        self._post(meeting.key(self._rank), meeting.payload)
        if self._rank == 0:
            self._posted.append(meeting.verdict_key)
        keys = [meeting.key(peer) for peer in range(self._size)]
        missing = self._await(keys, meeting, meeting.verdict_key)
        claim = json.dumps([missing, meeting.timeout_seconds]) if missing else _COMPLETE
        verdict = store.compare_set(meeting.verdict_key, "", claim).decode()
        if verdict != _COMPLETE:
            missing, waited = json.loads(verdict)
            late = " came too late" if self._rank in missing else ""
            raise RankTimeoutError(
                f"rank {self._rank}{late}: ranks {missing} of the process group did not come "
                f"within {waited:g} s{self._who_is_elsewhere(missing)}"
            )
        if store.has_extended_api():
            values = store.multi_get(keys)
        else:
            values = [store.get(key) for key in keys]
        self._leave(meeting)
        return values

    def _open_store(self) -> dist.Store:
        """The part of the group's store for this incarnation of the group, counted once."""
        with self._opening:
            if self._store is None:
                # A group that is made anew on the same store gets the same prefix from PyTorch, and
                # must not find what the last one left there.
                self._incarnation = self._group_store.add(_incarnation_key(self._rank), 1)
                self._store = dist.PrefixStore(f"mok/{self._incarnation}", self._group_store)
            return self._store

    def _who_is_elsewhere(self, ranks: list[int]) -> str:
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

    def _post(self, key: str, value: bytes):
        self._posted.append(key)
        self._store.set(key, value)

    def _await(self, keys: list[str], meeting: _Meeting, verdict_key: str | None) -> list[int]:
        """Waits for a key of each rank, or for the verdict; the ranks that have not come."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._store.check(keys):
            # Asked for late: the verdict rarely comes before the keys.
            decided = verdict_key is not None and pause == _LAST_PAUSE_SECONDS
            if meeting.is_over() or (decided and self._store.check([verdict_key])):
                return [peer for peer, key in enumerate(keys) if not self._store.check([key])]
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        return []

    def _leave(self, meeting: _Meeting):
        """Deletes what nobody reads any more, and says that this rank has read everything."""
        stale = [key for key in self._posted if not meeting.owns(key)]
        self._posted = [key for key in self._posted if meeting.owns(key)]
        for key in stale:
            self._store.delete_key(key)
        if self._keeper is None:
            return
        self._post(meeting.left_key(self._rank), b"")
        if self._rank == self._keeper:
            # Its process may end right after this meeting, and the store with it. The next meeting
            # will miss a rank that dies meanwhile.
            self._await([meeting.left_key(peer) for peer in range(self._size)], meeting, None)

    def _store_is_gone(self) -> str:
        keeper = "none of its ranks" if self._keeper is None else f"rank {self._keeper}"
        return f"rank {self._rank}: the process group's store, kept by {keeper}, cannot be reached"


def _incarnation_key(rank: int) -> str:
    return f"mok/incarnation/{rank}"


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
    """One meeting as one rank sees it; shared by the thread that meets and the one that waits."""

    def __init__(self, index: int, timeout_seconds: float, payload: bytes):
        self.timeout_seconds = timeout_seconds
        self.payload = payload
        self.verdict_key = f"{index}/verdict"
        self.values: list[bytes] | None = None
        self.error: Exception | None = None
        self.abandoned = False
        self._index = index
        self._deadline = time.monotonic() + timeout_seconds

    def key(self, rank: int) -> str:
        """Where a rank posts its value."""
        return f"{self._index}/{rank}"

    def left_key(self, rank: int) -> str:
        """There once a rank has read all values."""
        return f"{self._index}/{rank}/left"

    def owns(self, key: str) -> bool:
        """Whether the key is one of this meeting."""
        return key.startswith(f"{self._index}/")

    def is_over(self) -> bool:
        """Whether nobody waits for the result any more."""
        return self.abandoned or time.monotonic() >= self._deadline
