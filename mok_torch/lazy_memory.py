"""Zero-initialised tensors whose memory costs nothing until it is written."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

# Below this a memset is cheaper than the system calls and page faults of a mapping.
_MAPPED_BYTES = 1 << 18


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch.zeros(shape, dtype=dtype) on the CPU.

    Large tensors are private anonymous mappings, which the system fills with zero pages on first
    touch. A ring has rows that no route uses: they are neither stored nor cleared, and yet always
    zero, so that an operator that returns the ring is a function of its inputs.
    """
    size = math.prod(shape)
    if size * dtype.itemsize < _MAPPED_BYTES:
        return torch.zeros(shape, dtype=dtype)
    mapping = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor's storage keeps the mapping alive.
    return torch.frombuffer(mapping, dtype=dtype, count=size).view(shape)
