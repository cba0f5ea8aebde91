"""Runs the engine's passes on checked tensors: allocation of outputs and the C API's structs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_torch import _C, cuda_passes
from mok_torch.checks import (
    MOE_NAMES,
    ArgumentNames,
    LayerTensors,
    require_contiguous,
    require_dtype,
    require_shape,
    require_tensor,
)
from mok_torch.dtypes import ENGINE_DTYPES
from mok_torch.lazy_memory import lazy_zeros
from mok_torch.plan import Plan, engine_config
from mok_torch.workspace import Workspace


class Ring(NamedTuple):
    """What a forward leaves for its backward, in the dtype of x.

    x [ring_rows, H], gate and up [ring_rows, I]: of macrobatch 0. shared_gate and shared_up
    [T, Is]. Rows that hold no route are never read.
    """

    x: Tensor
    gate: Tensor
    up: Tensor
    shared_gate: Tensor
    shared_up: Tensor


def ring_shapes(
    hidden: int, ring_rows: int, num_tokens: int, intermediate: int, shared_intermediate: int
) -> tuple[tuple[int, int], ...]:
    """The shapes of a Ring's tensors; sizes may be symbolic."""
    rows = (ring_rows, intermediate)
    shared = (num_tokens, shared_intermediate)
    return (ring_rows, hidden), rows, rows, shared, shared


def _layer_ring_shapes(layer: LayerTensors, ring_rows: int) -> tuple[tuple[int, int], ...]:
    return ring_shapes(
        layer.x.shape[1],
        ring_rows,
        layer.num_tokens,
        layer.intermediate,
        layer.shared_intermediate,
    )


def check_ring(names: Sequence[str], ring: Ring, layer: LayerTensors, ring_rows: int):
    """Raises unless the engine may read and write the ring of this layer at its addresses.

    names: of the five tensors, for the error.
    """
    shapes = _layer_ring_shapes(layer, ring_rows)
    for name, tensor, shape in zip(names, ring, shapes, strict=True):
        require_tensor(name, tensor, layer.x.device)
        require_dtype(name, tensor, layer.x.dtype, " (the dtype of x)")
        require_shape(name, tensor, shape, "of this schedule and layer")
        require_contiguous(name, tensor)


def new_ring(layer: LayerTensors, ring_rows: int) -> Ring:
    """A ring for this layer's forward, on a CPU filled with zeros."""
    shapes = _layer_ring_shapes(layer, ring_rows)
    if layer.x.is_cuda:
        return Ring(*(layer.x.new_empty(shape) for shape in shapes))
    routes = layer.topk_weight.numel()
    dense = 2 * routes >= ring_rows
    routed = [lazy_zeros(shape, layer.x.dtype, dense) for shape in shapes[:3]]
    shared = [lazy_zeros(shape, layer.x.dtype, dense=True) for shape in shapes[3:]]
    return Ring(*routed, *shared)


class WeightGrads(NamedTuple):
    """Gradients of one group of weights (routed or shared); None: not wanted.

    All have one dtype. With accumulate they are added to, else written.
    """

    gate: Tensor | None
    up: Tensor | None
    down: Tensor | None
    accumulate: bool = False


class LayerGrads(NamedTuple):
    """Outputs of a backward: x [T, H], topk_weight fp32 [T, K], shared_scale fp32 [T] or None."""

    x: Tensor
    topk_weight: Tensor
    shared_scale: Tensor | None
    routed: WeightGrads
    shared: WeightGrads


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _set_weights(target, gate: Tensor, up: Tensor, down: Tensor):
    target.gate, target.up, target.down = gate.data_ptr(), up.data_ptr(), down.data_ptr()
    target.intermediate = gate.shape[-2]


def _set_layer(target, layer: LayerTensors, swiglu_limit: float):
    target.x = layer.x.data_ptr()
    target.topk_weight = layer.topk_weight.data_ptr()
    target.swiglu_limit = swiglu_limit
    _set_weights(target.routed, layer.gate, layer.up, layer.down)
    if layer.shared is not None:
        _set_weights(target.shared, layer.shared.gate, layer.shared.up, layer.shared.down)
        target.shared_scale = _address(layer.shared.scale)


def _set_ring(target, ring: Ring):
    target.ring_rows = ring.x.shape[0]
    target.ring_x = ring.x.data_ptr()
    target.ring_gate = ring.gate.data_ptr()
    target.ring_up = ring.up.data_ptr()
    if ring.shared_gate.shape[1]:
        target.shared_gate = ring.shared_gate.data_ptr()
        target.shared_up = ring.shared_up.data_ptr()


def _set_grads(target, grads: WeightGrads):
    given = [grad for grad in (grads.gate, grads.up, grads.down) if grad is not None]
    target.gate, target.up, target.down = map(_address, (grads.gate, grads.up, grads.down))
    target.dtype = ENGINE_DTYPES[given[0].dtype] if given else _C.FP32
    target.accumulate = int(grads.accumulate)


