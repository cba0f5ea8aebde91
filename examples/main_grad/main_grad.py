"""A step of gradient accumulation whose experts' gradients the layer's kernels add themselves.

Ordinary autograd writes a gradient for every weight and the trainer adds it to its buffer: of the
experts' gradients that is several times the bytes that the layer's kernel would move if it added
them itself, and rounds them to the weights' dtype in between. With gradient_accumulation_fusion the
kernel accumulates in fp32 over a microbatch's tokens and adds the sum to the buffer with one
rounding, to the buffer's dtype. An expert without tokens leaves its part of the buffer alone, bit
for bit, without reading it.

gradient_buffer.py is the trainer's side of the contract, docs/training.md the contract itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from examples.main_grad.gradient_buffer import GradientBuffer
from mok_torch import MoELayer


def make_layer(hidden: int, intermediate: int, experts: int, top_k: int, **options) -> MoELayer:
    """A layer that adds its experts' gradients to main_grad."""
    return MoELayer(
        hidden, intermediate, experts, top_k, gradient_accumulation_fusion=True, **options
    )


def accumulate(
    call: Callable[[Tensor], Tensor],
    buffer: GradientBuffer,
    microbatches: Iterable[tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """The gradients of a step in `buffer`; returns those of the inputs.

    Args:
      call: the layer, or a model that contains it.
      buffer: of all parameters.
      microbatches: inputs, and the gradients of the outputs that a loss would hand back.
    """
    buffer.zero()
    d_inputs = []
    for x, d_out in microbatches:
        buffer.start_microbatch()
        x = x.clone().requires_grad_()
        torch.autograd.backward(call(x), d_out)
        d_inputs.append(x.grad)
    return d_inputs
