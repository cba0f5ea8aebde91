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

    def views(self, buffer: Tensor) -> Ring:
        """The tensors in a buffer."""
        return Ring(
            *(
                buffer[max(begin, 0) :][: math.prod(shape)].view(shape)
                for shape, begin in zip(self.shapes, self.begins, strict=True)
            )
        )


class DeviceRing(NamedTuple):
    """The tensors of a Ring in one buffer, as RingLayout says.

    A call allocates one tensor instead of five, and makes no views.

    Attributes:
      buffer: [layout.size], the dtype of x.
    """

    buffer: Tensor

    @classmethod
    def empty(cls, layout: RingLayout, like: Tensor) -> DeviceRing:
        """Uninitialised: rows that hold no route are never read. `like`: for dtype and device."""
        return cls(torch.empty(layout.size, dtype=like.dtype, device=like.device))
