"""The ranks of a workspace: one rank, a torch.distributed group, or threads of this process.

All three offer the same small interface:

  rank, size           this rank and the number of ranks
  ranks_in_process     ranks that share this process and its cores
  workspaces           the cache of get_workspace, which lives as long as the group
  shares_device        whether the ranks, threads of this process, run on one GPU in turn
  exchange(call, value, timeout_seconds, resumes=False)
                       the values of all ranks, in rank order (collective); a rank that does not
                       come in time is named by a RankTimeoutError on every other, ranks that have
                       made different calls all raise ValueError (StoreMeetings.exchange)
  host_record()        what create_engine needs from every rank, to be exchanged
  create_engine(...)   the C++ workspace of this rank (collective)
  check_device(device, timeout_seconds)
                       raises, on every rank, unless the ranks' GPUs are what they can work on
                       (collective)
  new_heap(num_bytes, device)
                       GPU memory (uint8) for share_heap; zero once the current stream is done
  share_heap(heap, timeout_seconds)
                       what keeps all ranks' heaps alive, own tensor first, and the address of each
                       (collective)

and those of several ranks:

  era                  changes when this rank hears of a failure
  enter_engine(call)   says which call of the engine this rank is in; None: in none
  give_up(name, text)  tells the other ranks that this one has waited in vain in the engine, for
                       the first time in the workspace of that name; what they have called instead
  find_notice(name)    the first such text of the workspace, for ranks that come late, or None

In a forward or backward ranks meet in the engine's own handshakes, not here, unless they are
threads that share a GPU or count their experts on one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok_torch import _C, symmetric_heap
from mok_torch.config import MoKConfig
from mok_torch.errors import RankTimeoutError, as_shared_error
from mok_torch.meetings import EngineCall, Failure, Position, values_of_call
from mok_torch.scalars import as_integer
from mok_torch.store_meetings import meetings_of

# get_workspace's cache of each torch.distributed group. Nothing in it refers to its group.
_distributed_workspaces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

# Everything that makes or grows a workspace begins with the same meeting, which resumes what a
# failure in the engine has interrupted.
WORKSPACE_CALL = "a first forward, get_workspace or grow"
MAKING_CALL = "the rest of a first forward, get_workspace or grow"


class SingleRank:
    """No group: this rank is alone."""

    rank = 0
    size = 1
    ranks_in_process = 1
    shares_device = False
    workspaces: dict = {}  # of the process

    def __repr__(self):
        return "one rank"

    def exchange(
        self, call: str, value: Any, timeout_seconds: float, *, resumes: bool = False
    ) -> list[Any]:
        del call, timeout_seconds, resumes
        return [value]

    def host_record(self) -> Any:
        return {"name": ""}

    def create_engine(self, shape, records, timeout_seconds: float) -> _C.Workspace:
        del records
        return _C.Workspace.single(shape, timeout_seconds)

    def check_device(self, device: torch.device, timeout_seconds: float):
        pass

    def new_heap(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def share_heap(self, heap: Tensor, timeout_seconds: float) -> tuple[list[Any], list[int]]:
        del timeout_seconds
        return [heap], [heap.data_ptr()]


ONE_RANK = SingleRank()


class InProcessGroup:
    """Ranks that are threads of this process, for tests, notebooks and debugging.

    Each thread passes its own `group.member(rank)` wherever a process group is expected:

        group = InProcessGroup(2)
        # in thread `rank`:
        workspace = create_workspace(config, group.member(rank), ...)

    On a GPU, which the ranks then share, autograd's backward is called under
    torch.autograd.set_multithreading_enabled(False): it would run all ranks' in one thread.
    """

    def __init__(self, size: int):
        self.size = size = as_integer("size", size, 1, _C.MAX_RANKS)
        self._condition = threading.Condition()
        self._rounds: dict[Position, dict[int, tuple[str, Any]]] = {}
        self._failures: dict[Position, Failure] = {}  # of rounds
        self._ends: dict[int, str] = {}  # of eras: why a rank gave up in the engine
        self._notices: dict[str, tuple[int, str]] = {}  # era and text, by the workspace's name
        self._members = [InProcessMember(self, rank) for rank in range(size)]

    def member(self, rank: int) -> InProcessMember:
        """The group as rank `rank` sees it."""
        return self._members[as_integer("rank", rank, 0, self.size - 1)]

    def _place(self, member: InProcessMember, at: Position, resumes: bool) -> Position:
        """Where a rank's next round is: later, if what ended this era is no error of it."""
        while (resumes and at.era in self._ends) or (
            at in self._failures and self._failures[at].is_past(member.rank, member.engine_calls)
        ):
            at = at.next_era()
        return at

    def _exchange(self, member: InProcessMember, at: Position, timeout_seconds: float) -> list:
        """What all ranks have in the round; member's is there. Raises how the round has failed."""
        answers = self._rounds[at]

        def is_over() -> bool:
            return len(answers) == self.size or at in self._failures or at.era in self._ends

        self._condition.notify_all()
        self._condition.wait_for(is_over, timeout_seconds)
        call = answers[member.rank][0]
        if at in self._failures or len(answers) < self.size:
            missing = sorted(set(range(self.size)) - set(answers))
            inside = [(rank, self._members[rank].engine_call) for rank in missing]
            notes = [f"rank {rank} was last in {engine}" for rank, engine in inside if engine]
            note = f" ({', '.join(notes)})" if notes else ""
            reason = self._ends.get(at.era, "")
            calls = member.engine_calls
            failure = Failure(missing, call, timeout_seconds, reason, note, calls)
            failure = self._failures.setdefault(at, failure)
            self._condition.notify_all()
            raise RankTimeoutError(failure.text(member.rank, call, "the in-process group"))
        # A rank enters a round only after it has left the one before: earlier ones are over.
        for earlier in [other for other in self._rounds if other < at]:
            del self._rounds[earlier]
        return [answers[peer] for peer in range(self.size)]

    def _calls_at(self, at: Position) -> str:
        """Says what the ranks have called that are in that round."""
        waiting = sorted(self._rounds.get(at, {}).items())
        calls = [f"rank {rank} called {call}" for rank, (call, _) in waiting]
        return f" ({', '.join(calls)})" if calls else ""


