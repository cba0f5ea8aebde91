"""Workspaces: the symmetric heap, scratch memory and workers of one rank, on a CPU or a GPU.

A workspace serves any number of layers and of live forwards; what a forward leaves for its backward
belongs to the caller. Operators name a workspace by its integer handle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
import weakref
from typing import Any

import torch

from mok_torch import _C
from mok_torch.agreement import Request, agree, together
from mok_torch.checks import as_device
from mok_torch.config import MoKConfig
from mok_torch.cuda_engine import CudaEngine, cuda_device, is_capturing
from mok_torch.dtypes import ENGINE_DTYPES, as_dtype
from mok_torch.errors import RankTimeoutError, as_shared_error
from mok_torch.groups import MAKING_CALL, SingleRank, as_group
from mok_torch.scalars import MAX_SIZE, as_integer

# Stands for the cached workspace of one rank and the shapes at hand.
DEFAULT_HANDLE = 0

_ALONE = contextlib.nullcontext()

_registry_lock = threading.Lock()
_cache_lock = threading.Lock()
_next_handle = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()


class Workspace:
    """One rank's share of the engine; made by get_workspace or create_workspace.

    Attributes:
      rank, ep_size: this rank and the number of ranks.
      hidden_size, topk, dtype: of every layer that uses the workspace.
      num_local_tokens: the most tokens that any rank may pass in one call (see grow). With one
        rank, what there is room for now.
      device: where tensors of a call have to be.
      handle: names the workspace in operators.
    """

    def __init__(self, group, request: Request, device: torch.device):
        """Collective. `request` is agreed."""
        self._group = group
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.rank: int = group.rank
        self.ep_size: int = group.size
        self.hidden_size = request.hidden_size
        self.topk = request.topk
        self.dtype = request.dtype
        self.engine: _C.Workspace | CudaEngine | None = None
        self._captured_engines: list[CudaEngine] = []
        self._growth_lock = threading.Lock()  # threads share the workspace of a single rank
        self._create_engine(request)
        with _registry_lock:
            self.handle = next(_next_handle)
            _by_handle[self.handle] = self

    def _create_engine(self, request: Request):
        self.timeout_seconds = request.timeout_seconds
        # What a rank that gave up has left for this one; "" if this one has given up itself.
        self._left_behind: str | None = None
        self._last_call_began = time.monotonic()
        if self.ep_size > 1:
            self._era = self._group.era  # when it was made, or last looked for who gave up
        if self.on_gpu:
            self._keep_captured_engine()
            self.engine = CudaEngine(self._group, request, self.device)
        else:
            self.engine = self._create_host_engine(request)
        self.num_local_tokens = request.num_local_tokens

    def _create_host_engine(self, request: Request) -> _C.Workspace:
        record = self._group.host_record()
        records = self._group.exchange(MAKING_CALL, record, request.timeout_seconds)
        self._name = records[0]["name"]
        shape = _C.WorkspaceShape(
            request.num_local_tokens, request.hidden_size, request.topk, ENGINE_DTYPES[self.dtype]
        )
        return self._group.create_engine(shape, records, request.timeout_seconds)

    def _keep_captured_engine(self):
        """CUDA graphs hold addresses: what they were captured with outlives growth."""
        if self.engine is not None and self.engine.was_captured:
            self._captured_engines.append(self.engine)

    def keep_graphs_of(self, replaced: Workspace):
        """Keeps what graphs were captured with in a workspace whose place this one takes."""
        if self.on_gpu:
            replaced._keep_captured_engine()
            self._captured_engines += replaced._captured_engines

    def __repr__(self):
        return (
            f"Workspace(rank={self.rank}, ep_size={self.ep_size}, hidden_size={self.hidden_size}, "
            f"topk={self.topk}, dtype={self.dtype}, num_local_tokens={self.num_local_tokens}, "
            f"device={self.device})"
        )

    @property
    def ranks_in_process(self) -> int:
        """Ranks of this group that share this process and its cores."""
        return self._group.ranks_in_process

    def grow(self, num_local_tokens: int):
        """Makes room for num_local_tokens tokens of a rank: the largest that any rank asks for.

        Collective: every rank of the group calls it, at the same point. Contexts and schedules made
        before stay valid.
        """

        def request() -> Request:
            tokens = as_integer("num_local_tokens", num_local_tokens, 0, MAX_SIZE)
            shapes = (self.hidden_size, self.topk, self.dtype, tokens)
            return Request(*shapes, self.timeout_seconds, self.device.type)

        self._grow(agree(self._group, request))

    def require_room(self, name: str, num_tokens: int):
        """Grows a workspace of one rank as needed; with several ranks, raises if it is too small.

        name: the argument that holds the tokens, for the error.
        """
        if num_tokens <= self.num_local_tokens:
            return
        if self.ep_size > 1:
            raise ValueError(
                f"{name}: expected at most {self.num_local_tokens} tokens, the num_local_tokens of "
                f"the workspace, got {num_tokens} (Workspace.grow makes room, for a layer "
                "MoELayer.reserve)"
            )
        # Powers of two: a growing sequence of calls allocates rarely.
        self.grow(1 << max(7, (num_tokens - 1).bit_length()))

    def _grow(self, agreed: Request):
        with self._growth_lock:
            if agreed.num_local_tokens > self.num_local_tokens:
                if self.on_gpu:
                    self._raise_what_was_found()
                self._create_engine(agreed)

    def _raise_what_was_found(self):
        """Raises, on every rank, what kernels of the engine that is to be replaced found wrong."""
        together(self._group, self.timeout_seconds, self.engine.finish)

    def host_call(self, call: str):
        """Surrounds a collective call of the host's engine, in which ranks meet each other.

        A rank that gives up in it tells the others, wherever they are: in a meeting, or in a call
        of this workspace that they come to too late, and that they do not begin then.

        call: its name, for errors.
        """
        return _ALONE if self.ep_size == 1 else self._call_of_ranks(call)

    @contextlib.contextmanager
    def _call_of_ranks(self, call: str):
        now = time.monotonic()
        self._hear_who_gave_up(now)
        self._raise_if_left_behind()
        self._last_call_began = now
        self._group.enter_engine(call)
        try:
            yield
        except RankTimeoutError as error:
            if self._left_behind is not None:
                raise  # once more: the engine remembers
            self._left_behind = ""
            at, waited = time.strftime("%H:%M:%S"), f"{self.timeout_seconds:g} s"
            notice = (
                f"rank {self.rank} gave up at {at}, after waiting for {waited} in {call}: {error}"
            )
            text = f"{error}{self._group.give_up(self._name, notice)}"
            raise RankTimeoutError(text).with_traceback(error.__traceback__) from None
        except Exception as error:
            error.is_shared = True  # every rank raises it; a call around this one need not tell
            raise
        finally:
            self._group.enter_engine(None)

    def _hear_who_gave_up(self, now: float):
        """Finds out whether a rank has given up in this workspace, if one may have."""
        # The others have not waited for the timeout yet if this rank's last call began later: they
        # were in it with this one. But it may have come at the very moment at which they gave up,
        # gone on as if they had met, and heard in a meeting that something has failed.
        late = now - self._last_call_began > self.timeout_seconds
        if self._left_behind is None and (late or self._group.era != self._era):
            self._left_behind = self._group.find_notice(self._name)
            self._era = self._group.era

    def _raise_if_left_behind(self):
        if self._left_behind:
            raise RankTimeoutError(f"rank {self.rank} came too late: {self._left_behind}")

    @contextlib.contextmanager
    def reporting_errors(self, operation: int):
        """Sends an error that the block raises to the ranks that enter `operation` meanwhile."""
        try:
            yield
        except Exception as error:
            self.report(error, operation)
            raise

    def report(self, error: Exception, operation: int):
        """Sends the error of this rank to the ranks that enter `operation` meanwhile."""
        # What came from another rank, or has been sent, is not sent again: nobody waits for it.
        is_news = not isinstance(error, RankTimeoutError) and not hasattr(error, "is_shared")
        if self.ep_size == 1 or not is_news:
            return
        error.is_shared = True
        shared, code = as_shared_error(error)
        with _ALONE if self.on_gpu else self.host_call("a call, which has failed on this rank"):
            self.engine.report_error(operation, code, str(shared))

    def is_usable(self) -> bool:
        """False once a rank has not come to a call within the timeout, or has left for good."""
        try:
            if self.on_gpu:
                self.engine.check_ranks()  # may wait for a pass that runs into its timeout
                self.engine.check_usable()
            else:
                self.check()
        except Exception:  # of the class of the rank's own error
            return False
        return True

    def check(self):
        """Raises the error that made the workspace unusable, if there was one.

        On a GPU: waits for what is queued on the current stream, and also raises what a kernel
        found wrong with its inputs, an expert id out of range for example. Once: the workspace
        works on after that.
        """
        self._raise_if_left_behind()
        if self.on_gpu and not is_capturing(self.device):
            self.engine.synchronize()
        self.engine.check()
        if self.on_gpu:
            self.engine.check_ranks()

    def input_buffer(self, num_tokens: int) -> torch.Tensor:
        """Where a call's x [num_tokens, H] may be written to save its copy to where peers read it.

        On a GPU with several ranks, a part of the symmetric heap, the same for every call: do not
        write it before the kernels of the last call that used it are queued. Else ordinary memory.

        The backward reads x again. It raises RuntimeError if a call with another x, which is copied
        there, came in between; it cannot know whether you have written there yourself since the
        forward, and its gradients are then those of the wrong x. So a training step uses the buffer
        for one layer at most, or gives its layers tensors of their own.
        """
        num_tokens = as_integer("num_tokens", num_tokens, 0, self.num_local_tokens)
        staged = None
        if self.on_gpu:
            staged = self.engine.staged_x(num_tokens, self.hidden_size)
        if staged is not None:
            return staged
        return torch.empty(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)

    def info(self) -> dict[str, int]:
        """heap_bytes and scratch_bytes held now, and num_threads started so far."""
        return self.engine.info()

    def poison(self):
        """For tests: fills all memory of the workspace with NaN."""
        self.engine.poison()


def create_workspace(
    config: MoKConfig | None = None,
    group=None,
    *,
    device: torch.device | str = "cpu",
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Workspace:
    """A new workspace. Collective over the group.

    Args:
      config: only timeout_seconds is read. None: MoKConfig().
      group: None for one rank; a torch.distributed group whose ranks are processes of this
        machine (any backend: they meet through the group's store); or a member of an
        InProcessGroup.
      device: "cpu", or "cuda" for the current GPU; the same kind on every rank.
      num_local_tokens: the most tokens of this rank in one call; the largest of all ranks counts.
        A workspace of one rank grows by itself.
      hidden_size: H, a multiple of 8.
      topk: K.
      dtype: of activations and weights, torch.bfloat16 or, on a CPU, torch.float32.

    Raises:
      ValueError, TypeError: on every rank, when an argument is wrong on one or ranks disagree.
      RankTimeoutError: a rank did not come. ResourceExhaustedError: /dev/shm is too small.
    """
    rank_group = as_group(group)
    shapes = (hidden_size, topk, dtype, num_local_tokens)
    agreed = agree(rank_group, lambda: _request(config, device, *shapes))
    return Workspace(rank_group, agreed, _check_device(device))


def get_workspace(
    config: MoKConfig | None = None,
    group=None,
    *,
    device: torch.device | str = "cpu",
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Workspace:
    """As create_workspace, but the group's cached workspace of these shapes, grown as needed.

    Collective over the group even if the cache has it, because another rank may need it grown. A
    workspace that a timeout made unusable is replaced.
    """
    return workspace_of_layer(
        {}, config, group, device, num_local_tokens, (hidden_size, topk, dtype)
    )


def workspace_of_layer(
    layer: dict[str, Any], config, group, device, num_local_tokens, shapes: tuple
) -> Workspace:
    """get_workspace for a layer: ranks whose layers differ raise ValueError.

    Args:
      layer: see Request.
      shapes: hidden_size, topk and dtype.
    """
    rank_group = as_group(group)
    cache = rank_group.workspaces

    def request() -> Request:
        made = _request(config, device, *shapes, num_local_tokens)
        cached = cache.get((_check_device(device), *shapes))
        usable = cached is not None and cached.is_usable()
        return dataclasses.replace(made, has_cached=usable, layer=layer)

    # One rank's cache is shared by threads, and nobody else waits for the holder of the lock. The
    # members of an in-process group have caches of their own.
    with _cache_lock if rank_group.size == 1 else contextlib.nullcontext():
        agreed = agree(rank_group, request)
        checked_device = _check_device(device)
        key = (checked_device, *shapes)
        if agreed.has_cached:
            cache[key]._grow(agreed)
        else:
            replaced = cache.get(key)
            cache[key] = Workspace(rank_group, agreed, checked_device)
            if replaced is not None:
                cache[key].keep_graphs_of(replaced)
        return cache[key]


def _check_device(device) -> torch.device:
    """The device, a GPU with its index; ValueError if there is no engine for it here."""
    device = as_device(device)
    if device is None:
        raise ValueError("device: expected cpu or cuda, got None")
    if device.type == "cuda":
        return cuda_device(device)
    if device.type != "cpu":
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    return torch.device("cpu")


def _request(config: MoKConfig | None, device, hidden_size, topk, dtype, tokens) -> Request:
    """Raises TypeError or ValueError for what is wrong, whatever the other ranks ask for."""
    config = MoKConfig() if config is None else config
    if not isinstance(config, MoKConfig):
        raise TypeError(f"config: expected a MoKConfig or None, got {type(config).__name__}")
    device_type = _check_device(device).type
    tokens = as_integer("num_local_tokens", tokens, 0, MAX_SIZE)
    hidden_size = as_integer("hidden_size", hidden_size, 8, MAX_SIZE)
    topk = as_integer("topk", topk, 1, MAX_SIZE)
    if hidden_size % 8:
        raise ValueError(f"hidden_size: expected a multiple of 8, got {hidden_size}")
    as_dtype("dtype", dtype)
    if device_type == "cuda" and dtype != torch.bfloat16:
        raise TypeError(f"dtype: expected torch.bfloat16 on a GPU, got {dtype}")
    return Request(hidden_size, topk, dtype, tokens, config.timeout_seconds, device_type)


def reporting_errors_of(workspace: Workspace | None, operation: int):
    """workspace.reporting_errors(operation); where there is none, nobody is told."""
    return _ALONE if workspace is None else workspace.reporting_errors(operation)


def require_workspace(workspace):
    """Nothing can be reported to other ranks without one."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: expected a Workspace, got {type(workspace).__name__}")


def default_workspace(
    device: torch.device, hidden_size: int, topk: int, dtype: torch.dtype
) -> Workspace:
    """The cached workspace of one rank, which grows as needed.

    Also one that a timeout has made unusable, so that the call that it is for raises that error;
    get_workspace replaces it.
    """
    cached = SingleRank.workspaces.get((device, hidden_size, topk, dtype))
    if cached is not None:
        return cached
    shapes = {"hidden_size": hidden_size, "topk": topk, "dtype": dtype}
    return get_workspace(num_local_tokens=0, device=device, **shapes)


def workspace_of_handle(handle: int) -> Workspace:
    """The workspace that an operator names."""
    workspace = _by_handle.get(handle)
    if workspace is None:
        raise RuntimeError(
            f"workspace {handle} does not exist (any more): keep it alive until the last backward"
        )
    return workspace
