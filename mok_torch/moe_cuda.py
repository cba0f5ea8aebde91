"""functional.moe on a GPU in eager mode: an autograd function that queues the kernels itself.

The operators of custom_ops.py are for tracing: a compiler, or a mode that looks at every operator.
One call of a custom operator of PyTorch costs the host more than the kernels' launches,
so calls that nobody traces go this way. It does the same arithmetic, and keeps the same for the
backward; being no operator, it may let the backward overwrite the ring instead of a copy of it, and
have a second backward of the same forward recompute what the first one overwrote.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from mok_torch import _C, cuda_passes, custom_ops, moe_main_grads, passes
from mok_torch.accepted_calls import key_of_call
from mok_torch.checks import dense
from mok_torch.cuda_engine import CudaEngine
from mok_torch.cuda_passes import PassCall, ScheduleCall
from mok_torch.groups import SingleRank
from mok_torch.main_grads import main_grads_of, tell_trainer
from mok_torch.plan import Plan
from mok_torch.workspace import Workspace

_NUM_INPUTS = 9  # LayerTensors.tensors()


class MoeCall(NamedTuple):
    """What calls of equal shapes have in common.

    Attributes:
      fuses: the backward adds the weights' gradients to their main_grad.
    """

    schedule: ScheduleCall
    forward: PassCall
    plan: Plan
    fuses: bool


class Run(NamedTuple):
    """One call.

    Attributes:
      inputs: addresses of LayerTensors.tensors().
      routes: [..., K], contiguous.
    """

    workspace: Workspace
    engine: CudaEngine
    call: MoeCall
    inputs: Sequence[int]
    routes: Tensor


def applies(x) -> bool:
    """Whether a call with these tokens is one that nobody traces, on a GPU."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and _modes_only_set_a_device()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def _modes_only_set_a_device() -> bool:
    """Whether no mode sees calls of PyTorch's functions but torch.set_default_device's.

    That one, also of `with torch.device(...)`, names a device where a call names none, as no call
    here does.
    """
    if not torch._C._is_torch_function_mode_enabled():
        return True
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def find(
    arguments: Sequence[Tensor], shared, workspace: Workspace | None, settings: Hashable
) -> tuple[Hashable | None, Run | None]:
    """The key of moe's call, and what to run if an equal call has been accepted.

    arguments: x, topk_idx, topk_weight, routed gate, up, down, unchecked but for applies(x).
    """
    x, topk_idx, *others = arguments
    if shared is None:
        shared = (None,) * 4
    elif isinstance(shared, tuple) and len(shared) in (3, 4):
        shared = (*shared, None)[:4]
    else:
        return None, None
    tensors = (x, *others, *shared, topk_idx)
    key, addresses = key_of_call((settings, x.device), x.device, tensors)
    if key is None or topk_idx is None or torch.is_autocast_enabled("cuda"):
        return None, None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        key += ("differentiated",)
    if not x.dim() or not topk_idx.dim():
        return None, None
    owner = workspace
    if owner is None:
        owner = SingleRank.workspaces.get((x.device, x.shape[-1], topk_idx.shape[-1], x.dtype))
    if type(owner) is not Workspace or not owner.on_gpu:
        return key, None
    engine = owner.engine
    call = engine.accepted.find(key)
    if call is None:
        return key, None
    return key, Run(owner, engine, call, addresses[:_NUM_INPUTS], topk_idx)


def check(
    inputs: Sequence, swiglu_limit: float | None, key: Hashable | None, fuses: bool
) -> tuple[Run, object]:
    """Checks a call as the operator does, and remembers it under `key`.

    inputs: the operator's, without swiglu_limit. fuses: see MoeCall.

    Returns:
      The run, and what has to be kept alive until its kernels are queued.
    """
    owner, plan, limit, layer, routes = custom_ops.check_forward((*inputs, swiglu_limit))
    with owner.reporting_errors(_C.OP_SCHEDULE):
        engine = owner.engine
        experts = (layer.num_local_experts, plan.num_experts)
        widths = (layer.intermediate, layer.shared_intermediate)
        schedule = cuda_passes.schedule_call(engine, plan, layer.num_tokens, *experts, widths)
        forward = cuda_passes.pass_call(engine, plan, schedule.sizes, layer, limit)
        # Nothing but a launch is left to fail between the schedule and its forward.
        scratch_bytes = max(schedule.scratch_bytes, forward.scratch_bytes)
        schedule = schedule._replace(scratch_bytes=scratch_bytes)
        call = MoeCall(schedule, forward, plan, fuses)
        if owner.ep_size == 1 or plan.num_experts:  # else the ranks have to meet every time
            engine.accepted.add(key, call)
    return Run(owner, engine, call, passes.addresses(layer.tensors()), routes), layer


def run(
    run: Run, tensors: Sequence[Tensor | None], casts: Sequence[Tensor | None] | None = None
) -> Tensor:
    """moe's result. Collective.

    Args:
      tensors: as LayerTensors.tensors(), with leading dimensions.
      casts: what the kernels read in place of the six weights; only where the call fuses.
    """
    if run.call.plan.differentiated:
        return _Moe.apply(run, casts, *tensors)
    return _forward(run, tensors[0])[0]


