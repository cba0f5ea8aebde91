"""What is timed: the interface of a layer, and MoK's."""

from typing import Protocol

from torch import Tensor

from benchmarks.layer.problem import GRADIENTS, Problem
from mok_torch import functional


class Layer(Protocol):
    """One layer on one rank. All methods are collective; only plan may wait for the GPU."""

    name: str
    # Bytes into (or out of) this rank over links in a forward; a backward moves as many.
    link_bytes: float
    # What it holds on the GPU between steps beyond the problem's tensors and PyTorch's allocator's.
    resident_bytes: int

    def plan(self) -> None:
        """Everything that depends on the routing alone."""

    def forward(self) -> Tensor:
        """[T, H]; keeps what the backward needs."""

    def backward(self) -> dict[str, Tensor]:
        """The gradients for problem.d_out by the names in GRADIENTS. After a forward."""


class MokLayer:
    """MoK through its explicit calls."""

    name = "MoK"

    def __init__(self, problem: Problem):
        self.problem = problem
        self.link_bytes = problem.load.link_bytes
        case, x = problem.case, problem.x
        # Of its own: a cached one may be larger than this case needs.
        self._workspace = functional.create_workspace(
            None,
            problem.group if problem.ranks > 1 else None,
            device=x.device,
            num_local_tokens=case.tokens,
            hidden_size=case.hidden,
            topk=case.topk,
            dtype=x.dtype,
        )
        info = self._workspace.info()
        self.resident_bytes = info["heap_bytes"] + info["scratch_bytes"]
        self._inputs = [
            problem.x,
            problem.topk_weight,
            problem.shared_gate,
            problem.shared_up,
            problem.shared_down,
            problem.gate,
            problem.up,
            problem.down,
        ]

    def plan(self) -> None:
        self._schedule = functional.build_schedule(
            self._workspace,
            None,
            self.problem.topk_idx,
            num_local_experts=self.problem.case.local_experts,
            num_experts=self.problem.num_experts,  # else the hosts have to tell each other
        )

    def forward(self) -> Tensor:
        out, self._context = functional.forward(
            None, self._workspace, self._schedule, *self._inputs
        )
        return out

    def backward(self) -> dict[str, Tensor]:
        results = functional.backward(
            None,
            self._workspace,
            self._schedule,
            self._context,
            self.problem.d_out,
            *self._inputs,
        )
        return dict(zip(GRADIENTS, results, strict=True))
