"""A layer that exchanges rows with NCCL's all-to-all, one row for each route."""

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layer.grouped_linear import GroupedLinear, RowGroups, row_groups
from benchmarks.layer.problem import Problem
from benchmarks.layer.row_kernels import combine_rows, gather_rows, swiglu, swiglu_backward
from benchmarks.layer.shared_expert import SharedExpert


class AllToAllLayer:
    """Routes are sorted by expert and sent; received rows are sorted by expert again.

    The shared expert runs beside the exchanges of the forward and the first one of the backward,
    the weight gradients beside the last one.
    """

    def __init__(self, problem: Problem, linear: type[GroupedLinear]):
        self.problem = problem
        self.name = f"all-to-all, {linear.label}"
        self.link_bytes = problem.load.link_bytes
        self._gate_up = linear(torch.cat([problem.gate, problem.up], dim=1))
        self._down = linear(problem.down)
        self._shared = SharedExpert(problem)

    def plan(self) -> None:
        problem = self.problem
        ranks, local_experts = problem.ranks, problem.case.local_experts
        flat = problem.topk_idx.flatten()
        self._sent_route = torch.argsort(flat, stable=True)
        self._sent_token = self._sent_route // problem.case.topk
        self._row_of_route = torch.empty_like(flat)
        self._row_of_route[self._sent_route] = torch.arange(len(flat), device=flat.device)
        self._row_of_route = self._row_of_route.view(problem.topk_idx.shape)
        counts = torch.bincount(flat, minlength=problem.num_experts)
        everyone = counts.new_empty(ranks * problem.num_experts)
        dist.all_gather_into_tensor(everyone, counts)
        everyone = everyone.view(ranks, ranks, local_experts)  # [source, owner, expert]
        received = everyone[:, problem.rank]
        self._sent = everyone[problem.rank].sum(1).tolist()
        self._received = received.sum(1).tolist()
        self._groups: RowGroups = row_groups(received.sum(0))
        # Received rows are sorted by source, then expert; the products want them by expert.
        expert = torch.arange(local_experts, device=flat.device).repeat(ranks)
        of_row = expert.repeat_interleave(received.flatten(), output_size=sum(self._received))
        self._received_of_row = torch.argsort(of_row, stable=True)
        self._row_of_received = torch.empty_like(self._received_of_row)
        self._row_of_received[self._received_of_row] = torch.arange(
            len(of_row), device=of_row.device
        )

    def _to_owners(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        out = rows.new_empty(sum(self._received), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows, self._received, self._sent, async_op=True)
        return out, work

    def _to_sources(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        out = rows.new_empty(sum(self._sent), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows, self._sent, self._received, async_op=True)
        return out, work

    def forward(self) -> Tensor:
        problem = self.problem
        weights, weights_work = self._to_owners(problem.topk_weight.flatten()[self._sent_route])
        received, work = self._to_owners(gather_rows(problem.x, self._sent_token))
        self._shared.hidden(problem.x)
        weights_work.wait()
        work.wait()
        self._weight = weights[self._received_of_row]
        self._rows = gather_rows(received, self._received_of_row)
        self._gate_up_rows = self._gate_up.forward(self._rows, self._groups)
        y = self._down.forward(swiglu(self._gate_up_rows, self._weight), self._groups)
        returned, work = self._to_sources(gather_rows(y, self._row_of_received))
        shared = self._shared.output()
        work.wait()
        return combine_rows(returned, self._row_of_route, shared)

    def backward(self) -> dict[str, Tensor]:
        problem = self.problem
        received, work = self._to_owners(gather_rows(problem.d_out, self._sent_token))
        d_x_shared = self._shared.input_grad(problem.d_out)
        work.wait()
        d_rows = gather_rows(received, self._received_of_row)
        d_h = self._down.input_grad(d_rows, self._groups)
        d_gate_up, h, d_weight = swiglu_backward(d_h, self._gate_up_rows, self._weight)
        d_x_rows = self._gate_up.input_grad(d_gate_up, self._groups)
        returned, work = self._to_sources(gather_rows(d_x_rows, self._row_of_received))
        returned_weight, weight_work = self._to_sources(d_weight[self._row_of_received])
        # Beside the way back of d_x:
        grads = {"down": self._down.weight_grad(d_rows, h, self._groups)}
        d_gate_up_weight = self._gate_up.weight_grad(d_gate_up, self._rows, self._groups)
        grads["gate"], grads["up"] = d_gate_up_weight.chunk(2, dim=1)
        grads |= self._shared.weight_grads()
        work.wait()
        weight_work.wait()
        grads["x"] = combine_rows(returned, self._row_of_route, d_x_shared)
        grads["topk_weight"] = returned_weight[self._row_of_route.flatten()].view_as(
            problem.topk_weight
        )
        return grads
