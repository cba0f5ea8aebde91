"""The explicit calls of mok_torch.functional: schedule, forward and backward without autograd."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mok_torch import _C, cuda_passes, explicit_cuda, passes
from mok_torch.accepted_calls import exactly, key_of_call
from mok_torch.checks import (
    EXPLICIT_NAMES,
    LayerTensors,
    check_layer,
    check_num_experts,
    check_swiglu_limit,
    check_topk_idx,
    dense,
    in_words_of,
    refuse_tracing,
    require_dtype,
    require_shape,
    require_tensor,
)
from mok_torch.config import MoKConfig
from mok_torch.cuda_passes import CudaSchedule, PassCall
from mok_torch.main_grads import MainGrads, check_main_grads, refuse_shared_memory
from mok_torch.passes import LayerCall, LayerGrads, WeightGrads
from mok_torch.plan import Plan, make_plan, tokens_in_plan
from mok_torch.ring import DeviceRing, ForwardContext, Ring, RingLayout
from mok_torch.scalars import as_integer
from mok_torch.workspace import Workspace, require_workspace

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

    def __init__(self, engine, plan: Plan, place: str):
        """place: see _place."""
        self.engine = engine
        self.plan = plan
        self.place = place

    @functools.cached_property
    def info(self):
        return self.engine.info()

    def tokens_per_expert(self) -> Tensor:
        """int64 [El]: routes of all ranks that lead to each expert of this rank.

        On the device of the schedule; on a GPU nothing waits.
        """
        counts = self.engine.tokens_per_expert()
        return counts if isinstance(counts, Tensor) else torch.tensor(counts, device="cpu").long()


def _place(workspace: Workspace) -> str:
    """What a schedule has in common with every workspace that it may be used with."""
    place = f"rank {workspace.rank} of {workspace.ep_size} with K = {workspace.topk}"
    return place if workspace.device.type == "cpu" else f"{place} on {workspace.device}"


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

    Raises:
      ValueError, TypeError, NotImplementedError: on every rank, for what is wrong on one. An expert
        id out of range only the GPU sees: ValueError in the next call that builds a schedule, or in
        Workspace.check().
      RankTimeoutError: a rank did not come; on GPUs in such a later call too.
    """
    require_workspace(workspace)
    settings = ("schedule", config, exactly(num_local_experts), exactly(num_experts))
    engine, key, _, known = _find(workspace, settings, (top_experts,))
    if known is not None:
        plan, place, call = known
        built = explicit_cuda.build_schedule(workspace, engine, call, top_experts)
        return Schedule(built, plan, place)
    with workspace.reporting_errors(_C.OP_SCHEDULE):
        refuse_tracing("build_schedule")
        config = _check_config(config)
        num_experts = check_num_experts(num_experts)
        require_tensor("top_experts", top_experts)
        leading = top_experts.shape[:-1]
        routes = check_topk_idx(top_experts, leading, workspace, EXPLICIT_NAMES)
        workspace.require_room("top_experts", routes.shape[0])
        num_local_experts = as_integer("num_local_experts", num_local_experts, 0, MAX_LOCAL_EXPERTS)
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
    experts, place = (num_local_experts, num_experts or 0), _place(workspace)
    if engine is not None:
        built, call = cuda_passes.build_schedule(workspace, plan, routes, *experts)
        # Where num_experts is left open, several ranks have to meet every time.
        if ep_size == 1 or num_experts is not None:
            if call.sizes.max_tokens == engine.max_tokens:
                engine.accepted.add(key, (plan, place, call))
    else:
        with in_words_of(EXPLICIT_NAMES):
            built = passes.build_schedule(workspace, plan, routes, *experts)
    return Schedule(built, plan, place)


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
      x: [T, H] of the workspace's dtype, bfloat16 or, on a CPU, float32; any leading dimensions
        will do.
      router_weights: fp32 [T, K].
      shared_gate_weights, shared_up_weights, shared_down_weights: [Is, H], [Is, H], [H, Is], or
        None all three.
      routed_gate_weights, routed_up_weights, routed_down_weights: [El, I, H], [El, I, H],
        [El, H, I]. All weights are of x's dtype.
      swiglu_limit: see moe.
      shared_scale: fp32 [T], a factor of the shared expert's output, or None for 1.

    Returns:
      The output, of x's shape and dtype, and the context for the backward.

    Raises:
      ValueError, TypeError, NotImplementedError: for what is wrong on this rank. Of several ranks
        on a CPU, each raises it. Of several on GPUs, this one has left the workspace for good, as
        with any other error here (memory that runs out): the others raise in Workspace.check() or
        after their next schedule, and all have to make a new workspace (get_workspace does).
      RankTimeoutError: a rank did not come; on GPUs in a later call or Workspace.check().
    """
    routed = (routed_gate_weights, routed_up_weights, routed_down_weights)
    shared = (shared_gate_weights, shared_up_weights, shared_down_weights, shared_scale)
    require_workspace(workspace)
    settings = ("forward", config, exactly(swiglu_limit))
    tensors = (x, router_weights, *routed, *shared)
    engine, key, inputs, call = _find_pass(workspace, settings, schedule, tensors)
    if call is not None:
        return explicit_cuda.forward(workspace, engine, call, schedule.engine, inputs, x)
    with workspace.reporting_errors(_C.OP_FORWARD), torch.no_grad():
        refuse_tracing("forward")
        plan = _plan_of_call(config, schedule)
        limit = check_swiglu_limit(swiglu_limit)
        layer = _check_call(x, router_weights, routed, shared, workspace, schedule)
        if engine is not None:
            call = cuda_passes.pass_call(engine, plan, schedule.engine.sizes, layer, limit)
        else:
            ring = passes.new_ring(layer, schedule.plan.ring_rows)
            out = passes.new_output(x)
    if engine is not None:
        engine.accepted.add(key, call)
        inputs = passes.addresses(layer.tensors())
        return explicit_cuda.forward(workspace, engine, call, schedule.engine, inputs, x)
    with in_words_of(EXPLICIT_NAMES):
        passes.run_forward(LayerCall(workspace, plan, schedule.engine, layer, ring, limit), out)
    return out, ForwardContext(ring, kept_macrobatches=1, swiglu_limit=limit)


def _find(workspace: Workspace, settings: tuple, tensors):
    """For a call on a GPU its engine, key, addresses, and what an equal call came to, if any."""
    if not workspace.on_gpu:
        return None, None, None, None
    engine = workspace.engine
    if torch._C._are_functorch_transforms_active():  # the checks refuse them
        return engine, None, [], None
    key, addresses = key_of_call(settings, engine.device, tensors)
    return engine, key, addresses, engine.accepted.find(key)


def _find_pass(workspace: Workspace, settings: tuple, schedule, tensors):
    """_find for a pass, whose schedule may be of any kind yet."""
    if not isinstance(schedule, Schedule) or not isinstance(schedule.engine, CudaSchedule):
        return None, None, None, None
    return _find(workspace, (*settings, schedule.place, schedule.engine.sizes), tensors)


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
    exchanges, which is cheaper than a second forward. Arguments as in forward.

    Raises:
      ValueError, TypeError, NotImplementedError: as forward, but the other ranks of a CPU raise in
        their backward.
    """
    routed = (routed_gate_weights, routed_up_weights, routed_down_weights)
    shared = (shared_gate_weights, shared_up_weights, shared_down_weights, shared_scale)
    require_workspace(workspace)
    with workspace.reporting_errors(_C.OP_BACKWARD):
        refuse_tracing("recompute_forward_context")
        _plan_of_call(config, schedule)
        limit = check_swiglu_limit(swiglu_limit)
        layer = _check_call(x, router_weights, routed, shared, workspace, schedule)
        if workspace.on_gpu:
            shapes = passes.layer_ring_shapes(layer, schedule.plan.ring_rows)
            stream = workspace.engine.current_stream()
            layout = RingLayout.of_shapes(shapes)
            ring = DeviceRing(workspace.engine.new_ring(layout.size))
            return ForwardContext(ring, 0, limit, layout, stream)
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
    """The gradients of the layer. Collective. Raises what forward does.

    Args:
      context: from forward or recompute_forward_context. It may be used again: the second backward
        then recomputes what the first one overwrote.
      d_output: [T, H], of x's shape and dtype.
      weight_grad_dtype: of the weight gradients that are returned, torch.float32 or (None) that of
        the weights.
      main_grads: buffers to add the weight gradients to, in fp32, rounded once.
      Others: as in forward; x and all weights of the forward's dtype.

    Returns:
      (d_x, d_router_weights, d_w_routed_gate, d_w_routed_up, d_w_routed_down, d_w_shared_gate,
      d_w_shared_up, d_w_shared_down), then d_shared_scale if shared_scale was given. Gradients of
      shared weights that are None are None. A gradient that was added to a main_grads buffer is
      that buffer.
    """
    routed = (routed_gate_weights, routed_up_weights, routed_down_weights)
    shared = (shared_gate_weights, shared_up_weights, shared_down_weights, shared_scale)
    require_workspace(workspace)
    buffers = explicit_cuda.key_of_buffers(main_grads, workspace.device)
    settings = ("backward", config, exactly(swiglu_limit), weight_grad_dtype, buffers)
    ring = context.ring if isinstance(context, ForwardContext) else None
    buffer = ring.buffer if isinstance(ring, DeviceRing) else None
    tensors = (x, router_weights, *routed, *shared)
    found = _find_pass(workspace, settings, schedule, (*tensors, d_output, buffer))
    engine, key, inputs, call = found
    if call is not None and buffer is not None and _fits(context, call):
        with workspace.reporting_errors(_C.OP_BACKWARD):
            grads = _new_grads(tensors, weight_grad_dtype, main_grads)
        operands = ((buffer, context.stream), d_output, _consume(context, schedule), grads)
        given = (schedule.engine, inputs[: len(tensors)], operands)
        explicit_cuda.backward(workspace, engine, call, *given)
        return _results(grads)
    with workspace.reporting_errors(_C.OP_BACKWARD), torch.no_grad():
        refuse_tracing("backward")
        plan = _plan_of_call(config, schedule)
        limit = check_swiglu_limit(swiglu_limit)
        layer = _check_call(x, router_weights, routed, shared, workspace, schedule)
        _check_context(context, schedule, layer, limit)
        require_tensor("d_output", d_output, x.device)
        require_dtype("d_output", d_output, x.dtype, " (the dtype of x)")
        require_shape("d_output", d_output, x.shape, "of x")
        d_tokens = dense(d_output.reshape(layer.x.shape))
        check_main_grads(layer, weight_grad_dtype, main_grads)
        grads = _new_grads(tensors, weight_grad_dtype, main_grads)
        if buffer is not None:
            of_pass = (plan, schedule.engine.sizes, layer, limit)
            call = cuda_passes.pass_call(engine, *of_pass, is_backward=True)
    operands = (d_tokens, _consume(context, schedule), grads)
    if buffer is not None:
        engine.accepted.add(key, call)
        operands = ((buffer, context.stream), *operands)
        given = (schedule.engine, passes.addresses(layer.tensors()), operands)
        explicit_cuda.backward(workspace, engine, call, *given)
    else:
        call = LayerCall(workspace, plan, schedule.engine, layer, ring, limit)
        with in_words_of(EXPLICIT_NAMES):
            passes.run_backward(call, *operands)
    return _results(grads)


