"""The engine of a workspace on a GPU: its memory, and the calls that queue kernels.

PyTorch owns all memory. What one rank keeps between calls (the symmetric heap, counters, records of
errors) is allocated when the workspace is made, scratch when a call needs more than the last ones;
what belongs to a call (schedule, ring) comes from PyTorch's allocator, so that it can be captured
into a CUDA graph and costs no cudaMalloc once the allocator is warm. Nothing here waits for the GPU
but making a workspace, `check`, `poison`, and an exchange of expert counts where the caller leaves
num_experts open.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mok_torch import _C, retired_memory
from mok_torch.accepted_calls import AcceptedCalls
from mok_torch.agreement import together
from mok_torch.errors import as_shared_error, error_of_code

# Ranks that share a GPU queue the parts of a call one after the other (MokCudaPart).
SCHEDULE_PARTS = (_C.CUDA_STAGE, _C.CUDA_BUILD) if _C.CUDA_BUILT else ()
PASS_PARTS = (_C.CUDA_STAGE, _C.CUDA_EXCHANGE, _C.CUDA_REDUCE) if _C.CUDA_BUILT else ()

# What ranks have called that tell each other something on the way into a call.
_GPU_CALL = "a forward, backward or schedule"


def cuda_device(device: torch.device) -> torch.device:
    """The device with its index, if the engine runs on it; raises ValueError if not."""
    if not _C.CUDA_BUILT:
        raise ValueError(f"device: expected cpu (this build has no CUDA engine), got {device}")
    if not torch.cuda.is_available():
        raise ValueError(f"device: expected cpu (PyTorch finds no usable GPU), got {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device: expected cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {device}"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        raise ValueError(
            f"device: expected a GPU of compute capability 9.0 (H100, H200), got {device}, a "
            f"{torch.cuda.get_device_name(index)} of {capability[0]}.{capability[1]}"
        )
    return torch.device("cuda", index)


# PyTorch's current stream of a GPU as an integer; without the Python object of a stream, where it
# can be had.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_address(device: torch.device) -> int:
    """PyTorch's current stream there, as a cudaStream_t."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def is_capturing(device: torch.device) -> bool:
    """Whether that GPU's current stream is being captured into a CUDA graph."""
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _refuse_capture(device: torch.device):
    if is_capturing(device):
        raise RuntimeError(
            "a workspace cannot be made or grown while a CUDA graph is captured: run the model "
            "once before, or call get_workspace (MoELayer.reserve) with enough tokens"
        )


def stream_object(stream: int, device: torch.device):
    """PyTorch's object for a cudaStream_t of the GPU."""
    if stream == 0:  # to ExternalStream 0 is no stream at all: it would make a new one
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(stream, device=device)


def keep_for_stream(stream: int, device: torch.device, allocated_on: int, memory: Tensor):
    """Tells PyTorch's allocator that `stream` uses memory that belongs to another stream."""
    if stream != allocated_on:
        memory.record_stream(stream_object(stream, device))


