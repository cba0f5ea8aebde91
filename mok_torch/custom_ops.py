"""The layer as torch.library operators: mok::moe_forward and mok::moe_backward.

Both are functional: they write nothing but their outputs, so they can be recomputed, reordered by a
compiler and differentiated with several forwards alive. All that the backward needs travels in
ordinary tensors (the ring and the serialised schedule), which autograd, activation checkpointing
and offloading own and free as usual. The fake kernels are shape formulas; all checks are in the
real kernels, which can tell the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mok_torch import _C, passes
from mok_torch.checks import (
    MOE_NAMES,
    LayerTensors,
    check_default,
    check_layer,
    check_swiglu_limit,
    check_topk_idx,
    dense,
    in_words_of,
    refuse_forward_mode,
    require_dtype,
    require_shape,
    require_tensor,
)
from mok_torch.cuda_passes import CudaSchedule
from mok_torch.passes import LayerCall, LayerGrads, Ring
from mok_torch.plan import Plan, capacity_rows, tokens_in_plan
from mok_torch.workspace import (
    DEFAULT_HANDLE,
    Workspace,
    default_workspace,
    reporting_errors_of,
    workspace_of_handle,
)

_NUM_WEIGHTS = 6  # routed gate, up, down; shared gate, up, down


def _find_workspace(handle: int, x: Tensor, choices: Tensor, name: str) -> Workspace:
    """choices: topk_idx or topk_weight, [..., K]; name: its."""
    if handle != DEFAULT_HANDLE:
        return workspace_of_handle(handle)
    check_default(x, choices, name)
    return default_workspace(x.device, x.shape[-1], choices.shape[-1], x.dtype)


def _refuse_forward_mode(operator: str, names: Sequence[str], tensors: Sequence[Tensor | None]):
    """Below autograd, where a tangent is dropped: the formula of autograd has none to offer."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None:
            refuse_forward_mode(name, tensor, operator)


_WEIGHT_NAMES = ("w_gate", "w_up", "w_down", "shared_w_gate", "shared_w_up", "shared_w_down")
_INPUT_NAMES = ("x", "topk_weight", *_WEIGHT_NAMES, "shared_scale")
_RING_NAMES = ("ring_x", "ring_gate", "ring_up", "shared_gate", "shared_up")


# Written out: PyTorch's inference from annotations differs between versions.
_LAYER_SCHEMA = (
    "Tensor x, {routing}Tensor topk_weight, Tensor w_gate, Tensor w_up, Tensor w_down, "
    "Tensor? shared_w_gate, Tensor? shared_w_up, Tensor? shared_w_down, Tensor? shared_scale"
)
_SETTINGS_SCHEMA = "SymInt workspace, SymInt[] plan, float? swiglu_limit"
_FORWARD_SCHEMA = (
    f"({_LAYER_SCHEMA.format(routing='Tensor topk_idx, ')}, {_SETTINGS_SCHEMA})"
    " -> (" + ", ".join(["Tensor"] * 7) + ")"
)
_BACKWARD_SCHEMA = (
    f"(Tensor d_out, {_LAYER_SCHEMA.format(routing='')}, Tensor schedule_words, Tensor ring_x, "
    "Tensor ring_gate, Tensor ring_up, Tensor shared_gate, Tensor shared_up, "
    f"{_SETTINGS_SCHEMA}, bool[] weight_needed)"
    " -> (" + ", ".join(["Tensor"] * 9) + ")"
)


