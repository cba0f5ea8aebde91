"""The explicit calls of mok_torch.functional: schedule, forward and backward without autograd."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from mok_torch import _C, passes
from mok_torch.checks import (
    EXPLICIT_NAMES,
    LayerTensors,
    check_layer,
    check_num_experts,
    check_swiglu_limit,
    check_topk_idx,
    dense,
    require_contiguous,
    require_dtype,
    require_shape,
    require_tensor,
)
from mok_torch.config import MoKConfig
from mok_torch.passes import LayerCall, LayerGrads, Ring, WeightGrads
from mok_torch.plan import Plan, capacity_rows, make_plan, tokens_in_plan
from mok_torch.workspace import Workspace, check_integer, require_workspace

# Bounds what a mistyped num_local_experts can make the planning allocate.
MAX_LOCAL_EXPERTS = 2**20


class Schedule:
    """Who computes which row, for one routing of one batch; made by build_schedule.

    Any number of forwards and backwards, of several layers too, may use it.

    Attributes:
      info: num_tokens, num_tokens_total, num_experts, num_local_experts, first_expert,
        num_macrobatches, num_rows, num_row_blocks, minibatch_rows, ring_rows. On a GPU, reading it
        waits for the schedule kernel.
    """

    def __init__(self, engine, plan: Plan, workspace: Workspace, capacity_rows: int):
        self.engine = engine
        self.plan = plan
        self.place = _place(workspace)
        self.capacity_rows = capacity_rows

    @functools.cached_property
    def info(self):
        return self.engine.info()

    def tokens_per_expert(self) -> Tensor:
        """int64 [El]: routes of all ranks that lead to each expert of this rank.

        On the device of the schedule; on a GPU nothing waits.
        """
        return torch.as_tensor(self.engine.tokens_per_expert(), dtype=torch.int64)


def _place(workspace: Workspace) -> str:
    """What a schedule has in common with every workspace that it may be used with."""
    place = f"rank {workspace.rank} of {workspace.ep_size} with K = {workspace.topk}"
    return place if workspace.device.type == "cpu" else f"{place} on {workspace.device}"


@dataclasses.dataclass
class ForwardContext:
    """What a forward leaves for its backward; one per live forward.

    Attributes:
      ring: the activations that are kept.
      kept_macrobatches: 1: the ring is what the forward left. 0: the backward has consumed it, or
        recompute_forward_context made it, and the next backward recomputes everything.
      swiglu_limit: the forward's; 0: none. The backward must be given the same.
    """

    ring: Ring
    kept_macrobatches: int
    swiglu_limit: float = 0.0


class MainGrads(NamedTuple):
    """Buffers into which backward adds the weight gradients; None: that one is returned instead.

    fp32 or the dtype of the weights, of the weights' shapes, contiguous; one dtype for the routed
    and one for the shared weights, and within these all three or none.
    """

    routed_gate: Tensor | None = None
    routed_up: Tensor | None = None
    routed_down: Tensor | None = None
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None


def build_schedule(
    workspace: Workspace,
    config: MoKConfig | None,
    top_experts: Tensor,
    *,
    num_local_experts: int,
    num_experts: int | None = None,
) -> Schedule:
    """Plans one routing of one batch. Collective.

    Args:
      top_experts: int64 (or int32) [T, K], global expert ids in [-1, E); -1: no route.
      num_local_experts: El, the experts of this rank: 0 to 2^20.
      num_experts: see moe.
    """
    require_workspace(workspace)
    with workspace.reporting_errors(_C.OP_SCHEDULE):
        config = _check_config(config)
        check_num_experts(num_experts)
        require_tensor("top_experts", top_experts)
        leading = top_experts.shape[:-1]
        routes = check_topk_idx(top_experts, leading, workspace, EXPLICIT_NAMES)
        workspace.require_room("top_experts", routes.shape[0])
        check_integer("num_local_experts", num_local_experts, 0, MAX_LOCAL_EXPERTS)
        ep_size = workspace.ep_size
        tokens = tokens_in_plan(workspace, routes.shape[0])
        plan = make_plan(
            config,
            ep_size,
            tokens,
            workspace.topk,
            num_local_experts,
            device_type=workspace.device.type,
        )
    engine = passes.build_schedule(workspace, plan, routes, num_local_experts, num_experts or 0)
    capacity = capacity_rows(tokens, workspace.topk, num_local_experts)
    return Schedule(engine, plan, workspace, capacity)


def forward(
    config: MoKConfig | None,
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: Tensor,
    routed_up_weights: Tensor,
    routed_down_weights: Tensor,
    swiglu_limit: float | None = None,
    *,
    shared_scale: Tensor | None = None,
) -> tuple[Tensor, ForwardContext]:
    """The layer without autograd. Collective.

    Args:
      x: [T, H]; any leading dimensions will do.
      router_weights: fp32 [T, K].
      shared_gate_weights, shared_up_weights, shared_down_weights: [Is, H], [Is, H], [H, Is], or
        None all three.
      routed_gate_weights, routed_up_weights, routed_down_weights: [El, I, H], [El, I, H],
        [El, H, I].
      swiglu_limit: see moe.
      shared_scale: fp32 [T], a factor of the shared expert's output, or None for 1.

    Returns:
      The output, of x's shape and dtype, and the context for the backward.
    """
    routed = (routed_gate_weights, routed_up_weights, routed_down_weights)
    shared = (shared_gate_weights, shared_up_weights, shared_down_weights, shared_scale)
    require_workspace(workspace)
    with workspace.reporting_errors(_C.OP_FORWARD), torch.no_grad():
        plan = _plan_of_call(config, schedule)
        limit = check_swiglu_limit(swiglu_limit)
        layer = _check_call(x, router_weights, routed, shared, workspace, schedule)
        ring = passes.new_ring(layer, schedule.plan.ring_rows)
        out = x.new_empty(x.shape)
    passes.run_forward(LayerCall(workspace, plan, schedule.engine, layer, ring, limit), out)
    return out, ForwardContext(ring, kept_macrobatches=1, swiglu_limit=limit)


def recompute_forward_context(
    config: MoKConfig | None,
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: Tensor,
    routed_up_weights: Tensor,
    routed_down_weights: Tensor,
    swiglu_limit: float | None = None,
    *,
    shared_scale: Tensor | None = None,
) -> ForwardContext:
    """A context in place of one that was dropped after its forward: same bits in the backward.

    Nothing is computed here and no rank is met: the backward refills the ring, between its own
    exchanges, which is cheaper than a second forward. Arguments as in forward. An error reaches the
    other ranks in their backward.
    """
    routed = (routed_gate_weights, routed_up_weights, routed_down_weights)
    shared = (shared_gate_weights, shared_up_weights, shared_down_weights, shared_scale)
    require_workspace(workspace)
    with workspace.reporting_errors(_C.OP_BACKWARD):
        _plan_of_call(config, schedule)
        limit = check_swiglu_limit(swiglu_limit)
        layer = _check_call(x, router_weights, routed, shared, workspace, schedule)
        ring = passes.new_ring(layer, schedule.plan.ring_rows)
    return ForwardContext(ring, kept_macrobatches=0, swiglu_limit=limit)


def backward(
    config: MoKConfig | None,
    workspace: Workspace,
    schedule: Schedule,
    context: ForwardContext,
    d_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: Tensor,
    routed_up_weights: Tensor,
    routed_down_weights: Tensor,
    swiglu_limit: float | None = None,
    *,
    shared_scale: Tensor | None = None,
    weight_grad_dtype: torch.dtype | None = None,
    main_grads: MainGrads | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the layer. Collective.

    Args:
      context: from forward or recompute_forward_context. It may be used again: the second backward
        then recomputes what the first one overwrote.
      d_output: [T, H], of x's shape and dtype.
      weight_grad_dtype: of the weight gradients that are returned, torch.float32 or (None) that of
        the weights.
      main_grads: buffers to add the weight gradients to, in fp32, rounded once.
      Others: as in forward.

    Returns:
      (d_x, d_router_weights, d_w_routed_gate, d_w_routed_up, d_w_routed_down, d_w_shared_gate,
      d_w_shared_up, d_w_shared_down), then d_shared_scale if shared_scale was given. Gradients of
      shared weights that are None are None. A gradient that was added to a main_grads buffer is
      that buffer.
    """
    routed = (routed_gate_weights, routed_up_weights, routed_down_weights)
    shared = (shared_gate_weights, shared_up_weights, shared_down_weights, shared_scale)
    require_workspace(workspace)
    with workspace.reporting_errors(_C.OP_BACKWARD), torch.no_grad():
        plan = _plan_of_call(config, schedule)
        limit = check_swiglu_limit(swiglu_limit)
        layer = _check_call(x, router_weights, routed, shared, workspace, schedule)
        _check_context(context, schedule, layer, limit)
        require_tensor("d_output", d_output, x.device)
        require_dtype("d_output", d_output, x.dtype, " (the dtype of x)")
        require_shape("d_output", d_output, x.shape, "of x")
        d_tokens = dense(d_output.reshape(layer.x.shape))
        grads = _make_grads(layer, weight_grad_dtype, _check_main_grads(main_grads))
    kept = context.kept_macrobatches
    if passes.may_overwrite_ring(schedule.engine, schedule.plan, schedule.capacity_rows):
        context.kept_macrobatches = 0  # the pass overwrites the ring, even one that fails
    call = LayerCall(workspace, plan, schedule.engine, layer, context.ring, limit)
    passes.run_backward(call, kept, d_tokens, grads)
    results = (
        grads.x.view(x.shape),
        grads.topk_weight.view(router_weights.shape),
        *grads.routed[:3],
        *grads.shared[:3],
    )
    if shared_scale is None:
        return results
    return *results, grads.shared_scale.view(shared_scale.shape)


