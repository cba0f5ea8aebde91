"""A layer that exchanges tokens: every rank gets the tokens that its experts want, once each, and
returns one partial sum for each.

With NCCL that is an all-gather of all tokens and a reduce-scatter of all partial sums, without a
table of who wants what. The exchange is a parameter: libraries that send tokens have the same form.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layer.grouped_linear import GroupedLinear, row_groups
from benchmarks.layer.problem import Problem
from benchmarks.layer.row_kernels import combine_rows, gather_rows, swiglu, swiglu_backward
from benchmarks.layer.shared_expert import SharedExpert

Wait = Callable[[], None]  # makes the current stream wait


class TokenExchange(Protocol):
    """Moves tokens to the ranks of their experts and sums back. N: tokens that this rank sees."""

    label: str
    link_bytes: float

    def plan(self, topk_idx: Tensor, topk_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Local expert ids int [N, K] (-1: the expert is elsewhere) and weights fp32 [N, K]."""

    def send(self, tokens: Tensor) -> tuple[Tensor, Wait]:
        """[T, H] -> [N, H], valid after the wait."""

    def sum(self, partial: Tensor) -> tuple[Tensor, Wait]:
        """[N, H] -> [T, H]: adds up what the ranks have computed for each token."""

    def sum_weights(self, partial: Tensor) -> Tensor:
        """fp32 [N, K] -> [T, K], likewise."""


class NcclAllGather:
    """All-gather and reduce-scatter; N = R T."""

    label = "all-gather"

    def __init__(self, problem: Problem):
        self.problem = problem
        self.link_bytes = 2.0 * (problem.ranks - 1) * problem.x.nbytes

    def plan(self, topk_idx: Tensor, topk_weight: Tensor) -> tuple[Tensor, Tensor]:
        idx, weight = self._gather(topk_idx), self._gather(topk_weight)
        local = idx - self.problem.first_expert
        mine = (local >= 0) & (local < self.problem.case.local_experts)
        return torch.where(mine, local, -1), weight

    def _gather(self, own: Tensor) -> Tensor:
        everyone = own.new_empty(self.problem.ranks * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(everyone, own.contiguous())
        return everyone

    def send(self, tokens: Tensor) -> tuple[Tensor, Wait]:
        everyone = tokens.new_empty(self.problem.ranks * tokens.shape[0], tokens.shape[1])
        work = dist.all_gather_into_tensor(everyone, tokens, async_op=True)
        return everyone, work.wait

    def sum(self, partial: Tensor) -> tuple[Tensor, Wait]:
        out = partial.new_empty(partial.shape[0] // self.problem.ranks, *partial.shape[1:])
        work = dist.reduce_scatter_tensor(out, partial, async_op=True)
        return out, work.wait

    def sum_weights(self, partial: Tensor) -> Tensor:
        out, wait = self.sum(partial)
        wait()
        return out


class TokenLayer:
    """The layer over a TokenExchange; the shared expert and weight gradients run beside it."""

    resident_bytes = 0

    def __init__(self, problem: Problem, exchange: TokenExchange, linear: type[GroupedLinear]):
        self.problem = problem
        self.name = f"{exchange.label}, {linear.label}"
        self.link_bytes = exchange.link_bytes
        self._exchange = exchange
        self._gate_up = linear(torch.cat([problem.gate, problem.up], dim=1))
        self._down = linear(problem.down)
        self._shared = SharedExpert(problem)

    def plan(self) -> None:
        local, weight = self._exchange.plan(self.problem.topk_idx, self.problem.topk_weight)
        tokens, topk = local.shape
        flat = local.flatten()
        # Routes sorted by expert; those without a local expert come first and are cut off.
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat + 1, minlength=self.problem.case.local_experts + 1)
        self._groups = row_groups(counts[1:])
        route = order[len(order) - sum(self._groups.counts) :]
        self._token = route // topk
        self._weight_of_route = weight.flatten()
        self._route = route
        self._row_of_route = torch.full_like(flat, -1)
        self._row_of_route[route] = torch.arange(len(route), device=route.device)
        self._row_of_route = self._row_of_route.view(tokens, topk)

    def forward(self) -> Tensor:
        x = self.problem.x
        tokens, wait = self._exchange.send(x)
        self._shared.hidden(x)
        wait()
        self._rows = gather_rows(tokens, self._token)
        self._weight = self._weight_of_route[self._route]
        self._gate_up_rows = self._gate_up.forward(self._rows, self._groups)
        h = swiglu(self._gate_up_rows, self._weight)
        y = self._down.forward(h, self._groups)
        out, wait = self._exchange.sum(combine_rows(y, self._row_of_route))
        shared = self._shared.output()
        wait()
        return out.add_(shared)

    def backward(self) -> dict[str, Tensor]:
        d_out = self.problem.d_out
        tokens, wait = self._exchange.send(d_out)
        d_x_shared = self._shared.input_grad(d_out)
        wait()
        d_rows = gather_rows(tokens, self._token)
        d_h = self._down.input_grad(d_rows, self._groups)
        d_gate_up, h, d_weight = swiglu_backward(d_h, self._gate_up_rows, self._weight)
        d_x_rows = self._gate_up.input_grad(d_gate_up, self._groups)
        d_x, wait = self._exchange.sum(combine_rows(d_x_rows, self._row_of_route))
        # Beside the sums of d_x:
        grads = {"down": self._down.weight_grad(d_rows, h, self._groups)}
        d_gate_up_weight = self._gate_up.weight_grad(d_gate_up, self._rows, self._groups)
        grads["gate"], grads["up"] = d_gate_up_weight.chunk(2, dim=1)
        grads |= self._shared.weight_grads()
        d_routes = torch.zeros_like(self._weight_of_route)
        d_routes[self._route] = d_weight
        wait()
        grads["topk_weight"] = self._exchange.sum_weights(d_routes.view(self._row_of_route.shape))
        grads["x"] = d_x.add_(d_x_shared)
        return grads