class InProcessMember:
    """One rank of an InProcessGroup; made by InProcessGroup.member."""

    def __init__(self, group: InProcessGroup, rank: int):
        self.group = group
        self.rank = rank
        self.size = group.size
        self.ranks_in_process = group.size
        self.shares_device = group.size > 1
        self.workspaces: dict = {}
        self.engine_call: EngineCall | None = None
        self.engine_calls = 0  # begun since the last round that all ranks came to
        self._next = Position(0, 0)

    @property
    def era(self) -> int:
        return self._next.era

    def exchange(
        self, call: str, value: Any, timeout_seconds: float, *, resumes: bool = False
    ) -> list[Any]:
        """The values of all ranks, in rank order. Collective. See StoreMeetings.exchange."""
        group = self.group
        with group._condition:
            at = group._place(self, self._next, resumes)
            self._next = at.next_era()  # unless all come
            group._rounds.setdefault(at, {})[self.rank] = (call, value)
            answers = group._exchange(self, at, timeout_seconds)
            self._next, self.engine_calls = at.following(), 0
        return values_of_call(answers)

    def enter_engine(self, call: str | None):
        self.engine_call = None if call is None else EngineCall(call, time.time())
        self.engine_calls += call is not None

    def give_up(self, name: str, text: str) -> str:
        """See StoreMeetings.give_up."""
        group = self.group
        with group._condition:
            at, self._next = self._next, self._next.next_era()
            calls = group._calls_at(at)
            group._notices.setdefault(name, (at.era, text + calls))
            group._ends.setdefault(at.era, text + calls)
            group._condition.notify_all()
        return calls

    def find_notice(self, name: str) -> str | None:
        """See StoreMeetings.find_notice."""
        era, text = self.group._notices.get(name, (-1, None))
        if era == self._next.era:
            self._next = self._next.next_era()
        return text

    def host_record(self) -> Any:
        # Rank 0's handle serves all; the others' cost nothing.
        return {"handle": _C.InProcessGroup(self.size), "name": f"mok-{uuid.uuid4().hex}"}

    def create_engine(self, shape, records, timeout_seconds: float) -> _C.Workspace:
        if self.size == 1:
            return _C.Workspace.single(shape, timeout_seconds)
        return _C.Workspace.in_process(
            self.rank, self.size, records[0]["handle"], shape, timeout_seconds
        )

    def check_device(self, device: torch.device, timeout_seconds: float):
        """All ranks share one GPU."""
        devices = self.exchange(MAKING_CALL, device, timeout_seconds)
        for rank, other in enumerate(devices):
            if other != devices[0]:
                raise ValueError(
                    "device: expected the same GPU on all ranks of an in-process group, got "
                    f"{devices[0]} on rank 0 and {other} on rank {rank}"
                )

    def new_heap(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def share_heap(self, heap: Tensor, timeout_seconds: float) -> tuple[list[Any], list[int]]:
        heaps = self.exchange(MAKING_CALL, heap, timeout_seconds)
        return [heap, *heaps], [other.data_ptr() for other in heaps]


class DistributedGroup:
    """A torch.distributed process group whose processes share one machine's memory."""

    ranks_in_process = 1
    shares_device = False
    was_made = False  # one, in this process

    def __init__(self, group: dist.ProcessGroup):
        DistributedGroup.was_made = True
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise _not_a_member()
        self._known_meetings = weakref.ref(meetings_of(group))  # as long as the group lives

    @property
    def workspaces(self) -> dict:
        return _distributed_workspaces.setdefault(self.group, {})

    @property
    def group(self) -> dist.ProcessGroup:
        """The torch.distributed group; held weakly, so that it can be destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this workspace has been destroyed")
        return group

    @property
    def era(self) -> int:
        meetings = self._known_meetings()
        return 0 if meetings is None else meetings.era

    def exchange(
        self, call: str, value: Any, timeout_seconds: float, *, resumes: bool = False
    ) -> list[Any]:
        """See StoreMeetings.exchange."""
        return meetings_of(self.group).exchange(call, value, timeout_seconds, resumes=resumes)

    def host_record(self) -> Any:
        return {"memory": _shared_memory_identity(), "name": f"mok-{uuid.uuid4().hex}"}

    def enter_engine(self, call: str | None):
        if (meetings := self._known_meetings()) is not None:
            meetings.enter_engine(None if call is None else EngineCall(call, time.time()))

    def give_up(self, name: str, text: str) -> str:
        """See StoreMeetings.give_up."""
        meetings = self._known_meetings()
        return "" if meetings is None else meetings.give_up(name, text)

    def find_notice(self, name: str) -> str | None:
        """See StoreMeetings.find_notice."""
        meetings = self._known_meetings()
        return None if meetings is None else meetings.find_notice(name)

    def create_engine(self, shape, records, timeout_seconds: float) -> _C.Workspace:
        for peer, record in enumerate(records):
            if record["memory"] != records[0]["memory"]:
                raise ValueError(
                    "group: all ranks must share the memory of one machine (/dev/shm), but rank 0 "
                    f"is on {records[0]['memory']} and rank {peer} on {record['memory']}"
                )
        return _C.Workspace.shared_memory(
            self.rank, self.size, records[0]["name"], shape, timeout_seconds
        )

    def check_device(self, device: torch.device, timeout_seconds: float):
        """Each rank has a GPU of its own."""
        identities = self.exchange(MAKING_CALL, _device_identity(device), timeout_seconds)
        for rank, identity in enumerate(identities):
            first = identities.index(identity)
            if first != rank:
                raise ValueError(
                    f"device: expected a GPU for each rank, got {identity} on ranks {first} and "
                    f"{rank} (torch.cuda.set_device(local_rank) before)"
                )

    def new_heap(self, num_bytes: int, device: torch.device) -> Tensor:
        return symmetric_heap.new_heap(num_bytes, device)

    def share_heap(self, heap: Tensor, timeout_seconds: float) -> tuple[list[Any], list[int]]:
        """Through PyTorch's symmetric memory, where the process group's timeout counts."""
        del timeout_seconds
        mapped = symmetric_heap.map_heap(heap, self.group.group_name)
        return [heap, mapped], list(mapped.buffer_ptrs)


def _device_identity(device: torch.device) -> str:
    """Names the GPU, whichever process asks."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid} of {os.uname().nodename}"


def _shared_memory_identity() -> str:
    """Equal for two processes exactly when they see the same /dev/shm."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:
        machine = os.uname().nodename
    return f"{os.uname().nodename} (boot {machine}, /dev/shm {os.stat('/dev/shm').st_dev})"


def _not_a_member() -> ValueError:
    return ValueError(
        "group: this process is not a member of the process group; only its members may use it "
        "(dist.new_group has returned GroupMember.NON_GROUP_MEMBER)"
    )


def warn_of_no_group(what: str):
    """Warns where None is most likely torch.distributed.group.WORLD before there is one."""
    size = os.environ.get("WORLD_SIZE", "")  # of torchrun and its like
    if not (size.isdecimal() and int(size) > 1 and dist.is_available()):
        return
    if not dist.is_initialized() and not DistributedGroup.was_made:
        warnings.warn(
            f"{what}: group is None, which makes it a layer of one rank, but WORLD_SIZE is {size} "
            "and torch.distributed has no process group yet: until init_process_group, "
            "torch.distributed.group.WORLD is None. Leave group out where one rank is meant",
            stacklevel=3,
        )


@contextlib.contextmanager
def raising_on_every_rank(group, config, meets: bool = True):
    """Sends an error that the block raises to the others, which then wait in get_workspace.

    Args:
      group: as as_group has made it.
      config: its timeout_seconds counts, if it is a MoKConfig at all.
      meets: False: nobody waits.
    """
    try:
        yield
    except Exception as error:
        if not meets:
            raise
        try:
            timeout_seconds = config.timeout_seconds
        except Exception:  # the config itself may be what is wrong
            timeout_seconds = MoKConfig().timeout_seconds
        try:
            shared = as_shared_error(error)[0]
            group.exchange(WORKSPACE_CALL, shared, timeout_seconds, resumes=True)
        except Exception as unheard:
            raise error from unheard
        raise


def as_group(group) -> SingleRank | InProcessMember | DistributedGroup:
    """None, an InProcessMember or a torch.distributed group as this module's interface."""
    if group is None:
        return ONE_RANK
    if isinstance(group, (InProcessMember, SingleRank)):
        return group
    if isinstance(group, InProcessGroup):
        raise TypeError("group: pass InProcessGroup(size).member(rank), not the group itself")
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return DistributedGroup(group) if dist.get_world_size(group) != 1 else SingleRank()
    if dist.is_available():
        no_group = dist.GroupMember.NON_GROUP_MEMBER
        if type(group) is type(no_group) and group == no_group:
            raise _not_a_member()
    raise TypeError(
        "group: expected None, a torch.distributed process group or an InProcessGroup member, got "
        f"{type(group).__name__}"
    )