def _check_config(config: MoKConfig | None) -> MoKConfig:
    if config is not None and not isinstance(config, MoKConfig):
        raise TypeError(f"config: expected a MoKConfig or None, got {type(config).__name__}")
    return MoKConfig() if config is None else config


def _plan_of_call(config: MoKConfig | None, schedule: Schedule) -> Plan:
    """The workers of this call's config with the sizes of the schedule's."""
    config = _check_config(config)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule: expected a Schedule, got {type(schedule).__name__}")
    workers = make_plan(config, 1, 0, 1, 0)
    sizes = schedule.plan
    return workers._replace(
        ring_rows=sizes.ring_rows,
        schedule_words=sizes.schedule_words,
        minibatch_rows=sizes.minibatch_rows,
    )


def _check_call(x, router_weights, routed, shared, workspace, schedule) -> LayerTensors:
    if schedule.place != _place(workspace):
        raise ValueError(
            f"schedule: built for {schedule.place}, but the workspace is of {_place(workspace)}"
        )
    layer = check_layer(x, router_weights, routed, shared, workspace, EXPLICIT_NAMES)
    passes.check_schedule(schedule.engine, layer, EXPLICIT_NAMES)
    return layer


def _check_context(context, schedule: Schedule, layer: LayerTensors, swiglu_limit: float):
    if not isinstance(context, ForwardContext):
        raise TypeError(f"context: expected a ForwardContext, got {type(context).__name__}")
    if not isinstance(context.ring, Ring):
        raise TypeError(f"context.ring: expected a Ring, got {type(context.ring).__name__}")
    check_integer("context.kept_macrobatches", context.kept_macrobatches, 0, 1)
    names = [f"context.ring.{name}" for name in Ring._fields]
    passes.check_ring(names, context.ring, layer, schedule.plan.ring_rows)
    if context.swiglu_limit != swiglu_limit:
        raise ValueError(
            f"swiglu_limit: the forward of this context had {context.swiglu_limit or None}, "
            f"got {swiglu_limit or None}"
        )


