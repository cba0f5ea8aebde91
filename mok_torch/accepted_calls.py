"""Calls that have passed all checks before, recognised by all that the checks look at.

Checking a call in Python takes longer than launching its kernel. A training step repeats its calls
with other data in tensors of the same dtypes, shapes and devices, so what the checks and the
planning came to is kept under a key of exactly these. Whatever differs leads to the checks again:
nothing is remembered about a tensor object, whose storage, shape or dtype may have been replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of tensors that bulk copies and vector loads touch
# More distinct calls than this (batches of ever other sizes) start the collection anew.
_CAPACITY = 1024
_PLAIN = (Tensor, torch.nn.Parameter)


def exactly(value: Any) -> tuple[type, Any]:
    """The value as part of a key: 1, 1.0 and True are equal, but not to the checks."""
    return type(value), value


def key_of_call(
    settings: Hashable, device: torch.device, tensors: Sequence[Tensor | None]
) -> tuple[Hashable | None, list[int]]:
    """A call's key, and what the key leaves out: the tensors' addresses, 0 for None.

    The key is None if the call may be of a kind that the checks refuse or convert. Under
    torch.jit.trace, where sizes are tensors, no key equals another.

    Args:
      settings: everything the checks look at beside the tensors.
      device: where the tensors have to be; the same whenever the key is looked up.
    """
    key, addresses, address_bits = [settings], [], 0
    try:
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                addresses.append(0)
                continue
            if type(tensor) not in _PLAIN or tensor.device != device or tensor.is_neg():
                return None, []
            if not tensor.is_contiguous():
                return None, []
            address = tensor.data_ptr()
            if not address and tensor.numel():  # no memory of its own
                return None, []
            address_bits |= address
            addresses.append(address)
            key.append(tensor.dtype)
            key.append(tensor.shape)
    except Exception:  # no strides, no storage: the checks will say what it is
        return None, []
    return (None, []) if address_bits % ALIGNMENT else (tuple(key), addresses)


class AcceptedCalls:
    """What the checks came to, by key."""

    def __init__(self):
        self._results: dict[Hashable, Any] = {}

    def find(self, key: Hashable | None):
        """What add was given for an equal call, or None."""
        try:
            return self._results.get(key)
        except Exception:  # no hash, no equality: the checks will say what it is
            return None

    def add(self, key: Hashable | None, result: Any):
        """Remembers what an accepted call came to, if it has a key that can be looked up."""
        if key is None:
            return
        with contextlib.suppress(Exception):  # no hash: such a call is checked every time
            if len(self._results) >= _CAPACITY and key not in self._results:
                self._results.clear()
            self._results[key] = result

    def __len__(self) -> int:
        return len(self._results)