class LayerCall(NamedTuple):
    """What the two passes of one layer call have in common.

    swiglu_limit: 0 for none. ring: written by the forward; by the backward too where there are
    several macrobatches.
    """

    workspace: Workspace
    plan: Plan
    schedule: _C.Schedule | cuda_passes.CudaSchedule
    layer: LayerTensors
    ring: Ring
    swiglu_limit: float

    def fill(self, args):
        """Sets what _C.ForwardArgs and _C.BackwardArgs have in common."""
        _set_layer(args.layer, self.layer, self.swiglu_limit)
        _set_ring(args.context, self.ring)

    def engine_config(self, num_comm: int) -> _C.EngineConfig:
        return engine_config(self.plan, self.workspace.ranks_in_process, num_comm)


def run_forward(call: LayerCall, out: Tensor):
    """Writes the ring and out [T, H]. Collective."""
    if call.layer.x.is_cuda:
        cuda_passes.run_forward(call, call.fill, out)
        return
    args = _C.ForwardArgs()
    call.fill(args)
    args.out = out.data_ptr()
    args.differentiated = call.plan.differentiated
    config = call.engine_config(call.plan.fwd_num_comm)
    _C.forward(call.workspace.engine, config, call.schedule, args)


def run_backward(call: LayerCall, kept_macrobatches: int, d_out: Tensor, grads: LayerGrads):
    """Writes grads from d_out [T, H]. Collective.

    kept_macrobatches: 1 if the ring holds what the forward left, 0 if all is to be recomputed.
    """
    on_gpu = call.layer.x.is_cuda
    args = _C.CudaBackwardArgs() if on_gpu else _C.BackwardArgs()
    call.fill(args)
    args.d_out = d_out.data_ptr()
    args.kept_macrobatches = kept_macrobatches
    args.d_x = grads.x.data_ptr()
    args.d_topk_weight = grads.topk_weight.data_ptr()
    args.d_shared_scale = _address(grads.shared_scale)
    _set_grads(args.d_routed, grads.routed)
    _set_grads(args.d_shared, grads.shared)
    if on_gpu:
        cuda_passes.run_backward(call, args)
        return
    config = call.engine_config(call.plan.bwd_num_comm)
    _C.backward(call.workspace.engine, config, call.schedule, args)


def build_schedule(
    workspace: Workspace,
    plan: Plan,
    topk_idx: Tensor,
    num_local_experts: int,
    num_experts: int,
    whole_call: bool = False,
) -> _C.Schedule | cuda_passes.CudaSchedule:
    """The engine's schedule of int64 topk_idx [T, K], contiguous. Collective.

    num_experts: E, which the engine compares on all ranks; 0: what the ranks' experts add up to.
    whole_call: see Workspace.reporting_errors.
    """
    if topk_idx.is_cuda:
        return cuda_passes.build_schedule(
            workspace, plan, topk_idx, num_local_experts, num_experts, whole_call
        )
    config = engine_config(plan, workspace.ranks_in_process, plan.fwd_num_comm)
    return _C.Schedule.build(
        workspace.engine,
        config,
        topk_idx.data_ptr(),
        topk_idx.shape[0],
        num_local_experts,
        num_experts,
    )


def new_gradient(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the gradient of a weight; the pass writes all of it."""
    if weight.is_cuda:
        return torch.empty(weight.shape, dtype=dtype, device=weight.device)
    return lazy_zeros(tuple(weight.shape), dtype, dense=True)


def may_overwrite_ring(schedule, plan: Plan, capacity: int) -> bool:
    """Whether a backward may overwrite what the forward left in the ring.

    It does where there are several macrobatches. On a GPU only the kernels know: there it may
    unless the ring holds the rows of the worst case.
    """
    if isinstance(schedule, cuda_passes.CudaSchedule):
        return plan.ring_rows < capacity
    return schedule.info().num_macrobatches > 1


def check_schedule(schedule, layer: LayerTensors, names: ArgumentNames = MOE_NAMES):
    """Raises unless the schedule is of this layer's numbers of tokens and experts."""
    # On a GPU all of info would wait for the kernel.
    on_gpu = isinstance(schedule, cuda_passes.CudaSchedule)
    info = schedule if on_gpu else schedule.info()
    if layer.num_tokens != info.num_tokens:
        raise ValueError(
            f"x: expected the schedule's {info.num_tokens} tokens, got {layer.num_tokens}"
        )
    if layer.num_local_experts != info.num_local_experts:
        raise ValueError(
            f"{names.gate}: expected the schedule's {info.num_local_experts} experts, got "
            f"{layer.num_local_experts}"
        )


def save_schedule(schedule, num_words: int) -> Tensor:
    """The schedule as an int32 tensor of num_words, so that a graph can hold it."""
    if isinstance(schedule, cuda_passes.CudaSchedule):
        return schedule.words
    words = lazy_zeros((num_words,), torch.int32)
    schedule.save(words.data_ptr(), num_words)
    return words


def load_schedule(words: Tensor, layer: LayerTensors, plan: Plan, workspace: Workspace):
    """The schedule that save_schedule wrote, of this layer's forward."""
    require_tensor("schedule_words", words, layer.x.device)
    require_dtype("schedule_words", words, torch.int32)
    words = words.contiguous()
    if words.is_cuda:
        return cuda_passes.load_schedule(words, layer, plan, workspace)
    return _C.Schedule.load(words.data_ptr(), words.numel())
