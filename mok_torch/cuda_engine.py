"""The engine of a workspace on a GPU: its memory, and the calls that queue kernels.

PyTorch owns all memory. What one rank keeps between calls (the symmetric heap, counters, records of
errors) is allocated when the workspace is made; what a call needs (scratch, schedule, ring) comes
from PyTorch's allocator, so that it can be captured into a CUDA graph and costs no cudaMalloc once
the allocator is warm. Nothing here waits for the GPU but making a workspace, `check`, `poison`, and
an exchange of expert counts where the caller leaves num_experts open.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from mok_torch import _C
from mok_torch.errors import error_of_code

# Ranks that share a GPU queue the parts of a call one after the other (MokCudaPart).
SCHEDULE_PARTS = (_C.CUDA_STAGE, _C.CUDA_BUILD) if _C.CUDA_BUILT else ()
PASS_PARTS = (_C.CUDA_STAGE, _C.CUDA_EXCHANGE, _C.CUDA_REDUCE) if _C.CUDA_BUILT else ()


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


def stream_address(device: torch.device) -> int:
    """PyTorch's current stream there, as a cudaStream_t."""
    return torch.cuda.current_stream(device).cuda_stream


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


class CudaEngine:
    """One rank's engine; the counterpart of _C.Workspace on the host."""

    def __init__(self, group, request: Any, device: torch.device):
        """Collective. request: the agreed sizes of the workspace."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a workspace cannot be made or grown while a CUDA graph is captured: run the model "
                "once before, or call get_workspace (MoELayer.reserve) with enough tokens"
            )
        self.device = device
        self._group = group
        self._timeout_seconds = request.timeout_seconds
        self._poisoned = False
        # Whether a graph may hold this engine's addresses.
        self.was_captured = False
        options = _C.CudaOptions()
        options.rank, options.ep_size = group.rank, group.size
        options.max_tokens = request.num_local_tokens
        options.hidden, options.topk = request.hidden_size, request.topk
        options.device = device.index
        options.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        options.timeout_seconds = request.timeout_seconds
        self.memory = _C.cuda_memory(options)
        self._heap, heap_of_rank = group.device_heap(
            self.memory.heap_bytes, device, request.timeout_seconds
        )
        self._state = torch.zeros(self.memory.state_bytes, dtype=torch.uint8, device=device)
        self._records = torch.zeros(self.memory.record_bytes, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.current_stream(device)  # of the last call
        # Threads share the default workspace, and autograd's share any: calls are queued whole.
        self._lock = threading.Lock()
        torch.cuda.synchronize(device)
        self._engine = _C.CudaWorkspace(
            options, heap_of_rank, self._state.data_ptr(), self._records.data_ptr()
        )

    @property
    def shares_device(self) -> bool:
        """Whether the ranks are threads that share this GPU."""
        return self._group.shares_device

    def staged_x(self, num_tokens: int, hidden: int) -> Tensor | None:
        """The heap's [num_tokens, hidden] bf16 from which peers read x; None for one rank."""
        begin = self.memory.x_offset
        if begin < 0:
            return None
        rows = self._heap[0][begin : begin + 2 * num_tokens * hidden]
        return rows.view(torch.bfloat16).view(num_tokens, hidden)

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
            return 0, max(num_local_experts, 1)
        if num_experts:
            share, larger = divmod(num_experts, size)
            if num_local_experts != share + (rank < larger):
                raise ValueError(
                    f"num_experts: {num_experts} experts split evenly over {size} ranks are "
                    f"{share + (rank < larger)} on rank {rank}, got {num_local_experts} (leave "
                    "num_experts out if the experts of a GPU are split otherwise)"
                )
            return rank * share + min(rank, larger), num_experts
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "num_experts: expected a number while a CUDA graph is captured: the ranks cannot "
                "tell each other how many experts they have"
            )
        counts = self._exchange(num_local_experts)
        return sum(counts[:rank]), max(sum(counts), 1)

    def layer_memory(self, layer: _C.CudaLayer) -> _C.CudaLayerMemory:
        """The sizes of a layer's buffers."""
        return self._engine.layer_memory(layer)

    def scratch(self, num_bytes: int) -> Tensor:
        """Memory for one call."""
        memory = aligned_bytes(num_bytes, self.device)
        if self._poisoned:
            memory.fill_(0xFF)
        return memory

    def build_schedule(self, layer: _C.CudaLayer, args: _C.CudaScheduleArgs):
        """Queues the schedule kernel. Collective."""
        self._queue(SCHEDULE_PARTS, args, lambda: self._engine.build_schedule(layer, args))

    def forward(self, layer: _C.CudaLayer, args: _C.CudaForwardArgs):
        """Queues the forward kernel. Collective."""
        self._queue(PASS_PARTS, args, lambda: self._engine.forward(layer, args))

    def backward(self, layer: _C.CudaLayer, args: _C.CudaBackwardArgs):
        """Queues the backward kernel. Collective."""
        self._queue(PASS_PARTS, args, lambda: self._engine.backward(layer, args))

    def _queue(self, parts: tuple[int, ...], args, launch):
        with self._lock:
            self._follow_last_call()
            args.stream = self._stream.cuda_stream
            if not self.shares_device:
                launch()
                return
            for part in parts:
                args.part = part
                launch()
                self._follow_all_ranks()

    def _follow_last_call(self):
        """Makes the current stream follow the last call's: the kernels share counters.

        Within a graph the capture sees to that; between its replays and other calls, the user.
        """
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            self.was_captured = True
        elif stream != self._stream:
            stream.wait_event(self._stream.record_event())
            # PyTorch's allocator may reuse memory once the stream it was allocated on allows.
            for memory in (self._heap[0], self._state):
                memory.record_stream(stream)
        self._stream = stream

    def _follow_all_ranks(self):
        """Orders what this rank queues next after what all ranks have queued so far."""
        for event in self._exchange(self._stream.record_event()):
            self._stream.wait_event(event)

    def _exchange(self, value: Any) -> list[Any]:
        """The values of all ranks; raises the error that a rank has sent in place of one."""
        if self.shares_device:
            _refuse_autograds_thread()
        values = self._group.exchange(value, self._timeout_seconds)
        for rank, other in enumerate(values):
            if isinstance(other, Exception):
                error = type(other)(f"rank {rank}: {other}")
                error.is_shared = True
                raise error from other
        return values

    def check(self):
        """Raises what the kernels that have ended found wrong. Does not wait for others."""
        self._engine.check()

    def check_usable(self):
        """Raises the timeout that made the engine unusable, if there was one."""
        self._engine.check_usable()

    def synchronize(self):
        """Waits for everything queued on the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def report_error(self, operation: int, code: int, message: str, whole_call: bool = False):
        """Takes this rank's place in the schedule (and forward) that the other ranks queue.

        In a forward whose schedule this rank has built there is no such place: ranks with GPUs of
        their own find out by waiting.
        """
        if self.shares_device:
            self._group.exchange(error_of_code(code, message), self._timeout_seconds)
            return
        if operation != _C.OP_SCHEDULE or torch.cuda.is_current_stream_capturing():
            return
        args = _C.CudaErrorArgs()
        args.code, args.joins_forward = code, int(whole_call)
        scratch = self.scratch(self.memory.error_scratch_bytes)
        args.scratch = scratch.data_ptr()
        with self._lock:
            self._follow_last_call()
            args.stream = self._stream.cuda_stream
            self._engine.report_error(args)

    def info(self) -> dict[str, int]:
        """Bytes of the heap and of what else lives between calls."""
        state = self.memory.state_bytes + self.memory.record_bytes
        return {"heap_bytes": self.memory.heap_bytes, "scratch_bytes": state, "num_threads": 0}

    def poison(self):
        """For tests: NaN in the heap's data, and from now on in all scratch of calls."""
        torch.cuda.synchronize(self.device)
        self._heap[0][self.memory.heap_zero_bytes :].fill_(0xFF)
        torch.cuda.synchronize(self.device)
        self._poisoned = True

    @property
    def is_poisoned(self) -> bool:
        return self._poisoned
