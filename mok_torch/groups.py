"""The ranks of a workspace: one rank, a torch.distributed group, or threads of this process.

All three offer the same small interface, which workspaces use when they are created or grown:

  rank, size           this rank and the number of ranks
  ranks_in_process     ranks that share this process and its cores
  workspaces           the cache of get_workspace, which lives as long as the group
  exchange(value, timeout_seconds)
                       the values of all ranks, in rank order (collective); a rank that does not
                       come in time is named by a RankTimeoutError on every other
  host_record()        what create_engine needs from every rank, to be exchanged
  create_engine(...)   the C++ workspace of this rank (collective)
  leave_notice(name, text), find_notice(name)
                       the first text that a rank has left under that name, for ranks that come
                       late; None: there is none
  shares_device        whether the ranks, threads of this process, run on one GPU in turn
  device_heap(...)     zeroed GPU memory of this rank that all ranks can access (collective)

Layers never use it: their ranks meet in the engine's own handshakes.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok_torch import _C
from mok_torch.errors import RankTimeoutError
from mok_torch.scalars import as_integer
from mok_torch.store_meetings import meetings_of

# get_workspace's cache of each torch.distributed group. Nothing in it refers to its group.
_distributed_workspaces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


_MAX_RANKS = 4096  # of an in-process group; as between processes

# Everything that makes or grows a workspace begins with the same meeting.
WORKSPACE_CALL = "a first forward, get_workspace or grow"


def exchange_in(call: str, group: Any, value: Any, timeout_seconds: float) -> list[Any]:
    """group.exchange, as the first one of a collective call.

    Raises:
      ValueError: on every rank, if they have made different calls. They are in step afterwards.
    """
    answers = group.exchange((call, value), timeout_seconds)
    for rank, (other, _) in enumerate(answers):
        if other != answers[0][0]:
            raise ValueError(
                f"ranks disagree on the collective call: rank 0 called {answers[0][0]}, "
                f"rank {rank} called {other}"
            )
    return [value for _, value in answers]


class SingleRank:
    """No group: this rank is alone."""

    rank = 0
    size = 1
    ranks_in_process = 1
    shares_device = False
    workspaces: dict = {}  # of the process

    def exchange(self, value: Any, timeout_seconds: float) -> list[Any]:
        del timeout_seconds
        return [value]

    def host_record(self) -> Any:
        return {"name": ""}

    def create_engine(self, shape, records, timeout_seconds: float) -> _C.Workspace:
        del records
        return _C.Workspace.single(shape, timeout_seconds)

    def device_heap(
        self, num_bytes: int, device: torch.device, timeout_seconds: float
    ) -> tuple[list[Tensor], list[int]]:
        """What keeps the memory alive, own tensor (uint8) first, and every rank's address."""
        del timeout_seconds
        heap = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return [heap], [heap.data_ptr()]


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
        self.size = size = as_integer("size", size, 1, _MAX_RANKS)
        self._condition = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._given_up: dict[int, str] = {}  # rounds in which a rank has waited in vain
        self._notices: dict[str, str] = {}
        self._members = [InProcessMember(self, rank) for rank in range(size)]

    def member(self, rank: int) -> InProcessMember:
        """The group as rank `rank` sees it."""
        return self._members[as_integer("rank", rank, 0, self.size - 1)]

    def _exchange(self, rank: int, round_index: int, value: Any, timeout_seconds: float):
        with self._condition:
            if round_index in self._given_up:
                reason = self._given_up[round_index]
                raise RankTimeoutError(f"rank {rank} came too late: {reason}")
            values = self._rounds.setdefault(round_index, {})
            values[rank] = value
            self._condition.notify_all()
            complete = self._condition.wait_for(lambda: len(values) == self.size, timeout_seconds)
            if not complete:
                missing = sorted(set(range(self.size)) - set(values))
                reason = (
                    f"rank {rank}: ranks {missing} of the in-process group did not come within "
                    f"{timeout_seconds} s"
                )
                self._given_up.setdefault(round_index, reason)
                raise RankTimeoutError(reason)
            # A rank enters round n + 1 only after it has left round n: n - 1 is over for all.
            self._rounds.pop(round_index - 1, None)
            return [values[peer] for peer in range(self.size)]


