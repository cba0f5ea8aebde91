"""What a forward leaves for its backward, and how it lies in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

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

    @property
    def begin_bytes(self) -> list[int]:
        """The begins in bytes of bf16."""
        return [begin if begin < 0 else 2 * begin for begin in self.begins]

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


@dataclasses.dataclass
class ForwardContext:
    """What a forward leaves for its backward; one per live forward.

    Attributes:
      ring: the activations that are kept, a tuple of tensors; on a GPU of one buffer.
      layout, stream: of a GPU's buffer, where the tensors of a Ring are in it (layout.views), and
        the cudaStream_t that it was allocated on.
      kept_macrobatches: 1: the ring is what the forward left. 0: the backward has consumed it, or
        recompute_forward_context made it, and the next backward recomputes everything. A copy of a
        context shares its ring but not this mark: do not use both.
      swiglu_limit: the forward's; 0: none. The backward must be given the same.
    """

    ring: Ring | DeviceRing
    kept_macrobatches: int
    swiglu_limit: float = 0.0
    layout: RingLayout | None = None
    stream: int = 0
