"""Calls that have passed all checks before, recognised by all that the checks look at.

Checking a call in Python takes longer than launching its kernel. A training step repeats its calls
with other data in tensors of the same dtypes, shapes and devices, so what the checks and the
planning came to is kept under a key of exactly these. Whatever differs leads to the checks again:
nothing is remembered about a tensor object, whose storage, shape or dtype may have been replaced.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of tensors that bulk copies and vector loads touch
# More distinct calls than this (batches of ever other sizes) start the collection anew.
_CAPACITY = 1024
_PLAIN = (Tensor, torch.nn.Parameter)


class CallKey(NamedTuple):
    """A call's key, and what the key leaves out.

    Attributes:
      key: for AcceptedCalls.
      addresses: of the tensors, 0 for None.
    """

    key: Hashable
    addresses: list[int]


def exactly(value: Any) -> tuple[type, Any]:
    """The value as part of a key: 1, 1.0 and True are equal, but not to the checks."""
    return type(value), value


def key_of_call(settings: Hashable, tensors: Sequence[Tensor | None]) -> CallKey | None:
    """The key of a call; None if it may be of a kind that the checks refuse or convert.

    settings: everything the checks look at beside the tensors. None also if it is not hashable.
    """
    signature, addresses = [], []
    try:
        for tensor in tensors:
            if tensor is None:
                signature.append(None)
                addresses.append(0)
                continue
            address = tensor.data_ptr()
            if type(tensor) not in _PLAIN or address % ALIGNMENT or not tensor.is_contiguous():
                return None
            signature.append((tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad))
            addresses.append(address)
        key = (settings, tuple(signature))
        hash(key)
    except Exception:  # no tensor, no strides, no storage, no hash: the checks will say what it is
        return None
    return CallKey(key, addresses)


class AcceptedCalls:
    """What the checks came to, by key."""

    def __init__(self):
        self._results: dict[Hashable, Any] = {}

    def find(self, call: CallKey | None):
        """What add was given for an equal call, or None."""
        return None if call is None else self._results.get(call.key)

    def add(self, call: CallKey | None, result: Any):
        """Remembers what an accepted call came to."""
        if call is None:
            return
        if len(self._results) >= _CAPACITY:
            self._results.clear()
        self._results[call.key] = result

    def __len__(self) -> int:
        return len(self._results)
