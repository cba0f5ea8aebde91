"""Buffers of the caller into which a backward adds weight gradients.

An explicit backward is given them as MainGrads. With gradient_accumulation_fusion, `moe` finds them
at the weights, where trainers in the style of Megatron-LM keep them: docs/training.md has the
contract.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_torch.checks import (
    MOE_NAMES,
    LayerTensors,
    require_aligned,
    require_contiguous,
    require_dtype,
    require_shape,
    require_tensor,
)
from mok_torch.dtypes import as_dtype


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


def check_main_grads(layer: LayerTensors, weight_grad_dtype, main_grads: MainGrads | None):
    """Raises unless a backward of the layer may make such gradients; see refuse_shared_memory."""
    if weight_grad_dtype is not None:
        as_dtype("weight_grad_dtype", weight_grad_dtype, (torch.float32, layer.x.dtype))
    if main_grads is None:
        return
    if not isinstance(main_grads, MainGrads):
        raise TypeError(
            f"main_grads: expected a MainGrads or None, got {type(main_grads).__name__}"
        )
    weights, names = layer.tensors()[2:8], [f"main_grads.{name}" for name in MainGrads._fields]
    for part in (slice(0, 3), slice(3, 6)):
        if any(buffer is not None for buffer in main_grads[part]):
            _check_buffers(names[part], main_grads[part], weights[part], layer.x.dtype)


def refuse_shared_memory(main_grads: MainGrads, inputs: Sequence[Tensor | None]):
    """Raises if two buffers, all of them contiguous, overlap, or a buffer overlaps an input."""
    _refuse_shared_memory([f"main_grads.{name}" for name in MainGrads._fields], main_grads, inputs)


def _refuse_shared_memory(
    names: Sequence[str], buffers: Sequence[Tensor | None], inputs: Sequence[Tensor | None]
):
    spans = []
    for name, buffer in zip(names, buffers, strict=True):
        if buffer is not None and buffer.numel():
            spans.append((*_span(buffer), name))
    spans.sort(key=lambda span: span[0])
    for (_, end, name), (next_begin, _, other) in itertools.pairwise(spans):
        if next_begin < end:
            raise ValueError(f"{other}: shares memory with {name}")
    for given in inputs:
        if given is None or not given.numel():
            continue
        begin, end = _span(given)
        for buffer_begin, buffer_end, name in spans:
            if begin < buffer_end and buffer_begin < end:
                raise ValueError(f"{name}: shares memory with a tensor that the backward reads")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last one; strides are not negative."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes_and_strides)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_buffers(names, buffers, weights, dtype: torch.dtype):
    """dtype: that the layer computes in."""
    for name, buffer, weight in zip(names, buffers, weights, strict=True):
        if weight is None:
            raise ValueError(f"{name}: given for a layer without that weight")
        require_tensor(name, buffer, weight.device)
        as_dtype(name, buffer.dtype, (torch.float32, dtype))
        require_dtype(name, buffer, buffers[0].dtype, f" (the dtype of {names[0]})")
        require_shape(name, buffer, weight.shape, "of the weight")
        require_contiguous(name, buffer)
        require_aligned(name, buffer)


def main_grads_of(weights: Sequence[Tensor | None], dtype: torch.dtype) -> MainGrads:
    """The main_grad of each of moe's six weights that requires a gradient, None of the others.

    dtype: that the layer computes in, which the weights are cast to if theirs is another.

    Raises:
      ValueError, TypeError: a weight has no main_grad, or one that kernels cannot add to.
    """
    buffers: list[Tensor | None] = [None] * len(weights)
    names = [f"{name}.main_grad" for name in (*MOE_NAMES[2:5], *MOE_NAMES[5:8])]
    for index, weight in enumerate(weights):
        if weight is None or not weight.requires_grad:
            continue
        buffers[index] = getattr(weight, "main_grad", None)
        if buffers[index] is None:
            raise ValueError(
                f"{names[index]}: expected a tensor to add the gradient to, as "
                "gradient_accumulation_fusion asks for, got none"
            )
    for part in (slice(0, 3), slice(3, 6)):
        given = [index for index in range(*part.indices(6)) if buffers[index] is not None]
        triple = ([values[index] for index in given] for values in (names, buffers, weights))
        _check_buffers(*triple, dtype)
    _refuse_shared_memory(names, buffers, weights)
    return MainGrads(*buffers)


def tell_trainer(weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What autograd gets as the gradients of weights whose main_grad has them already.

    A weight with the attribute grad_added_to_main_grad has it set, and a gradient of the right
    shape whose values mean nothing, so that the trainer's hooks run; others have none.
    """
    placeholders: list[Tensor | None] = []
    for weight in weights:
        is_told = getattr(weight, "requires_grad", False)
        if is_told and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            placeholders.append(torch.empty_like(weight))
        else:
            placeholders.append(None)
    return placeholders
