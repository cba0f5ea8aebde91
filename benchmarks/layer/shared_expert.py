"""The peers' shared expert, in the pieces that they place beside their communication."""

import torch
from torch import Tensor

from benchmarks.layer.problem import Problem
from benchmarks.layer.row_kernels import swiglu, swiglu_backward


class SharedExpert:
    """Two matrix products around SwiGLU; gate and up are one."""

    def __init__(self, problem: Problem):
        self.gate_up_weight = torch.cat([problem.shared_gate, problem.shared_up])
        self.down_weight = problem.shared_down

    def hidden(self, x: Tensor) -> None:
        """First half of the forward."""
        self._x = x
        self._gate_up = x @ self.gate_up_weight.T
        self._h = swiglu(self._gate_up)

    def output(self) -> Tensor:
        return self._h @ self.down_weight.T

    def input_grad(self, d_out: Tensor) -> Tensor:
        """The gradient of x; leaves what weight_grads needs."""
        self._d_out = d_out
        d_h = d_out @ self.down_weight
        self._d_gate_up, self._h, _ = swiglu_backward(d_h, self._gate_up)
        return self._d_gate_up @ self.gate_up_weight

    def weight_grads(self) -> dict[str, Tensor]:
        d_gate, d_up = (self._d_gate_up.T @ self._x).chunk(2)
        return {"shared_gate": d_gate, "shared_up": d_up, "shared_down": self._d_out.T @ self._h}