def _forward(run: Run, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the schedule's words, the buffer of the ring."""
    engine, call = run.engine, run.call
    operation = _C.OP_SCHEDULE
    try:
        buffer = engine.new_ring(call.forward.layout.size)
        out = passes.new_output(x)
        stream = engine.current_stream()
        # Without a backward nobody needs the ids after this call.
        keeps_ids = bool(call.plan.differentiated)
        schedule = cuda_passes.queue_schedule(engine, stream, call.schedule, run.routes, keeps_ids)
        operation = _C.OP_FORWARD
        operands = (buffer.data_ptr(), schedule.routing, out.data_ptr())
        engine.forward(stream, call.forward, run.inputs, *operands)
    except Exception as error:
        run.workspace.report(error, operation)
        raise
    return out, schedule.words, buffer


class _Moe(torch.autograd.Function):
    """apply(run, casts or None, the nine tensors of LayerTensors.tensors())."""

    @staticmethod
    def forward(ctx, run: Run, casts, *tensors):
        out, words, buffer = _forward(run, tensors[0])
        x, topk_weight, *weights, scale = tensors
        read = weights if casts is None else casts
        ctx.save_for_backward(x, topk_weight, *read, scale, words, buffer)
        ctx.weights = weights if run.call.fuses else None
        # Else autograd would fill zeros where no gradient comes.
        ctx.set_materialize_grads(False)
        # Keeps a workspace alive that its owner drops before the backward.
        ctx.workspace, ctx.call = run.workspace, run.call
        ctx.kept_macrobatches = 1
        return out

    @staticmethod
    def backward(ctx, d_out):
        if d_out is None:
            return (None,) * (2 + _NUM_INPUTS)
        needed = ctx.needs_input_grad[2:]
        try:
            saved = custom_ops.saved_tensors_of(ctx)  # hooks may run, and fail
            kept, ctx.kept_macrobatches = ctx.kept_macrobatches, 0  # the pass overwrites the ring
            with torch.no_grad():
                gradients = _backward(ctx, d_out, saved, needed, kept)
        except Exception as error:
            ctx.workspace.report(error, _C.OP_BACKWARD)
            raise
        if torch.is_grad_enabled():  # create_graph
            gradients = custom_ops.NoDoubleBackward.apply(gradients, d_out, *saved[:_NUM_INPUTS])
        return None, None, *gradients


def _backward(ctx, d_out: Tensor, saved, needed, kept_macrobatches: int):
    """The gradients of the nine inputs, None where none is needed.

    ctx: workspace and call of the forward, and weights, whose main_grad gets their gradients, or
    None.
    """
    workspace, call, into = ctx.workspace, ctx.call, ctx.weights
    engine = workspace.engine
    if into is None:
        grads = passes.new_needed_grads(saved[:_NUM_INPUTS], needed[2:8])
    else:
        buffers = main_grads_of(into, saved[0].dtype)
        grads = moe_main_grads.grads_into(buffers, saved[:_NUM_INPUTS])
    settings = ("moe backward", call.plan, call.forward.swiglu_limit)
    key, inputs = key_of_call(settings, engine.device, (*saved, d_out))
    known = engine.accepted.find(key) if cuda_passes.is_aligned(saved[_NUM_INPUTS]) else None
    if known is None:
        known, saved, d_out = _check_backward(workspace, call, saved, d_out, key)
        inputs = passes.addresses(saved)
    pass_call, sizes = known
    words, buffer = saved[_NUM_INPUTS:]
    stream = engine.current_stream()
    routing = cuda_passes.schedule_of_words(words, stream, sizes).routing
    operands = passes.cuda_operands(d_out, kept_macrobatches, grads)
    inputs = inputs[:_NUM_INPUTS]
    engine.backward(stream, pass_call, inputs, buffer.data_ptr(), routing, operands)
    weights = (*grads.routed[:3], *grads.shared[:3]) if into is None else tell_trainer(into)
    return grads.x, grads.topk_weight, *weights, grads.shared_scale if needed[-1] else None


def _check_backward(owner: Workspace, call: MoeCall, saved, d_out: Tensor, key):
    """Checks what hooks may have made of the saved tensors, and remembers it under `key`.

    Returns:
      (the pass, the schedule's sizes), and the saved tensors and d_out as kernels read them.
    """
    *inputs, words, buffer = saved
    inputs = (d_out, *inputs)
    layer, d_tokens, schedule = custom_ops.check_backward(inputs, words, call.plan, owner)
    limit = call.forward.swiglu_limit
    engine, sizes = owner.engine, schedule.sizes
    backward = cuda_passes.pass_call(engine, call.plan, sizes, layer, limit, is_backward=True)
    buffer = dense(buffer)
    passes.check_buffer("ring", buffer, layer, backward.layout)
    engine.accepted.add(key, (backward, sizes))
    return (backward, sizes), (*layer.tensors(), schedule.words, buffer), d_tokens
