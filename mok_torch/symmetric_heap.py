"""GPU memory that the processes of a torch.distributed group map into each other, over NVLink."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import torch
from torch import Tensor

_VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class _Multicast:
    """Keeps PyTorch from setting up NVLink multicast, which nothing here uses, for a while.

    PyTorch reads an environment variable whenever it maps memory, so other users of symmetric
    memory in this process get theirs as before and after.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._users = 0  # threads that map memory of different groups
        self._before: str | None = None

    @contextlib.contextmanager
    def disabled(self):
        with self._lock:
            if self._users == 0:
                self._before = os.environ.get(_VARIABLE)
                os.environ[_VARIABLE] = "1"
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._restore()

    def _restore(self):
        if self._before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = self._before


_multicast = _Multicast()


def new_heap(num_bytes: int, device: torch.device) -> Tensor:
    """Zeroed memory (uint8) of this rank, for map_heap; zero once the current stream is done."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with _multicast.disabled():
        return symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()


def map_heap(heap: Tensor, group_name: str) -> Any:
    """PyTorch's handle of all ranks' heaps, which keeps them mapped. Collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with _multicast.disabled():
        return symmetric_memory.rendezvous(heap, group_name)
