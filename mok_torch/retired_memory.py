"""Memory of the host that kernels may still write when its owner is gone.

PyTorch hands pinned memory out again as soon as its tensor is gone: it does not know that kernels
queued by others write there. Nobody may wait for them while an object goes, so such memory is
kept until something waits for the GPU anyway.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from typing import Any

import torch

_retired: dict[torch.device, collections.deque] = {}


def keep_until_idle(owner: Any, memory: Any, device: torch.device):
    """Keeps `memory`, which kernels of the GPU write, alive beyond `owner`: see synchronize."""
    # Appending takes no lock: a garbage collection, at any point of any thread, may do it.
    retire = _retired.setdefault(device, collections.deque()).append
    # Not at exit: the process keeps what PyTorch has pinned to its end, and hands none of it out.
    weakref.finalize(owner, retire, memory).atexit = False


def synchronize(device: torch.device):
    """Waits for all that is queued on the GPU, and lets go of the memory of owners gone before."""
    retired, taken = _retired.get(device, ()), []
    with contextlib.suppress(IndexError):  # other threads take from it, too
        while retired:
            taken.append(retired.popleft())
    torch.cuda.synchronize(device)
