"""MoK: a mixture-of-experts layer, forward and backward, with experts spread over ranks."""

from mok_torch import functional, ops
from mok_torch.config import MoKConfig
from mok_torch.errors import RankTimeoutError, ResourceExhaustedError
from mok_torch.functional import SharedExpert
from mok_torch.groups import InProcessGroup
from mok_torch.layer import MoELayer

__all__ = [
    "InProcessGroup",
    "MoELayer",
    "MoKConfig",
    "RankTimeoutError",
    "ResourceExhaustedError",
    "SharedExpert",
    "functional",
    "ops",
]
