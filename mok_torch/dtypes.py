"""The dtypes that the engine computes in."""

from collections.abc import Collection
from typing import Any

import torch

from mok_torch import _C

# Activation and weight dtypes, and their codes in the C API.
ENGINE_DTYPES = {torch.bfloat16: _C.BF16, torch.float32: _C.FP32}


def as_dtype(
    name: str, value: Any, choices: Collection[torch.dtype] = ENGINE_DTYPES
) -> torch.dtype:
    """The value, if it is one of the dtypes; TypeError if not."""
    if not isinstance(value, torch.dtype) or value not in choices:
        expected = " or ".join(dict.fromkeys(map(str, choices)))  # each once
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    return value