@torch.library.custom_op("mok::moe_forward", mutates_args=(), schema=_FORWARD_SCHEMA)
def moe_forward(
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    shared_w_gate: Tensor | None,
    shared_w_up: Tensor | None,
    shared_w_down: Tensor | None,
    shared_scale: Tensor | None,
    workspace: int,
    plan: Sequence[int],
    swiglu_limit: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Schedule and forward. Returns out, the schedule's words, and the five tensors of a Ring."""
    routed = (w_gate, w_up, w_down)
    shared = (shared_w_gate, shared_w_up, shared_w_down, shared_scale)
    inputs = (x, topk_idx, topk_weight, *routed, *shared, workspace, plan, swiglu_limit)
    owner, plan, limit, layer, routes = check_forward(inputs)
    with owner.reporting_errors(_C.OP_SCHEDULE):
        out = x.new_empty(x.shape)
        ring = passes.new_ring(layer, plan.ring_rows)
    experts = (layer.num_local_experts, plan.num_experts)
    widths = (layer.intermediate, layer.shared_intermediate)
    with in_words_of(MOE_NAMES):
        schedule = passes.build_schedule(owner, plan, routes, *experts, widths)
        passes.run_forward(LayerCall(owner, plan, schedule, layer, ring, limit), out)
    return out, passes.save_schedule(schedule, plan.schedule_words), *ring


def check_forward(
    inputs: Sequence,
) -> tuple[Workspace, Plan, float, LayerTensors, Tensor]:
    """All checks of a forward but those of the engine; inputs: of the operator.

    Returns:
      The workspace, with room for the tokens; the plan; 0 or the clamp of SwiGLU; the tensors; the
      expert ids [T, K].
    """
    x, topk_idx, topk_weight, *others, workspace, plan, swiglu_limit = inputs
    owner = _find_workspace(workspace, x, topk_idx, "topk_idx")
    with owner.reporting_errors(_C.OP_SCHEDULE):
        _refuse_forward_mode("moe_forward", _INPUT_NAMES, (x, topk_weight, *others))
        limit = check_swiglu_limit(swiglu_limit)
        layer = check_layer(x, topk_weight, others[:3], others[3:], owner)
        routes = check_topk_idx(topk_idx, x.shape[:-1], owner)
        owner.require_room("x", layer.num_tokens)
    return owner, Plan(*plan), limit, layer, routes


def check_backward(
    inputs: Sequence[Tensor | None], words: Tensor, plan: Plan, owner: Workspace
) -> tuple[LayerTensors, Tensor, _C.Schedule | CudaSchedule]:
    """The checks of a backward that do not concern its ring.

    inputs: d_out, x, topk_weight, the six weights, shared_scale. words: what a forward has saved of
    its schedule.

    Returns:
      The tensors, d_out [T, H], the schedule.
    """
    d_out, x, topk_weight, *others = inputs
    layer = check_layer(x, topk_weight, others[:3], others[3:], owner)
    require_tensor("d_out", d_out, x.device)
    require_dtype("d_out", d_out, x.dtype, " (the dtype of x)")
    require_shape("d_out", d_out, x.shape, "of x")
    owner.require_room("x", layer.num_tokens)
    schedule = passes.load_schedule(words, layer, plan, owner)
    passes.check_schedule(schedule, layer)
    return layer, dense(d_out.reshape(layer.x.shape)), schedule


@moe_forward.register_fake
def _(
    x,
    topk_idx,
    topk_weight,
    w_gate,
    w_up,
    w_down,
    shared_w_gate,
    shared_w_up,
    shared_w_down,
    shared_scale,
    workspace,
    plan,
    swiglu_limit,
):
    plan = Plan(*plan)
    tokens = x.numel() // x.shape[-1]
    shared_intermediate = 0 if shared_w_gate is None else shared_w_gate.shape[0]
    shapes = passes.ring_shapes(
        x.shape[-1], plan.ring_rows, tokens, w_gate.shape[1], shared_intermediate
    )
    ring = [x.new_empty(shape) for shape in shapes]
    words = x.new_empty((plan.schedule_words,), dtype=torch.int32)
    return x.new_empty(x.shape), words, *ring


@torch.library.custom_op("mok::moe_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def moe_backward(
    d_out: Tensor,
    x: Tensor,
    topk_weight: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    shared_w_gate: Tensor | None,
    shared_w_up: Tensor | None,
    shared_w_down: Tensor | None,
    shared_scale: Tensor | None,
    schedule_words: Tensor,
    ring_x: Tensor,
    ring_gate: Tensor,
    ring_up: Tensor,
    shared_gate: Tensor,
    shared_up: Tensor,
    workspace: int,
    plan: Sequence[int],
    swiglu_limit: float | None,
    weight_needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, topk_weight, the six weights and shared_scale.

    weight_needed: which of the six weights' gradients are wanted. Those that are not, or whose
    input is None, are empty.
    """
    weights = (w_gate, w_up, w_down, shared_w_gate, shared_w_up, shared_w_down)
    saved = (schedule_words, ring_x, ring_gate, ring_up, shared_gate, shared_up)
    grads = run_backward(
        (d_out, x, topk_weight, *weights, shared_scale),
        saved,
        (workspace, plan, swiglu_limit),
        lambda layer: passes.new_needed_grads(layer.tensors(), weight_needed),
    )
    d_weights = (*grads.routed[:3], *grads.shared[:3])
    d_scale = topk_weight.new_empty(0)
    if shared_scale is not None:
        d_scale = grads.shared_scale.view(shared_scale.shape)
    return (
        grads.x.view(x.shape),
        grads.topk_weight.view(topk_weight.shape),
        *(x.new_empty(0) if grad is None else grad for grad in d_weights),
        d_scale,
    )


def run_backward(
    inputs: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    settings: Sequence,
    new_grads: Callable[[LayerTensors], LayerGrads],
) -> LayerGrads:
    """The checks and the pass of a backward, from what a forward has returned. Collective.

    Args:
      inputs: d_out, x, topk_weight, the six weights, shared_scale.
      saved: the schedule's words, and the tensors of a Ring.
      settings: the workspace's handle, the plan, swiglu_limit.
      new_grads: makes what the pass writes or adds to.

    Returns:
      What new_grads made.
    """
    x, topk_weight = inputs[1:3]
    words, *ring = saved
    workspace, plan, swiglu_limit = settings
    owner = _find_workspace(workspace, x, topk_weight, "topk_weight")
    with owner.reporting_errors(_C.OP_BACKWARD):
        plan = Plan(*plan)
        _refuse_forward_mode("moe_backward", ("d_out", *_INPUT_NAMES), inputs)
        limit = check_swiglu_limit(swiglu_limit)
        layer, d_tokens, schedule = check_backward(inputs, words, plan, owner)
        ring = Ring(*map(dense, ring))
        passes.check_ring(_RING_NAMES, ring, layer, plan.ring_rows)
        if passes.overwrites_ring(schedule):
            # Rows that autograd holds. (On GPUs only where a compiler calls the operator: moe_cuda
            # needs no copy.) Those of x stay as they are where the ring certainly holds all.
            tokens = tokens_in_plan(owner, layer.num_tokens)
            holds_all = plan.ring_rows >= capacity_rows(tokens, owner.topk, layer.num_local_experts)
            x_rows = ring.x if holds_all else ring.x.clone()
            ring = Ring(x_rows, *(rows.clone() for rows in ring[1:]))
        grads = new_grads(layer)
    call = LayerCall(owner, plan, schedule, layer, ring, limit)
    with in_words_of(MOE_NAMES):
        passes.run_backward(call, d_tokens, 1, grads)
    return grads


@moe_backward.register_fake
def _(
    d_out,
    x,
    topk_weight,
    w_gate,
    w_up,
    w_down,
    shared_w_gate,
    shared_w_up,
    shared_w_down,
    shared_scale,
    schedule_words,
    ring_x,
    ring_gate,
    ring_up,
    shared_gate,
    shared_up,
    workspace,
    plan,
    swiglu_limit,
    weight_needed,
):
    weights = (w_gate, w_up, w_down, shared_w_gate, shared_w_up, shared_w_down)
    d_weights = [
        x.new_empty(0) if weight is None or not needed else weight.new_empty(weight.shape)
        for weight, needed in zip(weights, weight_needed, strict=True)
    ]
    d_scale = topk_weight.new_empty(0 if shared_scale is None else shared_scale.shape)
    return (
        x.new_empty(x.shape),
        topk_weight.new_empty(topk_weight.shape),
        *d_weights,
        d_scale,
    )


def _save_for_backward(ctx, inputs, output):
    x, _, topk_weight, *weights_and_scale = inputs[:10]
    handle, plan, limit = inputs[10:]
    out, *saved = output
    del out
    ctx.save_for_backward(x, topk_weight, *weights_and_scale, *saved)
    ctx.mark_non_differentiable(*saved)
    # Else autograd would fill a zero gradient of the size of the ring.
    ctx.set_materialize_grads(False)
    ctx.settings = (handle, plan, limit)
    # Keeps a workspace alive that its owner drops before the backward. (A compiler that traces this
    # may have made the handle symbolic.)
    named = isinstance(handle, int) and handle != DEFAULT_HANDLE
    ctx.workspace = workspace_of_handle(handle) if named else None


def saved_tensors_of(ctx) -> tuple[Tensor | None, ...]:
    """ctx.saved_tensors; PyTorch's error of a tensor that is not what it was, in words of ours."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            "MoE layer, backward: x, or another tensor of the call, which the backward reads, has "
            "been changed in place since the forward (x += layer(x) has to be x = x + layer(x))"
        ) from error


def _backward(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 13
    with reporting_errors_of(ctx.workspace, _C.OP_BACKWARD):  # hooks may run, and fail
        saved = saved_tensors_of(ctx)
    x, topk_weight, *weights_and_scale, words, r0, r1, r2, r3, r4 = saved
    needed = [ctx.needs_input_grad[3 + index] for index in range(_NUM_WEIGHTS)]
    d_x, d_topk_weight, *d_weights, d_scale = moe_backward(
        d_out, x, topk_weight, *weights_and_scale, words, r0, r1, r2, r3, r4, *ctx.settings, needed
    )
    d_weights = [grad if need else None for grad, need in zip(d_weights, needed, strict=True)]
    d_scale = d_scale if ctx.needs_input_grad[9] else None
    return d_x, None, d_topk_weight, *d_weights, d_scale, None, None, None


moe_forward.register_autograd(_backward, setup_context=_save_for_backward)


def refuse_double_backward():
    """Raises in place of a second differentiation."""
    raise NotImplementedError(
        "mok_torch: the MoE layer has no double backward; differentiate it once, without "
        "create_graph=True"
    )


class NoDoubleBackward(torch.autograd.Function):
    """apply(gradients, what they are functions of): the gradients, not to be differentiated."""

    @staticmethod
    def forward(ctx, gradients, *inputs):
        del inputs
        ctx.set_materialize_grads(False)
        return gradients

    @staticmethod
    def backward(ctx, *d_gradients):
        refuse_double_backward()


def _no_double_backward(ctx, *grads):
    refuse_double_backward()


moe_backward.register_autograd(_no_double_backward)
