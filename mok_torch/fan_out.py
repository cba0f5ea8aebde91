"""Sums of gradients in an order that does not depend on how many ranks share the batch.

A parameter that every rank holds gets its gradient as a sum over tokens, part on each rank.
Floating point addition is not associative, so the bits of the total depend on where the parts end.
Here the tokens form blocks of a fixed size, each block has its own gradient, and the gradients are
added in a balanced binary tree: neighbours, then neighbouring pairs, and so on. When every rank
holds the same power of two of blocks, its sum is a subtree, and tree_sum over the ranks completes
the tree: 1, 2, 4 or 8 ranks give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Sum of at least one tensor, neighbours first; a term without a partner moves up unchanged."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = [left + right for left, right in zip(terms[:-1:2], terms[1::2], strict=True)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, copies: int) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for _ in range(copies))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        used = [gradient for gradient in gradients if gradient is not None]
        if not used:
            return None, None
        # In float32 whatever the dtype: the sum is rounded once.
        return tree_sum([gradient.float() for gradient in used]).to(used[0].dtype), None


def fan_out(tensor: Tensor, copies: int) -> tuple[Tensor, ...]:
    """The tensor, once for each of the places that use it.

    Its gradient is the tree_sum of the places' gradients in the order of the tuple, added in
    float32 and rounded once. Autograd alone would add them in the order in which it meets them, and
    round after each.
    """
    return _FanOut.apply(tensor, copies)
