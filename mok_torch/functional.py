"""The MoE layer as functions: `moe` for autograd, and the explicit calls without it.

`moe` is all that most programs need. The explicit calls (get_workspace, build_schedule, forward,
backward, recompute_forward_context) give the caller control of every buffer. Both do the same
arithmetic and give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mok_torch import _C, moe_cuda, moe_main_grads
from mok_torch.accepted_calls import exactly
from mok_torch.checks import (
    check_num_experts,
    check_swiglu_limit,
    refuse_tracing,
    require_input,
)
from mok_torch.config import MoKConfig
from mok_torch.custom_ops import moe_forward
from mok_torch.explicit import (
    ForwardContext,
    MainGrads,
    Schedule,
    backward,
    build_schedule,
    forward,
    recompute_forward_context,
)
from mok_torch.groups import InProcessGroup
from mok_torch.main_grads import main_grads_of
from mok_torch.plan import Plan, make_plan
from mok_torch.scalars import as_flag
from mok_torch.workspace import (
    DEFAULT_HANDLE,
    Workspace,
    create_workspace,
    get_workspace,
    reporting_errors_of,
)

__all__ = [
    "ForwardContext",
    "InProcessGroup",
    "MainGrads",
    "MoKConfig",
    "Schedule",
    "SharedExpert",
    "Workspace",
    "backward",
    "build_schedule",
    "create_workspace",
    "forward",
    "get_workspace",
    "moe",
    "recompute_forward_context",
]


class SharedExpert(NamedTuple):
    """The expert that every token visits.

    Attributes:
      w_gate, w_up: [I_s, H].
      w_down: [H, I_s].
      scale: fp32 [...] or [..., 1], a factor of the expert's output for each token, or None for 1.
    """

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    scale: Tensor | None = None


_NO_SHARED_EXPERT = (None, None, None, None)


def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    shared: SharedExpert | None = None,
    workspace: Workspace | None = None,
    config: MoKConfig | None = None,
    swiglu_limit: float | None = None,
    num_experts: int | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Routes tokens to experts and combines their outputs.

    Differentiable once in x, topk_weight, all weights and shared.scale; works under torch.compile
    and activation checkpointing. With a workspace of several ranks the call and its backward are
    collective: every rank calls them, in the same order, with any number of tokens, and a gradient
    is wanted of some input either on every rank or on none.

    Under torch.autocast, x and all weights are cast to the autocast dtype (bfloat16); topk_weight
    and shared.scale stay fp32.

    Args:
      x: [..., H] tokens of this rank, bfloat16 or float32.
      topk_idx: int64 or int32 [..., K], global expert ids in [-1, E); -1: no route. An expert may
        appear twice.
      topk_weight: fp32 [..., K].
      w_gate, w_up: [El, I, H], the experts of this rank: rank 0 owns the first ids, and so on. El
        may differ by rank.
      w_down: [El, H, I].
      shared: the shared expert, or None.
      workspace: from get_workspace or create_workspace; None: one rank, a cached workspace that
        grows as needed.
      config: how the engine runs. None: MoKConfig().
      swiglu_limit: c > 0 clamps the gate projection to at most c and the up projection to [-c, c].
      num_experts: E, if all ranks are to check that they agree on it. None: what the ranks' El add
        up to.
      gradient_accumulation_fusion: the backward adds each weight's gradient to its main_grad, an
        attribute of the tensor given here, and autograd gets none, in the way of Megatron-LM:
        docs/training.md has the contract. Weights may then have another dtype than x, which they
        are cast to. Bits as of functional.backward(main_grads=...). torch.compile leaves such a
        call out of its graphs.

    Returns:
      [..., H] of x's dtype.

    Raises:
      ValueError, TypeError: on every rank, before anything runs; the text names the argument.
      RankTimeoutError: a rank did not come.
      NotImplementedError: transforms of torch.func, forward-mode; a second backward.
    """
    arguments = (x, topk_idx, topk_weight, w_gate, w_up, w_down)
    options = (shared, workspace, config, swiglu_limit, num_experts)
    if not torch.compiler.is_compiling():
        return _moe(arguments, *options, gradient_accumulation_fusion)
    if gradient_accumulation_fusion:
        return _fused_out_of_graphs(arguments, *options, gradient_accumulation_fusion)
    if swiglu_limit is not None and type(swiglu_limit) not in (int, float):
        # A compiler makes tensors of NumPy's numbers.
        raise TypeError(
            "swiglu_limit: expected a float, an int or None where torch.compile traces moe, got "
            f"{type(swiglu_limit).__name__}"
        )
    inputs = _operator_inputs(arguments, shared, workspace, config, num_experts)
    return moe_forward(*inputs, swiglu_limit)[0]