def aligned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised device memory, aligned as the engine wants it."""
    return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)


def _refuse_autograds_thread():
    """Raises where ranks that are threads would wait for each other in one thread of autograd."""
    in_backward = torch._C._current_graph_task_id() >= 0
    if in_backward and torch._C._is_multithreading_enabled():
        error = RuntimeError(
            "backward: autograd runs the backwards of all ranks that share a GPU in one thread, "
            "where they would wait for each other for ever: call it under "
            "torch.autograd.set_multithreading_enabled(False)"
        )
        error.is_shared = True  # every rank raises it
        raise error


class _OwnMemory(NamedTuple):
    """What one rank allocates for its engine.

    Attributes:
      heap: which other ranks access too, see share_heap.
      state: counters of its kernels.
      records: of errors; on the host, where its kernels write them.
      scratch: enough to tell the others of an error.
    """

    options: _C.CudaOptions
    sizes: _C.CudaMemory
    heap: Tensor
    state: Tensor
    records: Tensor
    scratch: Tensor


def _allocate(group, request: Any, device: torch.device) -> _OwnMemory:
    """All of it, zeroed by the time this returns."""
    _refuse_capture(device)
    options = _C.CudaOptions()
    options.rank, options.ep_size = group.rank, group.size
    options.max_tokens = request.num_local_tokens
    options.hidden, options.topk = request.hidden_size, request.topk
    options.device = device.index
    options.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    options.timeout_seconds = request.timeout_seconds
    sizes = _C.cuda_memory(options)
    zeros = functools.partial(torch.zeros, dtype=torch.uint8)
    own = _OwnMemory(
        options,
        sizes,
        heap=group.new_heap(sizes.heap_bytes, device),
        state=zeros(sizes.state_bytes, device=device),
        records=zeros(sizes.record_bytes, device="cpu", pin_memory=True),
        scratch=aligned_bytes(sizes.error_scratch_bytes, device),
    )
    retired_memory.synchronize(device)
    return own


class CudaEngine:
    """One rank's engine; the counterpart of _C.Workspace on the host."""

    def __init__(self, group, request: Any, device: torch.device):
        """Collective. request: the agreed sizes of the workspace."""
        timeout_seconds = request.timeout_seconds
        group.check_device(device, timeout_seconds)
        # All that may not be there on one rank, before ranks wait for each other in PyTorch.
        own = together(group, timeout_seconds, lambda: _allocate(group, request, device))
        self.device = device
        self.ep_size: int = group.size
        self.topk: int = request.topk
        self.max_tokens: int = request.num_local_tokens  # of any rank
        self.shares_device: bool = group.shares_device  # the ranks are threads that share the GPU
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._poisoned = False
        # Whether a graph may hold this engine's addresses.
        self.was_captured = False
        self.memory, self._state = own.sizes, own.state
        self._heap, heap_of_rank = group.share_heap(own.heap, timeout_seconds)
        retired_memory.keep_until_idle(self, own.records, device)
        self._stream = stream_address(device)  # of the last call
        self._scratch = own.scratch  # calls follow each other, so they share it
        # What calls allocate is like these: new_empty takes less time than torch.empty.
        self._like_words = torch.empty(0, dtype=torch.int32, device=device)
        self._like_ring = torch.empty(0, dtype=torch.bfloat16, device=device)
        self._kept_scratch: list[Tensor] = []  # graphs hold its address
        # Calls whose arguments have passed all checks, see accepted_calls.py.
        self.accepted = AcceptedCalls()
        # Threads share the default workspace, and autograd's share any: calls are queued whole.
        self._lock = threading.Lock()
        addresses = (heap_of_rank, own.state.data_ptr(), own.records.data_ptr())
        create = functools.partial(_C.CudaWorkspace, own.options, *addresses)
        self._engine = together(group, timeout_seconds, create)

    def staged_x(self, num_tokens: int, hidden: int) -> Tensor | None:
        """The heap's [num_tokens, hidden] bf16 from which peers read x; None for one rank."""
        begin = self.memory.x_offset
        if begin < 0:
            return None
        rows = self._heap[0][begin : begin + 2 * num_tokens * hidden]
        return rows.view(torch.bfloat16).view(num_tokens, hidden)

    def new_words(self, count: int) -> Tensor:
        """Memory for a schedule."""
        return self._like_words.new_empty(count)

    def new_ring(self, size: int) -> Tensor:
        """The buffer of a DeviceRing, uninitialised: rows that hold no route are never read."""
        return self._like_ring.new_empty(size)

    def owned_experts(self, num_local_experts: int, num_experts: int) -> tuple[int, int]:
        """Global id of this rank's first expert, and E.

        num_experts: E, which several ranks split evenly, larger shares first (expert_range);
        0: what the ranks' experts add up to, which they tell each other through the host.
        """
        rank, size = self._group.rank, self._group.size
        if size == 1:
            if num_experts not in (0, num_local_experts):
                raise ValueError(
                    f"num_experts: expected {num_local_experts}, which the ranks' experts add up "
                    f"to, got {num_experts}"
                )
            return 0, num_local_experts
        if num_experts:
            share, larger = divmod(num_experts, size)
            if num_local_experts != share + (rank < larger):
                raise ValueError(
                    f"num_experts: {num_experts} experts split evenly over {size} ranks are "
                    f"{share + (rank < larger)} on rank {rank}, got {num_local_experts} (leave "
                    "num_experts out if the experts of a GPU are split otherwise)"
                )
            return rank * share + min(rank, larger), num_experts
        if self.is_capturing():
            raise ValueError(
                "num_experts: expected a number while a CUDA graph is captured: the ranks cannot "
                "tell each other how many experts they have"
            )
        try:
            self.check()
        except Exception as error:
            # Another rank, which may not have heard yet, waits here.
            self._group.exchange(_GPU_CALL, as_shared_error(error)[0], self._timeout_seconds)
            raise
        counts = self._exchange(num_local_experts)
        return sum(counts[:rank]), sum(counts)

    def layer_memory(self, layer: _C.CudaLayer) -> _C.CudaLayerMemory:
        """The sizes of a layer's buffers."""
        return self._engine.layer_memory(layer)

    def build_schedule(self, stream: int, call, *operands):
        """Queues a schedule kernel, unless check raises. Collective.

        stream: current_stream(). call: a ScheduleCall. operands: of
        _C.CudaWorkspace.build_schedule, without the queue.
        """
        launch = self._engine.build_schedule
        self._queue(stream, SCHEDULE_PARTS, launch, call, operands, checks=True)

    def forward(self, stream: int, call, *operands):
        """Queues a forward kernel. Collective.

        stream: current_stream(). call: a PassCall. operands: of
        _C.CudaPass.forward_args, without the queue.
        """
        self._queue(stream, PASS_PARTS, self._engine.forward, call, operands)

    def backward(self, stream: int, call, *operands):
        """Queues a backward kernel. Collective.

        stream: current_stream(). call: a PassCall. operands: of
        _C.CudaPass.backward_args, without the queue.
        """
        self._queue(stream, PASS_PARTS, self._engine.backward, call, operands)

    def _queue(self, stream, parts: tuple[int, ...], launch, call, operands, *, checks=False):
        with self._lock:
            # The default stream cannot be captured, and is not asked whether it is.
            capturing = stream != 0 and self.is_capturing()
            scratch = self._enter_stream(stream, capturing, call.scratch_bytes)
            if checks:
                self._raise_found(stream, capturing)
            if not self.shares_device:
                launch(call.struct, *operands, (scratch.data_ptr(), stream, _C.CUDA_WHOLE))
                return
            for part in parts:
                launch(call.struct, *operands, (scratch.data_ptr(), stream, part))
                self._follow_all_ranks()

    def _enter_stream(self, stream: int, capturing: bool, scratch_bytes: int) -> Tensor:
        """Scratch for a call on the current stream, which from here on follows the last call's."""
        if capturing or stream != self._stream:
            self._follow_last_call(stream, capturing)
        enough = self._scratch.numel() >= scratch_bytes
        memory = self._scratch if enough else self._more_scratch(scratch_bytes, capturing)
        if self._poisoned:
            memory.fill_(0xFF)
        return memory

    def _more_scratch(self, num_bytes: int, capturing: bool) -> Tensor:
        if capturing:  # the graph's own memory
            return aligned_bytes(num_bytes, self.device)
        if self.was_captured:
            self._kept_scratch.append(self._scratch)
            num_bytes = max(num_bytes, 2 * self._scratch.numel())  # so that few are kept
        # The old one goes first: the allocator may need its memory.
        self._scratch = aligned_bytes(0, self.device)
        try:
            self._scratch = aligned_bytes(num_bytes, self.device)
        except Exception:
            # The others are told of the failure, which takes some.
            self._scratch = aligned_bytes(self.memory.error_scratch_bytes, self.device)
            raise
        return self._scratch

    def current_stream(self) -> int:
        """PyTorch's current stream of the GPU, as a cudaStream_t."""
        return stream_address(self.device)

    def is_capturing(self) -> bool:
        """Whether that stream is being captured into a CUDA graph."""
        return is_capturing(self.device)

    def _follow_last_call(self, stream: int, capturing: bool):
        """Makes the current stream follow the last call's: the kernels share counters and scratch.

        Within a graph the capture sees to that; between its replays and other calls, the user.
        """
        if capturing:
            self.was_captured = True
        elif stream != self._stream:
            current, last = self._stream_object(stream), self._stream_object(self._stream)
            current.wait_event(last.record_event())
            # PyTorch's allocator may reuse memory once the stream it was allocated on allows.
            for memory in (self._heap[0], self._state, self._scratch):
                memory.record_stream(current)
        self._stream = stream

    def _stream_object(self, stream: int):
        return stream_object(stream, self.device)

    def _follow_all_ranks(self):
        """Orders what this rank queues next after what all ranks have queued so far."""
        stream = self._stream_object(self._stream)
        for event in self._exchange(stream.record_event()):
            stream.wait_event(event)

    def _exchange(self, value: Any) -> list[Any]:
        """The values of all ranks; raises the error that a rank has sent in place of one."""
        if self.shares_device:
            _refuse_autograds_thread()
        values = self._group.exchange(_GPU_CALL, value, self._timeout_seconds)
        for rank, other in enumerate(values):
            if isinstance(other, Exception):
                error = type(other)(f"rank {rank}: {other}")
                error.is_shared = True
                raise error from other
        return values

    def check(self):
        """Raises what the kernels that have ended found wrong. Does not wait for others.

        What a schedule kernel has found, all have: each rank raises it once, and nobody needs to be
        told. Until a rank has raised it, its calls do nothing and meet nobody (mok_cuda.h).
        """
        with self._lock:
            stream, capturing = self.current_stream(), self.is_capturing()
            self._follow_last_call(stream, capturing)
            self._raise_found(stream, capturing)

    def _raise_found(self, stream: int, capturing: bool):
        self._engine.check_usable()
        if capturing:
            return  # a later call raises: what is queued now does not run
        if self.shares_device:
            self.synchronize()  # so that all ranks raise in the same call
        try:
            self._engine.check(stream)
        except Exception as error:
            error.is_shared = True
            raise

    def check_ranks(self):
        """Raises if another rank has left for good. Waits for a small copy."""
        if not self.is_capturing():
            self._engine.check_ranks()

    def check_usable(self):
        """Raises what has made the engine unusable on this rank: a timeout, or that it has left."""
        self._engine.check_usable()

    def finish(self):
        """Waits for all calls, and raises what their kernels found wrong."""
        _refuse_capture(self.device)
        torch.cuda.synchronize(self.device)
        self.check()

    def synchronize(self):
        """Waits for everything queued on the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def report_error(self, operation: int, code: int, message: str):
        """Takes this rank's place in what the other ranks queue; see MokCudaErrorPlace.

        A rank with a GPU of its own that fails in a forward or backward whose schedule it has built
        leaves the workspace for good.
        """
        if self.shares_device:
            error = error_of_code(code, message)
            self._group.exchange(_GPU_CALL, error, self._timeout_seconds)
            return
        if self.is_capturing():
            return
        args = _C.CudaErrorArgs()
        in_schedule = operation == _C.OP_SCHEDULE
        args.code, args.place = code, _C.CUDA_IN_SCHEDULE if in_schedule else _C.CUDA_IN_PASS
        with self._lock:
            stream = self.current_stream()
            scratch = self._enter_stream(stream, False, self.memory.error_scratch_bytes)
            args.scratch, args.stream = scratch.data_ptr(), stream
            self._engine.report_error(args)

    def info(self) -> dict[str, int]:
        """Bytes of the heap and of what else lives between calls."""
        other = self.memory.state_bytes + self.memory.record_bytes + self._scratch.numel()
        return {"heap_bytes": self.memory.heap_bytes, "scratch_bytes": other, "num_threads": 0}

    def poison(self):
        """For tests: NaN in the heap's data, and from now on in all scratch of calls."""
        torch.cuda.synchronize(self.device)
        self._heap[0][self.memory.heap_zero_bytes :].fill_(0xFF)
        torch.cuda.synchronize(self.device)
        self._poisoned = True
