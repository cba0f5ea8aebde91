"""The raw operators of MoK, as functions.

router_logits(x, weight)   the router's linear layer, batch-invariant
moe_forward, moe_backward  the layer, as torch.ops.mok knows it (use functional.moe instead)
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok_torch import _C
from mok_torch.checks import (
    refuse_transforms,
    require_dtype,
    require_input,
    require_tensor,
)
from mok_torch.cuda_engine import stream_address
from mok_torch.custom_ops import moe_backward, moe_forward

__all__ = ["moe_backward", "moe_forward", "router_logits"]

_NT, _NN, _TN = _C.MATMUL_NT, _C.MATMUL_NN, _C.MATMUL_TN


@torch.library.custom_op(
    "mok::matmul", mutates_args=(), schema="(Tensor a, Tensor b, int layout) -> Tensor"
)
def _matmul(a: Tensor, b: Tensor, layout: int) -> Tensor:
    """The fp32 product that layout names (MokMatmulLayout in mok.h), batch-invariant."""
    for name, operand in (("a", a), ("b", b)):
        require_tensor(name, operand, a.device)
        require_dtype(name, operand, torch.float32)
    m, n, k = _sizes(a, b, layout)
    a, b = a.contiguous(), b.contiguous()
    out = a.new_empty((m, n))
    args = _C.MatmulArgs()
    args.layout, args.num_threads = layout, torch.get_num_threads()
    args.m, args.n, args.k = m, n, k
    args.a, args.b, args.c = a.data_ptr(), b.data_ptr(), out.data_ptr()
    if a.is_cuda:
        _C.cuda_matmul(args, a.device.index, stream_address(a.device))
    else:
        _C.matmul(args)
    return out


def _sizes(a: Tensor, b: Tensor, layout: int):
    """m, n and k; checks that the operands fit."""
    if layout not in (_NT, _NN, _TN):
        raise ValueError(f"layout: expected {_NT} to {_TN}, got {layout}")
    for name, operand in (("a", a), ("b", b)):
        if operand.dim() != 2:
            raise ValueError(f"{name}: expected two dimensions, got {list(operand.shape)}")
    (m, k) = a.shape if layout != _TN else a.shape[::-1]
    (n, inner) = b.shape if layout == _NT else b.shape[::-1]
    if k != inner:
        raise ValueError(f"matmul: the operands {list(a.shape)} and {list(b.shape)} do not fit")
    return m, n, k


@_matmul.register_fake
def _(a, b, layout):
    m, n, _ = _sizes(a, b, layout)
    return a.new_empty((m, n))


def _save_operands(ctx, inputs, output):
    a, b, ctx.layout = inputs
    ctx.save_for_backward(a, b)


def _matmul_backward(ctx, d_c):
    a, b = ctx.saved_tensors
    d_a = d_b = None
    if ctx.layout == _NT:  # c = a b^T
        d_a = _matmul(d_c, b, _NN) if ctx.needs_input_grad[0] else None
        d_b = _matmul(d_c, a, _TN) if ctx.needs_input_grad[1] else None
    elif ctx.layout == _NN:  # c = a b
        d_a = _matmul(d_c, b, _NT) if ctx.needs_input_grad[0] else None
        d_b = _matmul(a, d_c, _TN) if ctx.needs_input_grad[1] else None
    else:  # c = a^T b
        d_a = _matmul(b, d_c, _NT) if ctx.needs_input_grad[0] else None
        d_b = _matmul(a, d_c, _NN) if ctx.needs_input_grad[1] else None
    return d_a, d_b, None


_matmul.register_autograd(_matmul_backward, setup_context=_save_operands)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., H] times weight [E, H] transposed: fp32 [..., E]; differentiable.

    Computed in fp32 whatever the floating-point dtypes of x and weight, also under autocast, and
    batch-invariant: the bits of a token's logits, and of their gradient with respect to the token,
    depend on the token and the weight only, not on the other tokens of the call.

    Raises:
      ValueError, TypeError: wrong arguments; on this rank alone, as no other is met.
      NotImplementedError: transforms of torch.func, forward-mode differentiation.
    """
    refuse_transforms("router_logits")
    require_input("x", x, "router_logits")
    require_input("weight", weight, "router_logits", x.device)
    for name, value in (("x", x), ("weight", weight)):
        if not value.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point dtype, got {value.dtype}")
    if weight.dim() != 2 or weight.shape[1] == 0:
        raise ValueError(f"weight: expected shape [E, H] with H >= 1, got {list(weight.shape)}")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: expected shape [..., H] with weight's H = {weight.shape[1]}, got {list(x.shape)}"
        )
    tokens = x.reshape(-1, x.shape[-1]).to(torch.float32)
    logits = _matmul(tokens, weight.to(torch.float32), _NT)
    return logits.reshape(*x.shape[:-1], weight.shape[0])
