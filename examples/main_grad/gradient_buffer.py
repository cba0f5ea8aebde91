"""The other side of the contract: what a trainer like Megatron-LM does with main_grad.

One contiguous buffer holds the gradients of all parameters, in fp32 or bf16, over the microbatches
of a step. parameter.main_grad is the parameter's part of it. When autograd has finished with a
parameter, a hook adds parameter.grad to it, unless the layer has done so itself, and frees
parameter.grad; a real trainer then starts to reduce that part over the data-parallel ranks.
"""

from collections.abc import Iterable

import torch
from torch import nn

_ALIGNMENT = 128  # bytes; the kernels that add to it want 16


class GradientBuffer:
    """Main gradients of some parameters.

    Attributes:
      buffer: [sum of the sizes, each rounded up to whole 128 bytes].
      ready: the parameters whose hook has run since zero(), in that order.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype):
        self._parameters = list(parameters)
        unit = _ALIGNMENT // dtype.itemsize
        sizes = [-(-parameter.numel() // unit) * unit for parameter in self._parameters]
        device = self._parameters[0].device
        self.buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.ready: list[nn.Parameter] = []
        for parameter, part in zip(self._parameters, self.buffer.split(sizes), strict=True):
            parameter.main_grad = part[: parameter.numel()].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._collect)
        self.zero()

    def zero(self) -> None:
        """Before the first microbatch of a step."""
        self.buffer.zero_()
        self.ready.clear()
        self.start_microbatch()

    def start_microbatch(self) -> None:
        """Before each backward: nothing has been added yet."""
        for parameter in self._parameters:
            parameter.grad_added_to_main_grad = False

    def _collect(self, parameter: nn.Parameter) -> None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self.ready.append(parameter)