def _check_main_grads(main_grads: MainGrads | None) -> MainGrads:
    if main_grads is not None and not isinstance(main_grads, MainGrads):
        raise TypeError(
            f"main_grads: expected a MainGrads or None, got {type(main_grads).__name__}"
        )
    return MainGrads() if main_grads is None else main_grads


def _refuse_shared_memory(main_grads: MainGrads):
    """Raises if two buffers, all of them contiguous, overlap."""
    spans = []
    for name, buffer in zip(MainGrads._fields, main_grads, strict=True):
        if buffer is not None and buffer.numel():
            spans.append((buffer.data_ptr(), buffer.numel() * buffer.element_size(), name))
    spans.sort(key=lambda span: span[0])
    for (begin, size, name), (next_begin, _, other) in itertools.pairwise(spans):
        if next_begin < begin + size:
            raise ValueError(f"main_grads.{other}: shares memory with main_grads.{name}")


def _make_grads(layer: LayerTensors, weight_grad_dtype, main_grads: MainGrads) -> LayerGrads:
    dtype = layer.x.dtype if weight_grad_dtype is None else weight_grad_dtype
    if dtype not in (torch.float32, layer.x.dtype):
        raise TypeError(
            f"weight_grad_dtype: expected torch.float32 or {layer.x.dtype}, got {dtype}"
        )
    shared = layer.shared
    shared_weights = (None, None, None) if shared is None else shared[:3]
    has_scale = shared is not None and shared.scale is not None
    grads = LayerGrads(
        x=layer.x.new_empty(layer.x.shape),
        topk_weight=layer.topk_weight.new_empty(layer.topk_weight.shape),
        shared_scale=layer.topk_weight.new_empty(layer.num_tokens) if has_scale else None,
        routed=_weight_grads(
            MainGrads._fields[:3], main_grads[:3], (layer.gate, layer.up, layer.down), dtype
        ),
        shared=_weight_grads(MainGrads._fields[3:], main_grads[3:], shared_weights, dtype),
    )
    _refuse_shared_memory(main_grads)
    return grads


def _weight_grads(names, buffers, weights, dtype: torch.dtype) -> WeightGrads:
    """The caller's buffers to add to, or new ones to write."""
    given = [buffer is not None for buffer in buffers]
    if not any(given):
        return WeightGrads(*(w if w is None else passes.new_gradient(w, dtype) for w in weights))
    for name, buffer, weight in zip(names, buffers, weights, strict=True):
        name = f"main_grads.{name}"
        if weight is None:
            raise ValueError(f"{name}: given for a layer without that weight")
        require_tensor(name, buffer, weight.device)
        if buffer.dtype not in (torch.float32, weight.dtype):
            raise TypeError(f"{name}: expected torch.float32 or {weight.dtype}, got {buffer.dtype}")
        require_dtype(name, buffer, buffers[0].dtype, f" (the dtype of main_grads.{names[0]})")
        require_shape(name, buffer, weight.shape, "of the weight")
        require_contiguous(name, buffer)
    return WeightGrads(*buffers, accumulate=True)
