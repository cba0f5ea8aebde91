"""Large tensors on the CPU without the cost of fresh memory."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from mok_torch import _C

# Below this PyTorch's own allocation is cheaper than system calls, page faults and buffer objects.
_MAPPED_BYTES = 1 << 18


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch.zeros(shape, dtype=dtype), for tensors of which little will be touched.

    Large ones are private anonymous mappings, which the system fills with zero pages on first
    touch: what is never written is neither stored nor cleared, and yet zero.
    """
    size = math.prod(shape)
    num_bytes = size * dtype.itemsize
    if num_bytes < _MAPPED_BYTES:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor's storage keeps the mapping alive.
    return torch.frombuffer(mapping, dtype=dtype, count=size).view(shape)


def recycled_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch.empty(shape, dtype=dtype), for tensors of which most will be written.

    Large ones lie on huge pages, in memory that earlier ones have left (csrc/recycled_memory.h): a
    small forward of several threads may take twice as long in fresh memory, whose first touch they
    share.
    """
    size = math.prod(shape)
    num_bytes = size * dtype.itemsize
    if num_bytes < _MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # The tensor's storage keeps the memory; it returns to the list of free blocks with it.
    memory = _C.RecycledMemory(num_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)