class InProcessMember:
    """One rank of an InProcessGroup; made by InProcessGroup.member."""

    def __init__(self, group: InProcessGroup, rank: int):
        self.group = group
        self.rank = rank
        self.size = group.size
        self.ranks_in_process = group.size
        self.shares_device = group.size > 1
        self.workspaces: dict = {}
        self._round = 0

    def exchange(self, value: Any, timeout_seconds: float) -> list[Any]:
        """The values of all ranks, in rank order. Collective."""
        round_index = self._round
        self._round += 1
        return self.group._exchange(self.rank, round_index, value, timeout_seconds)

    def host_record(self) -> Any:
        # Rank 0's handle serves all; the others' cost nothing.
        return {"handle": _C.InProcessGroup(self.size), "name": f"mok-{uuid.uuid4().hex}"}

    def leave_notice(self, name: str, text: str):
        self.group._notices.setdefault(name, text)

    def find_notice(self, name: str) -> str | None:
        return self.group._notices.get(name)

    def create_engine(self, shape, records, timeout_seconds: float) -> _C.Workspace:
        if self.size == 1:
            return _C.Workspace.single(shape, timeout_seconds)
        return _C.Workspace.in_process(
            self.rank, self.size, records[0]["handle"], shape, timeout_seconds
        )

    def device_heap(
        self, num_bytes: int, device: torch.device, timeout_seconds: float
    ) -> tuple[list[Tensor], list[int]]:
        """See SingleRank.device_heap. All ranks share one GPU."""
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        heaps = self.exchange(own, timeout_seconds)
        for rank, heap in enumerate(heaps):
            if heap.device != heaps[0].device:
                raise ValueError(
                    "device: expected the same GPU on all ranks of an in-process group, got "
                    f"{heaps[0].device} on rank 0 and {heap.device} on rank {rank}"
                )
        return [own, *heaps], [heap.data_ptr() for heap in heaps]


class DistributedGroup:
    """A torch.distributed process group whose processes share one machine's memory."""

    ranks_in_process = 1
    shares_device = False

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise _not_a_member()

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

    def exchange(self, value: Any, timeout_seconds: float) -> list[Any]:
        """The values of all ranks, in rank order. Collective."""
        return meetings_of(self.group).exchange(value, timeout_seconds)

    def host_record(self) -> Any:
        return {"memory": _shared_memory_identity(), "name": f"mok-{uuid.uuid4().hex}"}

    def leave_notice(self, name: str, text: str):
        meetings_of(self.group).leave_notice(name, text)

    def find_notice(self, name: str) -> str | None:
        return meetings_of(self.group).find_notice(name)

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

    def device_heap(
        self, num_bytes: int, device: torch.device, timeout_seconds: float
    ) -> tuple[list[Any], list[int]]:
        """See SingleRank.device_heap. PyTorch's symmetric memory, over NVLink."""
        import torch.distributed._symmetric_memory as symmetric_memory

        identities = self.exchange(_device_identity(device), timeout_seconds)
        for rank, identity in enumerate(identities):
            first = identities.index(identity)
            if first != rank:
                raise ValueError(
                    f"device: expected a GPU for each rank, got {identity} on ranks {first} and "
                    f"{rank} (torch.cuda.set_device(local_rank) before)"
                )
        # Nothing here uses NVLink multicast, and PyTorch shall not set it up either: it reads this
        # when it maps the peers' memory.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        heap = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        heap.zero_()
        torch.cuda.synchronize(device)
        mapped = symmetric_memory.rendezvous(heap, self.group.group_name)
        # Every rank's zeros are in place before any rank goes on.
        self.exchange(None, timeout_seconds)
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


def as_group(group) -> SingleRank | InProcessMember | DistributedGroup:
    """None, an InProcessMember or a torch.distributed group as this module's interface."""
    if group is None:
        return SingleRank()
    if isinstance(group, InProcessMember):
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
