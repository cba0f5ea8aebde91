"""Runs the engine's passes on checked tensors: allocation of outputs and the C API's structs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_torch import _C, cuda_passes
from mok_torch.checks import (
    MOE_NAMES,
    ArgumentNames,
    LayerTensors,
    require_aligned,
    require_contiguous,
    require_dtype,
    require_shape,
    require_tensor,
)
from mok_torch.dtypes import ENGINE_DTYPES
from mok_torch.lazy_memory import lazy_zeros, recycled_empty
from mok_torch.plan import Plan, engine_config
from mok_torch.ring import Ring, RingLayout, ring_shapes
from mok_torch.workspace import Workspace


def layer_ring_shapes(layer: LayerTensors, ring_rows: int) -> tuple[tuple[int, int], ...]:
    """The shapes of the layer's Ring."""
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
    shapes = layer_ring_shapes(layer, ring_rows)
    for name, tensor, shape in zip(names, ring, shapes, strict=True):
        require_tensor(name, tensor, layer.x.device)
        require_dtype(name, tensor, layer.x.dtype, " (the dtype of x)")
        require_shape(name, tensor, shape, "of this schedule and layer")
        require_contiguous(name, tensor)


def check_buffer(name: str, buffer, layer: LayerTensors, layout: RingLayout) -> Ring:
    """The tensors that a GPU's ring has in its buffer, if the engine may use it."""
    require_tensor(name, buffer, layer.x.device)
    require_dtype(name, buffer, layer.x.dtype, " (the dtype of x)")
    require_shape(name, buffer, (layout.size,), "of the ring's layout")
    require_contiguous(name, buffer)
    require_aligned(name, buffer)
    return layout.views(buffer)


def new_ring(layer: LayerTensors, ring_rows: int) -> Ring:
    """A ring for this layer's forward. Rows that hold no route are zero once that has run on a CPU.

    An operator that returns the ring is then a function of its inputs.
    """
    shapes = layer_ring_shapes(layer, ring_rows)
    if layer.x.is_cuda:
        return Ring(*(layer.x.new_empty(shape) for shape in shapes))
    allocate = lazy_zeros if _is_sparse(layer, ring_rows) else recycled_empty
    routed = [allocate(shape, layer.x.dtype) for shape in shapes[:3]]
    shared = [recycled_empty(shape, layer.x.dtype) for shape in shapes[3:]]
    return Ring(*routed, *shared)


def _is_sparse(layer: LayerTensors, ring_rows: int) -> bool:
    """Whether most rows of the ring will never be touched, and shall not be cleared either."""
    return 2 * layer.topk_weight.numel() < ring_rows


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


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _grads_struct(grads: WeightGrads) -> tuple[list[int], int, bool]:
    """Addresses, the code of their dtype, whether they are added to."""
    given = [grad for grad in grads[:3] if grad is not None]
    dtype = ENGINE_DTYPES[given[0].dtype] if given else _C.FP32
    return addresses(grads[:3]), dtype, grads.accumulate


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

    def ring_addresses(self) -> list[int]:
        """Of the five tensors, 0 where there is no shared expert."""
        given = 5 if self.layer.shared is not None else 3
        return [tensor.data_ptr() for tensor in self.ring[:given]] + [0] * (5 - given)

    def fill(self, args):
        """Sets what _C.ForwardArgs and _C.BackwardArgs have in common."""
        widths = (self.layer.intermediate, self.layer.shared_intermediate)
        args.layer.set(addresses(self.layer.tensors()), *widths, self.swiglu_limit)
        args.context.set(self.ring.x.shape[0], self.ring_addresses())

    def cuda_pass(self, engine, is_backward: bool = False) -> cuda_passes.PassCall:
        """The pass on a GPU, whose ring begins at address 0: its tensors lie anywhere."""
        sizes = self.schedule.sizes
        call = cuda_passes.pass_call(
            engine, self.plan, sizes, self.layer, self.swiglu_limit, is_backward
        )
        call.struct.set_ring(self.ring.x.shape[0], self.ring_addresses())
        return call

    def engine_config(self, num_comm: int) -> _C.EngineConfig:
        return engine_config(self.plan, self.workspace.ranks_in_process, num_comm)


def run_forward(call: LayerCall, out: Tensor):
    """Writes the ring and out [T, H]. Collective."""
    if call.layer.x.is_cuda:
        _run_cuda_forward(call, out)
        return
    args = _C.ForwardArgs()
    call.fill(args)
    args.out = out.data_ptr()
    args.differentiated = call.plan.differentiated
    args.clear_spare_rows = not _is_sparse(call.layer, call.ring.x.shape[0])
    config = call.engine_config(call.plan.fwd_num_comm)
    with call.workspace.host_call("a forward"):
        _C.forward(call.workspace.engine, config, call.schedule, args)


