"""Buffers of the caller into which an explicit backward adds weight gradients."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from mok_torch.checks import (
    LayerTensors,
    require_aligned,
    require_contiguous,
    require_dtype,
    require_shape,
    require_tensor,
)


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
    """Raises unless a backward of the layer may make such gradients."""
    dtypes = (None, torch.float32, layer.x.dtype)
    if weight_grad_dtype not in dtypes:
        raise TypeError(
            f"weight_grad_dtype: expected torch.float32 or {layer.x.dtype}, got {weight_grad_dtype}"
        )
    if main_grads is None:
        return
    if not isinstance(main_grads, MainGrads):
        raise TypeError(
            f"main_grads: expected a MainGrads or None, got {type(main_grads).__name__}"
        )
    weights = layer.tensors()[2:8]
    _check_buffers(MainGrads._fields[:3], main_grads[:3], weights[:3])
    _check_buffers(MainGrads._fields[3:], main_grads[3:], weights[3:])
    _refuse_shared_memory(main_grads)


def _refuse_shared_memory(main_grads: MainGrads):
    """Raises if two buffers, all of them contiguous, overlap."""
    spans = []
    for name, buffer in zip(MainGrads._fields, main_grads, strict=True):
        if buffer is not None and buffer.numel():
            spans.append((buffer.data_ptr(), buffer.numel() * buffer.element_size(), name))
    spans.sort(key=lambda span: span[0])
    for (begin, size, name), (next_begin, _, other) in itertools.pairwise(spans):
        if next_begin < begin + size:
            raise ValueError(f"main_grads.{other}: shares memory with main_grads.{name}")


def _check_buffers(names, buffers, weights):
    if all(buffer is None for buffer in buffers):
        return
    for name, buffer, weight in zip(names, buffers, weights, strict=True):
        name = f"main_grads.{name}"
        if weight is None:
            raise ValueError(f"{name}: given for a layer without that weight")
        require_tensor(name, buffer, weight.device)
        if buffer.dtype not in (torch.float32, weight.dtype):
            raise TypeError(f"{name}: expected torch.float32 or {weight.dtype}, got {buffer.dtype}")
        require_dtype(name, buffer, buffers[0].dtype, f" (the dtype of main_grads.{names[0]})")
        require_shape(name, buffer, weight.shape, "of the weight")
        require_contiguous(name, buffer)
        require_aligned(name, buffer)