def _fits(context: ForwardContext, call: PassCall) -> bool:
    """Whether the checks would find nothing wrong with the context, beside its buffer."""
    kept = context.kept_macrobatches
    return (
        context.layout == call.layout
        and type(kept) is int
        and 0 <= kept <= 1
        and context.swiglu_limit == call.swiglu_limit
    )


def _consume(context: ForwardContext, schedule: Schedule) -> int:
    """The context's kept_macrobatches for the backward that comes now."""
    kept = context.kept_macrobatches
    if passes.overwrites_ring(schedule.engine):
        context.kept_macrobatches = 0  # the pass overwrites the ring, even one that fails
    return kept


def _results(grads: LayerGrads) -> tuple[Tensor | None, ...]:
    results = (grads.x, grads.topk_weight, *grads.routed[:3], *grads.shared[:3])
    return results if grads.shared_scale is None else (*results, grads.shared_scale)


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
    ring = context.ring
    if isinstance(ring, DeviceRing) and isinstance(schedule.engine, CudaSchedule):
        layout = RingLayout.of_shapes(passes.layer_ring_shapes(layer, schedule.plan.ring_rows))
        if context.layout != layout:
            raise ValueError(f"context.layout: expected {layout}, got {context.layout}")
        ring = passes.check_buffer("context.ring.buffer", ring.buffer, layer, layout)
    if not isinstance(ring, Ring):
        raise TypeError(f"context.ring: expected a Ring, got {type(ring).__name__}")
    as_integer("context.kept_macrobatches", context.kept_macrobatches, 0, 1)
    names = [f"context.ring.{name}" for name in Ring._fields]
    passes.check_ring(names, ring, layer, schedule.plan.ring_rows)
    if context.swiglu_limit != swiglu_limit:
        raise ValueError(
            f"swiglu_limit: the forward of this context had {context.swiglu_limit or None}, "
            f"got {swiglu_limit or None}"
        )


def _new_grads(tensors, weight_grad_dtype, main_grads: MainGrads | None) -> LayerGrads:
    """Outputs of a backward; tensors: as LayerTensors.tensors(), with any leading dimensions.

    Raises if main_grads share memory with x or weights: a key does not hold these addresses.
    """
    x, _, *weights, _ = tensors
    if main_grads is not None:
        refuse_shared_memory(main_grads, (x, *weights))
    dtype = x.dtype if weight_grad_dtype is None else weight_grad_dtype
    routed = _weight_grads(main_grads and main_grads[:3], weights[:3], dtype)
    shared = _weight_grads(main_grads and main_grads[3:], weights[3:], dtype)
    return passes.new_grads(tensors, routed, shared)


def _weight_grads(buffers, weights, dtype: torch.dtype) -> WeightGrads:
    """The caller's buffers to add to, if there are any, or new ones to write."""
    if buffers is not None and any(buffer is not None for buffer in buffers):
        return WeightGrads(*buffers, accumulate=True)
    with torch._C.DisableTorchFunctionSubclass():  # plain tensors, whatever the weights are
        return WeightGrads(*[w if w is None else passes.new_gradient(w, dtype) for w in weights])
