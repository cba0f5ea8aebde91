"""A GPU's workspace whose memory is the host's and whose kernels are never launched, for tests."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch

from mok_torch import _C, cuda_passes, functional, moe_cuda
from mok_torch import workspace as workspaces
from mok_torch.accepted_calls import AcceptedCalls
from mok_torch.checks import LayerTensors, check_layer
from mok_torch.cuda_engine import CudaEngine
from mok_torch.self_test import Case
from mok_torch.test_support import routed_batch
from mok_torch.workspace import Workspace

CASE = Case("host", (40,), hidden=64, intermediate=40, experts=5, topk=3, shared=24)


class HostEngine(CudaEngine):
    """Records the calls that reach the C API.

    Attributes:
      calls: (name, layer, args) of every call.
      sizes: what the C API says a layer needs.
      stream, capturing: of PyTorch's current stream.
      failure: raised in place of the next call, if there is one.
    """

    def __init__(self, max_tokens: int = 64):
        self.device = torch.device("cpu")
        self.ep_size, self.topk, self.max_tokens = 1, CASE.topk, max_tokens
        self.was_captured = self._poisoned = False
        self.memory = SimpleNamespace(
            error_scratch_bytes=8, heap_bytes=0, state_bytes=0, record_bytes=0
        )
        self.shares_device, self._group = False, SimpleNamespace(size=1, rank=0)
        self.stream = self._stream = 1
        self.capturing, self._lock = False, threading.Lock()
        self._scratch = torch.empty(1 << 16, dtype=torch.uint8)
        self._kept_scratch = []
        self._like_words = torch.empty(0, dtype=torch.int32)
        self._like_ring = torch.empty(0, dtype=torch.bfloat16)
        self.accepted = AcceptedCalls()
        self.calls, self.num_checks, self.num_plans, self.failure = [], 0, 0, None
        self.sizes = SimpleNamespace(
            schedule_bytes=400,
            schedule_scratch_bytes=50,
            forward_scratch_bytes=60,
            backward_scratch_bytes=70,
            result_offset=128,
            expert_rows_offset=256,
        )
        self._engine = SimpleNamespace(
            check=self._check,
            check_usable=lambda: None,
            build_schedule=lambda layer, *given: self._record(
                "schedule", layer, _C.CudaScheduleArgs(*given)
            ),
            forward=lambda call, *given: self._record(
                "forward", call.layer, call.forward_args(*given)
            ),
            backward=lambda call, *given: self._record(
                "backward", call.layer, call.backward_args(*given)
            ),
        )

    def _check(self, stream):
        assert stream == self._stream
        self.num_checks += 1

    def _record(self, name: str, layer, args):
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        self.calls.append((name, layer, args))

    def current_stream(self):
        return self.stream

    def is_capturing(self):
        return self.capturing

    def layer_memory(self, layer):
        self.num_plans += 1
        return self.sizes


def let_host_be_gpu(monkeypatch):
    """functional's calls on tensors of the host go the way of tensors of a GPU."""
    monkeypatch.setattr(cuda_passes, "_WORDS_ALIGNMENT", 64)  # of PyTorch's memory on the host
    monkeypatch.setattr(moe_cuda, "applies", lambda x: type(x) is torch.Tensor)
    make_plan = functional.make_plan
    monkeypatch.setattr(
        functional, "make_plan", lambda *given: make_plan(*given[:6], "cuda", *given[7:])
    )


def make_space(max_tokens: int = 64) -> Workspace:
    """A workspace of one rank for CASE."""
    space = object.__new__(Workspace)
    space.engine = HostEngine(max_tokens)
    space.device, space.on_gpu = torch.device("cpu"), True
    space.rank, space.ep_size = 0, 1
    space.hidden_size, space.topk, space.dtype = CASE.hidden, CASE.topk, torch.bfloat16
    space._captured_engines, space._growth_lock = [], threading.Lock()
    space.timeout_seconds = 1.0
    space.num_local_tokens, space.handle = max_tokens, next(workspaces._next_handle)
    workspaces._by_handle[space.handle] = space
    return space


def layer_tensors(space: Workspace) -> LayerTensors:
    """CASE's tensors, without gradients."""
    batch = routed_batch(CASE, torch.bfloat16)
    weights = [weight.detach() for weight in batch.weights]
    shared = [tensor.detach() for tensor in batch.shared[:3]]
    x, topk_weight = batch.x.detach(), batch.topk_weight.detach()
    return check_layer(x, topk_weight, weights, (*shared, None), space)