def run_backward(call: LayerCall, d_out: Tensor, kept_macrobatches: int, grads: LayerGrads):
    """Writes grads from d_out [T, H]. Collective.

    kept_macrobatches: 1 if the ring holds what the forward left, 0 if all is to be recomputed.
    """
    if call.layer.x.is_cuda:
        _run_cuda_backward(call, cuda_operands(d_out, kept_macrobatches, grads))
        return
    args = _C.BackwardArgs()
    call.fill(args)
    args.d_out = d_out.data_ptr()
    args.kept_macrobatches = kept_macrobatches
    args.d_x = grads.x.data_ptr()
    args.d_topk_weight = grads.topk_weight.data_ptr()
    args.d_shared_scale = addresses(grads[2:3])[0]
    args.d_routed.set(*_grads_struct(grads.routed))
    args.d_shared.set(*_grads_struct(grads.shared))
    config = call.engine_config(call.plan.bwd_num_comm)
    with call.workspace.host_call("a backward"):
        _C.backward(call.workspace.engine, config, call.schedule, args)


def _run_cuda_forward(call: LayerCall, out: Tensor):
    with call.workspace.reporting_errors(_C.OP_FORWARD):
        engine, inputs = call.workspace.engine, addresses(call.layer.tensors())
        operands = (0, call.schedule.routing, out.data_ptr())
        engine.forward(engine.current_stream(), call.cuda_pass(engine), inputs, *operands)


def _run_cuda_backward(call: LayerCall, operands: cuda_passes.BackwardOperands):
    with call.workspace.reporting_errors(_C.OP_BACKWARD):
        engine, inputs = call.workspace.engine, addresses(call.layer.tensors())
        ready = call.cuda_pass(engine, is_backward=True)
        operands = (0, call.schedule.routing, operands)
        engine.backward(engine.current_stream(), ready, inputs, *operands)


def cuda_operands(
    d_out: Tensor, kept_macrobatches: int, grads: LayerGrads
) -> cuda_passes.BackwardOperands:
    """Addresses of what a backward reads and writes beside the layer's tensors."""
    return cuda_passes.BackwardOperands(
        d_out.data_ptr(),
        kept_macrobatches,
        addresses(grads[:3]),
        _grads_struct(grads.routed),
        _grads_struct(grads.shared),
    )


def build_schedule(
    workspace: Workspace,
    plan: Plan,
    topk_idx: Tensor,
    num_local_experts: int,
    num_experts: int,
    widths: tuple[int, int] = cuda_passes.UNKNOWN_WIDTHS,
) -> _C.Schedule | cuda_passes.CudaSchedule:
    """The engine's schedule of int64 topk_idx [T, K], contiguous. Collective.

    num_experts: E, which the engine compares on all ranks; 0: what the ranks' experts add up to.
    widths: I and Is, which a GPU's schedule compares; a CPU's forward does so itself.
    """
    if topk_idx.is_cuda:
        experts = (num_local_experts, num_experts)
        return cuda_passes.build_schedule(workspace, plan, topk_idx, *experts, widths)[0]
    config = engine_config(plan, workspace.ranks_in_process, plan.fwd_num_comm)
    with workspace.host_call("a forward or build_schedule"):
        return _C.Schedule.build(
            workspace.engine,
            config,
            topk_idx.data_ptr(),
            topk_idx.shape[0],
            num_local_experts,
            num_experts,
        )


def new_output(like: Tensor) -> Tensor:
    """Uninitialised memory of that shape and dtype, contiguous whatever `like` is."""
    # Takes half the time of like.new_empty(like.shape).
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def new_gradient(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the gradient of a weight; the pass writes all of it."""
    if weight.is_cuda:
        return torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    return recycled_empty(tuple(weight.shape), dtype)


def new_grads(
    tensors: Sequence[Tensor | None], routed: WeightGrads, shared: WeightGrads
) -> LayerGrads:
    """Outputs of a backward.

    tensors: as LayerTensors.tensors(), with any leading dimensions. routed, shared: what the pass
    writes or adds the weights' gradients to.
    """
    x, topk_weight, *_, scale = tensors
    return LayerGrads(
        x=new_output(x),
        topk_weight=new_output(topk_weight),
        shared_scale=None if scale is None else new_output(scale),
        routed=routed,
        shared=shared,
    )


def new_needed_grads(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> LayerGrads:
    """new_grads, for the weights with memory for those gradients of the six that are needed."""
    weights = [
        new_gradient(weight, weight.dtype) if wanted and weight is not None else None
        for weight, wanted in zip(tensors[2:8], needed, strict=True)
    ]
    return new_grads(tensors, WeightGrads(*weights[:3]), WeightGrads(*weights[3:]))


def overwrites_ring(schedule) -> bool:
    """Whether a backward overwrites what the forward left in the ring.

    On a GPU it does; of x only where there are several macrobatches. On a CPU it does where there
    are.
    """
    if isinstance(schedule, cuda_passes.CudaSchedule):
        return True
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
    if workspace.on_gpu:
        return cuda_passes.load_schedule(words, layer, plan, workspace)
    return _C.Schedule.load(words.data_ptr(), words.numel())
