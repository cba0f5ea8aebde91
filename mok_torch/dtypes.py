"""The dtypes that the engine computes in."""

import torch

from mok_torch import _C

# Activation and weight dtypes, and their codes in the C API.
ENGINE_DTYPES = {torch.bfloat16: _C.BF16, torch.float32: _C.FP32}


def describe_dtypes() -> str:
    """The names of ENGINE_DTYPES, for error texts."""
    return " or ".join(str(dtype) for dtype in ENGINE_DTYPES)
