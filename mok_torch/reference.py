"""The layer in plain PyTorch, in float64 by default: the yardstick of the tests and of `check`.

For a token x with routes (e_k, w_k):

    expert(x) = (silu(x Wg^T) * (x Wu^T)) Wd^T
    out = scale * shared(x) + sum over k of w_k * expert_{e_k}(x)

It uses nothing but elementary differentiable operations, so autograd supplies the gradients, and it
holds every expert on one process: to compare with R ranks, concatenate their tokens in rank order.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class SharedExpertWeights(Protocol):
    """What the reference reads of a shared expert; functional.SharedExpert is one."""

    w_gate: Tensor  # [I_s, H]
    w_up: Tensor  # [I_s, H]
    w_down: Tensor  # [H, I_s]
    scale: Tensor | None  # [...], one factor a token


class _RoundStraightThrough(torch.autograd.Function):
    """Rounds to a storage dtype and back; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, value: Tensor, storage_dtype: torch.dtype) -> Tensor:
        return value.to(storage_dtype).to(value.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def _clamp(value: Tensor, lowest: float, highest: float) -> Tensor:
    """torch.clamp whose gradient passes at the limits too (torch.clamp's, until PyTorch 2.14)."""
    outside = (value < lowest) | (value > highest)
    return torch.where(outside, value.detach().clamp(lowest, highest), value)


def swiglu_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    swiglu_limit: float | None = None,
    storage_dtype: torch.dtype | None = None,
) -> Tensor:
    """One expert: x [N, H], w_gate and w_up [I, H], w_down [H, I] -> [N, H], all of one dtype.

    With swiglu_limit c the gate is clamped to at most c and the up projection to [-c, c]; the
    gradient outside the clamp is 0, on its edge it passes. The clamp makes the gradient jump, so a
    comparison near the jump needs storage_dtype: both projections are then rounded to it first, as
    the engine does.
    """
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    if storage_dtype is not None:
        gate = _RoundStraightThrough.apply(gate, storage_dtype)
        up = _RoundStraightThrough.apply(up, storage_dtype)
    if swiglu_limit is not None:
        gate = _clamp(gate, -math.inf, swiglu_limit)
        up = _clamp(up, -swiglu_limit, swiglu_limit)
    return F.linear(F.silu(gate) * up, w_down)


def moe_reference(
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    shared: SharedExpertWeights | None = None,
    swiglu_limit: float | None = None,
    dtype: torch.dtype = torch.float64,
    storage_dtype: torch.dtype | None = None,
) -> Tensor:
    """The mixture-of-experts layer with all E experts at hand.

    Args:
      x: tokens [..., H].
      topk_idx: integers [..., K]; -1 is "no route" and contributes nothing, not even a gradient.
        An expert may appear more than once for a token.
      topk_weight: router weights [..., K].
      w_gate, w_up: [E, I, H]. w_down: [E, H, I].
      shared: an expert that every token visits, times its scale where it has one.
      swiglu_limit, storage_dtype: see swiglu_mlp.
      dtype: what everything is computed in and returned as. Gradients of the arguments keep the
        arguments' own dtypes.

    Returns:
      shared(x) + sum_k topk_weight[..., k] * expert_k(x), of x's shape.
    """
    tokens = x.reshape(-1, x.shape[-1]).to(dtype)
    routes = topk_idx.reshape(-1, topk_idx.shape[-1])
    weights = topk_weight.reshape(routes.shape).to(dtype)
    options = {"swiglu_limit": swiglu_limit, "storage_dtype": storage_dtype}
    if shared is None:
        out = torch.zeros_like(tokens)
    else:
        shared_weights = [w.to(dtype) for w in (shared.w_gate, shared.w_up, shared.w_down)]
        out = swiglu_mlp(tokens, *shared_weights, **options)
        if shared.scale is not None:
            out = out * shared.scale.reshape(-1, 1).to(dtype)
    # unbind: one gradient tensor for all experts; indexing would make one for each.
    experts = zip(w_gate.unbind(), w_up.unbind(), w_down.unbind(), strict=True)
    for expert, weights_of_expert in enumerate(experts):
        token, k = torch.nonzero(routes == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        expert_weights = [w.to(dtype) for w in weights_of_expert]
        y = swiglu_mlp(tokens[token], *expert_weights, **options)
        out = out.index_add(0, token, weights[token, k].unsqueeze(-1) * y)
    return out.reshape(x.shape)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of expected, in float64; 0 when both are 0."""
    expected = expected.detach().double()
    difference = torch.linalg.vector_norm(actual.detach().double() - expected)
    scale = torch.linalg.vector_norm(expected)
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / scale)


def worst_row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative_error of any row (last dimension); rows expected to be 0 must be 0.

    A NaN anywhere makes the result NaN.
    """
    if expected.numel() == 0:
        return 0.0
    expected = expected.detach().double()
    difference = torch.linalg.vector_norm(actual.detach().double() - expected, dim=-1)
    scale = torch.linalg.vector_norm(expected, dim=-1)
    ratio = torch.where(difference == 0, torch.zeros_like(difference), difference / scale)
    return float(ratio.max())
