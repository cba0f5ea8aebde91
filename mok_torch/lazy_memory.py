"""Zero-initialised tensors whose memory costs nothing until it is written."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

# Below this a memset is cheaper than the system calls and page faults of a mapping.
_MAPPED_BYTES = 1 << 18
# A huge page of x86, and the smallest tensor that gets any: at worst half of its last one is spare.
_HUGE_PAGE_BYTES = 1 << 21
_HUGE_BYTES = _HUGE_PAGE_BYTES // 2


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, dense: bool = False) -> Tensor:
    """As torch.zeros(shape, dtype=dtype) on the CPU.

    Large tensors are private anonymous mappings, which the system fills with zero pages on first
    touch. A ring has rows that no route uses: they are neither stored nor cleared, and yet always
    zero, so that an operator that returns the ring is a function of its inputs.

    Args:
      dense: most of the tensor will be written. Huge pages then make the first touch several times
        cheaper (small ones cost a forward 6 to 10 % of its time); in a sparse tensor they would
        fill memory for a few rows.
    """
    size = math.prod(shape)
    num_bytes = size * dtype.itemsize
    if num_bytes < _MAPPED_BYTES:
        return torch.zeros(shape, dtype=dtype)
    huge = dense and num_bytes >= _HUGE_BYTES
    # Only huge pages that lie in the mapping as a whole are used. What is added is address space.
    spare = 2 * _HUGE_PAGE_BYTES - num_bytes % _HUGE_PAGE_BYTES if huge else 0
    mapping = mmap.mmap(-1, num_bytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = 0
    if huge:
        offset = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do
            mapping.madvise(mmap.MADV_HUGEPAGE)
    # The tensor's storage keeps the mapping alive.
    return torch.frombuffer(mapping, dtype=dtype, count=size, offset=offset).view(shape)
