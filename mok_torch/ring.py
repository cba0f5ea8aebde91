"""What a forward leaves for its backward, and how it lies in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 128  # elements: 256 bytes of bf16


class Ring(NamedTuple):
    """What a forward leaves for its backward, in the dtype of x.

    x [ring_rows, H], gate and up [ring_rows, I]: of macrobatch 0. shared_gate and shared_up
    [T, Is]. Rows that hold no route are never read.
    """

    x: Tensor
    gate: Tensor
    up: Tensor
    shared_gate: Tensor
    shared_up: Tensor


def ring_shapes(
    hidden: int, ring_rows: int, num_tokens: int, intermediate: int, shared_intermediate: int
) -> tuple[tuple[int, int], ...]:
    """The shapes of a Ring's tensors; sizes may be symbolic."""
    rows = (ring_rows, intermediate)
    shared = (num_tokens, shared_intermediate)
    return (ring_rows, hidden), rows, rows, shared, shared


class RingLayout(NamedTuple):
    """Where the tensors of a Ring lie in one buffer.

    Attributes:
      shapes, begins: of the five tensors; begins in elements, -1 of a tensor without any.
      size: elements of the buffer.
    """

    shapes: tuple[tuple[int, int], ...]
    begins: tuple[int, ...]
    size: int

    @classmethod
    def of_shapes(cls, shapes: Sequence[tuple[int, int]]) -> RingLayout:
        begins, size = [], 0
        for shape in shapes:
            elements = math.prod(shape)
            begins.append(size if elements else -1)
            size += -(-elements // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(map(tuple, shapes)), tuple(begins), size)

    @property
    def rows(self) -> int:
        return self.shapes[0][0]

    def addresses(self, buffer: int, element_size: int = 2) -> list[int]:
        """Of the five tensors, in a buffer at that address; 0 for those without elements."""
        return [0 if begin < 0 else buffer + element_size * begin for begin in self.begins]


class DeviceRing(NamedTuple):
    """The tensors of a Ring as views of one buffer.

    A call allocates and fills a struct for one tensor instead of five, and makes no view.

    Attributes:
      buffer: [layout.size], the dtype of x.
      stream: the cudaStream_t that it was allocated on.
    """

    buffer: Tensor
    layout: RingLayout
    stream: int

    def _view(self, index: int) -> Tensor:
        shape, begin = self.layout.shapes[index], max(self.layout.begins[index], 0)
        return self.buffer[begin : begin + math.prod(shape)].view(shape)

    @property
    def x(self) -> Tensor:
        return self._view(0)

    @property
    def gate(self) -> Tensor:
        return self._view(1)

    @property
    def up(self) -> Tensor:
        return self._view(2)

    @property
    def shared_gate(self) -> Tensor:
        return self._view(3)

    @property
    def shared_up(self) -> Tensor:
        return self._view(4)

    def views(self) -> list[Tensor]:
        """All five, in the order of Ring."""
        return [self._view(index) for index in range(len(self.layout.shapes))]


def new_device_ring(layout: RingLayout, like: Tensor, stream: int) -> DeviceRing:
    """Uninitialised memory: rows that hold no route are never read. `like`: for dtype and device.

    The current stream of the tensor's device is `stream`.
    """
    buffer = torch.empty(layout.size, dtype=like.dtype, device=like.device)
    return DeviceRing(buffer, layout, stream)
