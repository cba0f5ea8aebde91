"""What meetings of ranks in a store and in one process's memory have in common."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_WATCH_SECONDS = 0.5


class Position(NamedTuple):
    """Where a rank is in the sequence of its group's meetings.

    An era ends with the first failure: of a meeting, or of a call of the engine, in which ranks
    wait for each other without a meeting. Every rank hears of it once, wherever it has waited, and
    is in step with the others at the beginning of the next era.
    """

    era: int
    index: int

    def following(self) -> Position:
        """After a meeting that all ranks have come to."""
        return Position(self.era, self.index + 1)

    def next_era(self) -> Position:
        """After a failure."""
        return Position(self.era + 1, 0)


class Failure(NamedTuple):
    """Why a meeting has failed, decided once for all ranks.

    Attributes:
      missing: the ranks that did not come.
      call: what those that came have called.
      seconds: how long one of them has waited.
      reason: the text of a rank that gave up in a call of the engine meanwhile, or "".
      note: what is known of the missing ranks, or "".
      engine_calls: how many calls of the engine one that came had begun since the last meeting that
        all ranks came to.
    """

    missing: list[int]
    call: str
    seconds: float
    reason: str = ""
    note: str = ""
    engine_calls: int = 0

    def is_past(self, rank: int, engine_calls: int) -> bool:
        """Whether a missing rank has been with the others since then: it has not made this call at
        all, and is not late for it.

        engine_calls: how many the rank has begun since the last meeting that all came to, none in
          vain: it has met the others there.
        """
        return rank in self.missing and engine_calls > self.engine_calls

    def text(self, rank: int, call: str, group: str) -> str:
        """As a rank raises it that has called `call`; group: what it is called."""
        late = " came too late" if rank in self.missing else ""
        if late and call != self.call:
            late = f", which called {call},{late}"
        text = f"rank {rank}{late}: ranks {self.missing} of {group} did not come to {self.call}"
        if self.reason:
            return f"{text}: {self.reason}"
        return f"{text} within {self.seconds:g} s{self.note}"


def values_of_call(answers: Sequence[tuple[str, Any]]) -> list[Any]:
    """The values of answers (call, value), in rank order.

    Raises:
      ValueError: the ranks have made different calls.
    """
    first = answers[0][0]
    for rank, (other, _) in enumerate(answers):
        if other != first:
            raise ValueError(
                f"ranks disagree on the collective call: rank 0 called {first}, rank {rank} called "
                f"{other}"
            )
    return [value for _, value in answers]


class EngineCall(NamedTuple):
    """A call of the engine that a rank is in."""

    call: str
    began: float  # time.time()

    def __str__(self) -> str:
        return f"{self.call}, since {time.strftime('%H:%M:%S', time.localtime(self.began))}"


class CallWatch:
    """Tells of calls of the engine that last, at no cost for those that do not.

    A thread looks at `current` from time to time. It ends when nobody refers to the watch.
    """

    def __init__(self, tell: Callable[[str], None]):
        """tell: is given an EngineCall's text, and "" once that call has ended; a method, whose
        object is not kept alive."""
        self._tell = weakref.WeakMethod(tell)
        self._current: EngineCall | None = None
        self._is_watching = False

    def set_current(self, call: EngineCall | None):
        """The call that this rank is in; None: none."""
        self._current = call
        if not self._is_watching:
            self._is_watching = True
            watch = weakref.ref(self)
            threading.Thread(target=_watch_calls, args=(watch,), daemon=True).start()

    def look(self, seen: EngineCall | None, told: EngineCall | None) -> tuple:
        """Tells what has to be told, given what was seen and told last; returns both anew."""
        current, tell = self._current, self._tell()
        if tell is not None and told is not current and (told is not None or current is seen):
            tell("" if current is None or current is not seen else str(current))
            told = current if current is seen else None
        return current, told


def _watch_calls(reference: weakref.ref):
    seen = told = None
    while (watch := reference()) is not None:
        try:
            seen, told = watch.look(seen, told)
        except Exception:
            return  # the store is gone, which the calls themselves will notice
        del watch
        time.sleep(_WATCH_SECONDS)