def _moe(arguments, shared, workspace, config, swiglu_limit, num_experts, fuses: bool) -> Tensor:
    """moe where nobody compiles. fuses: gradient_accumulation_fusion."""
    x = arguments[0]
    is_direct = moe_cuda.applies(x)
    key = known = None
    if is_direct and (not fuses or _need_no_cast(x, arguments, shared)):
        settings = ("moe", config, exactly(swiglu_limit), exactly(num_experts), exactly(fuses))
        key, known = moe_cuda.find(arguments, shared, workspace, settings)
    if known is not None:
        tensors = _layer_tensors(arguments, shared)
        if fuses and known.call.plan.differentiated:
            with _reporting_errors(workspace):
                main_grads_of(tensors[2:8], x.dtype)
        return moe_cuda.run(known, tensors)
    with _reporting_errors(workspace):
        refuse_tracing("moe")
        as_flag("gradient_accumulation_fusion", fuses)
        _check_types(arguments, shared, config)
        swiglu_limit = check_swiglu_limit(swiglu_limit) or None
        num_experts = check_num_experts(num_experts)
        inputs = _operator_inputs(arguments, shared, workspace, config, num_experts, fuses)
        fuses = fuses and bool(Plan(*inputs[-1]).differentiated)
        weights = _layer_tensors(arguments, shared)[2:8]
        if fuses:
            main_grads_of(weights, inputs[0].dtype)
    if not is_direct:
        if fuses:
            return moe_main_grads.moe(inputs, swiglu_limit, weights)
        return moe_forward(*inputs, swiglu_limit)[0]
    checked, layer = moe_cuda.check(inputs, swiglu_limit, key, fuses)
    tensors, casts = (inputs[0], *inputs[2:-2]), None
    if fuses:
        casts = [cast if cast is None else cast.detach() for cast in tensors[2:8]]
        tensors = (*tensors[:2], *weights, tensors[8])
    out = moe_cuda.run(checked, tensors, casts)
    del layer  # copies, if any, of what was not contiguous
    return out


@torch.compiler.disable
def _fused_out_of_graphs(*arguments) -> Tensor:
    """moe with gradient_accumulation_fusion: no operator may write to tensors that it finds."""
    return _moe(*arguments)


def _need_no_cast(x, arguments, shared) -> bool:
    weights = (*arguments[3:], *(() if not isinstance(shared, tuple) else shared[:3]))
    return all(getattr(weight, "dtype", x.dtype) == x.dtype for weight in weights)


def _layer_tensors(arguments, shared):
    """As LayerTensors.tensors()."""
    x, _, *others = arguments
    return (x, *others, *((None,) * 4 if shared is None else (*shared, None)[:4]))


def _operator_inputs(arguments, shared, workspace, config, num_experts, casts_weights=False):
    """The operator's inputs but the last: tensors after autocast, the handle, the plan.

    casts_weights: to the dtype of x, where there is no autocast.
    """
    x, topk_idx, topk_weight, *weights = arguments
    shared_weights = list(_NO_SHARED_EXPERT if shared is None else SharedExpert(*shared))
    device_type = x.device.type
    casts_x = torch.is_autocast_enabled(device_type)
    if casts_x or casts_weights:
        dtype = torch.get_autocast_dtype(device_type) if casts_x else x.dtype
        x = x.to(dtype)
        weights = [weight.to(dtype) for weight in weights]
        shared_weights[:3] = [w if w is None else w.to(dtype) for w in shared_weights[:3]]
    config = MoKConfig() if config is None else config
    handle, ep_size, tokens = DEFAULT_HANDLE, 1, x.numel() // max(1, x.shape[-1])
    if workspace is not None:
        handle, ep_size = workspace.handle, workspace.ep_size
    if ep_size > 1:
        tokens = workspace.num_local_tokens * ep_size
    topk, num_local_experts = topk_idx.shape[-1], weights[0].shape[0]
    tensors = (x, topk_weight, *weights, *(t for t in shared_weights if t is not None))
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    plan = make_plan(
        config,
        ep_size,
        tokens,
        topk,
        num_local_experts,
        num_experts,
        device_type,
        differentiated,
    )
    return x, topk_idx, topk_weight, *weights, *shared_weights, handle, list(plan)


def _reporting_errors(workspace):
    if workspace is not None and not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: expected a Workspace or None, got {type(workspace).__name__}")
    return reporting_errors_of(workspace, _C.OP_SCHEDULE)


def _check_types(tensors, shared, config):
    """What would fail on the way to the operator, which does all other checks."""
    if config is not None and not isinstance(config, MoKConfig):
        raise TypeError(f"config: expected a MoKConfig or None, got {type(config).__name__}")
    names = ("x", "topk_idx", "topk_weight", "w_gate", "w_up", "w_down")
    named = dict(zip(names, tensors, strict=True))
    if shared is not None:
        if not isinstance(shared, tuple) or len(shared) not in (3, 4):
            raise TypeError(f"shared: expected a SharedExpert or None, got {type(shared).__name__}")
        given = zip(SharedExpert._fields, SharedExpert(*shared), strict=True)
        named |= {f"shared.{name}": value for name, value in given if value is not None}
    for name, tensor in named.items():
        require_input(name, tensor, "moe")
    for name, dimensions in (("x", 1), ("topk_idx", 1), ("w_gate", 3)):
        if named[name].dim() < dimensions:
            raise ValueError(
                f"{name}: expected at least {dimensions} dimensions, got {list(named[name].shape)}"
            )
