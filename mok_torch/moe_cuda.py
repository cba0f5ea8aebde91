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

from mok_torch import _C, cuda_passes, custom_ops, moe_main_grads, passes
from mok_torch.accepted_calls import CallKey, key_of_call
from mok_torch.checks import check_layer, dense, require_dtype, require_tensor
from mok_torch.cuda_engine import CudaEngine
from mok_torch.cuda_passes import CudaSchedule, PassCall, ScheduleCall
from mok_torch.groups import SingleRank
from mok_torch.main_grads import main_grads_of, tell_trainer
from mok_torch.passes import LayerGrads, WeightGrads
from mok_torch.plan import Plan
from mok_torch.ring import DeviceRing
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
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def find(
    arguments: Sequence[Tensor], shared, workspace: Workspace | None, settings: Hashable
) -> tuple[CallKey | None, Run | None]:
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
    settings = (settings, torch.is_grad_enabled())
    key = key_of_call(settings, (x, *others, *shared, topk_idx))
    if key is None or topk_idx is None or torch.is_autocast_enabled("cuda"):
        return None, None
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
    return key, Run(owner, engine, call, key.addresses[:_NUM_INPUTS], topk_idx)


def check(
    inputs: Sequence, swiglu_limit: float | None, key: CallKey | None, fuses: bool
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


def _forward(run: Run, x: Tensor) -> tuple[Tensor, CudaSchedule, DeviceRing]:
    engine, call = run.engine, run.call
    operation = _C.OP_SCHEDULE
    try:
        schedule = cuda_passes.new_schedule(engine, call.schedule.sizes)
        if not call.plan.differentiated:  # nobody needs the ids after this call
            ids = (run.routes.data_ptr(), run.routes.element_size())
            schedule = schedule._replace(ids=ids)
        ring = DeviceRing.empty(call.forward.layout, x)
        out = x.new_empty(x.shape)
        cuda_passes.queue_schedule(engine, call.schedule, schedule, run.routes)
        operation = _C.OP_FORWARD
        addresses = call.forward.layout.addresses(ring.buffer.data_ptr())
        cuda_passes.queue_forward(engine, call.forward, schedule, run.inputs, addresses, out)
    except Exception as error:
        run.workspace.report(error, operation)
        raise
    return out, schedule, ring


class _Moe(torch.autograd.Function):
    """apply(run, casts or None, the nine tensors of LayerTensors.tensors())."""

    @staticmethod
    def forward(ctx, run: Run, casts, *tensors):
        out, schedule, ring = _forward(run, tensors[0])
        x, topk_weight, *weights, scale = tensors
        read = weights if casts is None else casts
        ctx.save_for_backward(x, topk_weight, *read, scale, schedule.words, ring.buffer)
        ctx.weights = weights if run.call.fuses else None
        # Else autograd would fill zeros where no gradient comes.
        ctx.set_materialize_grads(False)
        # Keeps a workspace alive that its owner drops before the backward.
        ctx.run = run._replace(engine=None, inputs=(), routes=None)
        ctx.kept_macrobatches = 1
        return out

    @staticmethod
    def backward(ctx, d_out):
        if d_out is None:
            return (None,) * (2 + _NUM_INPUTS)
        run, needed = ctx.run, ctx.needs_input_grad[2:]
        try:
            saved = custom_ops.saved_tensors_of(ctx)  # hooks may run, and fail
            kept, ctx.kept_macrobatches = ctx.kept_macrobatches, 0  # the pass overwrites the ring
            with torch.no_grad():
                gradients = _backward(run, d_out, saved, needed, kept, ctx.weights)
        except Exception as error:
            run.workspace.report(error, _C.OP_BACKWARD)
            raise
        if torch.is_grad_enabled():  # create_graph
            gradients = custom_ops.NoDoubleBackward.apply(gradients, d_out, *saved[:_NUM_INPUTS])
        return None, None, *gradients


def _backward(run: Run, d_out: Tensor, saved, needed, kept_macrobatches: int, into):
    """The gradients of the nine inputs, None where none is needed.

    into: the weights whose main_grad gets theirs, or None.
    """
    engine = run.workspace.engine
    if into is None:
        grads = _new_grads(saved[:_NUM_INPUTS], needed)
    else:
        buffers = main_grads_of(into, saved[0].dtype)
        grads = moe_main_grads.grads_into(buffers, saved[:_NUM_INPUTS])
    settings = ("moe backward", run.call.plan, run.call.forward.swiglu_limit)
    key = key_of_call(settings, (*saved, d_out))
    words = saved[_NUM_INPUTS]
    known = engine.accepted.find(key) if cuda_passes.is_aligned(words) else None
    if known is None:
        known, saved, d_out = _check_backward(run, saved, d_out, key)
    *tensors, words, buffer = saved
    pass_call, sizes = known
    schedule = cuda_passes.schedule_of_words(engine, words, sizes)
    operands = passes.cuda_operands(d_out, kept_macrobatches, grads)
    inputs, ring = passes.addresses(tensors), pass_call.layout.addresses(buffer.data_ptr())
    cuda_passes.queue_backward(engine, pass_call, schedule, inputs, ring, operands)
    weights = (*grads.routed[:3], *grads.shared[:3]) if into is None else tell_trainer(into)
    return grads.x, grads.topk_weight, *weights, grads.shared_scale if needed[-1] else None


def _check_backward(run: Run, saved, d_out: Tensor, key: CallKey | None):
    """Checks what hooks may have made of the saved tensors, and remembers it under `key`.

    Returns:
      (the pass, the schedule's sizes), and the saved tensors and d_out as kernels read them.
    """
    owner, plan = run.workspace, run.call.plan
    x, topk_weight, *weights, words, buffer = saved
    layer = check_layer(x, topk_weight, weights[:3], weights[3:], owner)
    custom_ops.check_d_out(d_out, x)
    owner.require_room("x", layer.num_tokens)
    require_tensor("schedule_words", words, layer.x.device)
    require_dtype("schedule_words", words, torch.int32)
    schedule = cuda_passes.load_schedule(words.contiguous(), layer, plan, owner)
    limit = run.call.forward.swiglu_limit
    engine, sizes = owner.engine, schedule.sizes
    call = cuda_passes.pass_call(engine, plan, sizes, layer, limit, is_backward=True)
    buffer = dense(buffer)
    passes.check_buffer("ring", buffer, layer, call.layout)
    engine.accepted.add(key, (call, sizes))
    return (call, sizes), (*layer.tensors(), schedule.words, buffer), dense(d_out)


def _new_grads(tensors, needed) -> LayerGrads:
    """Outputs for LayerTensors.tensors(); of the weights only what is needed."""
    x, topk_weight, *weights, scale = tensors
    d_weights = [
        weight.new_empty(weight.shape) if wanted and weight is not None else None
        for weight, wanted in zip(weights, needed[2:8], strict=True)
    ]
    return LayerGrads(
        x=x.new_empty(x.shape),
        topk_weight=topk_weight.new_empty(topk_weight.shape),
        shared_scale=None if scale is None else scale.new_empty(scale.shape),
        routed=WeightGrads(*d_weights[:3]),
        shared=WeightGrads(*d_weights[3:]),
    )
