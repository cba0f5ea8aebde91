"""A layer that exchanges rows with NCCL's all-to-all, one row for each route."""

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layer.grouped_linear import GroupedLinear, RowGroups, row_groups
from benchmarks.layer.problem import Problem
from benchmarks.layer.row_kernels import combine_rows, gather_rows, swiglu, swiglu_backward
from benchmarks.layer.shared_expert import SharedExpert


class _Part:
    """The routes of some of the tokens: their way to the experts and back.

    Routes are sorted by expert and sent; received rows, sorted by source, are sorted by expert
    again for the products, and back for the way back.
    """

    def __init__(self, problem: Problem, tokens: slice):
        """Collective; waits for the device, because the host has to know how many rows move."""
        ranks, local_experts = problem.ranks, problem.case.local_experts
        idx = problem.topk_idx[tokens]
        flat = idx.flatten()
        self.sent_route = torch.argsort(flat, stable=True)
        self.sent_token = self.sent_route // problem.case.topk
        self.place_of_route = _inverse(self.sent_route).view_as(idx)
        counts = torch.bincount(flat, minlength=problem.num_experts)
        everyone = counts.new_empty(ranks * problem.num_experts)
        dist.all_gather_into_tensor(everyone, counts)
        everyone = everyone.view(ranks, ranks, local_experts)  # [source, owner, expert]
        received = everyone[:, problem.rank]
        self.sent = everyone[problem.rank].sum(1).tolist()
        self.received = received.sum(1).tolist()
        self.groups: RowGroups = row_groups(received.sum(0))
        expert = torch.arange(local_experts, device=flat.device).repeat(ranks)
        of_row = expert.repeat_interleave(received.flatten(), output_size=sum(self.received))
        self.received_of_row = torch.argsort(of_row, stable=True)
        self.row_of_received = _inverse(self.received_of_row)

    def to_owners(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        out = rows.new_empty(sum(self.received), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows, self.received, self.sent, async_op=True)
        return out, work

    def to_sources(self, rows: Tensor, out: Tensor) -> dist.Work:
        """rows: sorted by expert. out: for the sent rows, in the order in which they were sent."""
        if rows.dim() > 1:
            ordered = gather_rows(rows, self.row_of_received)
        else:
            ordered = rows[self.row_of_received]
        return dist.all_to_all_single(out, ordered, self.sent, self.received, async_op=True)


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.empty_like(permutation)
    places[permutation] = torch.arange(len(permutation), device=permutation.device)
    return places


class AllToAllLayer:
    """The layer in one or several parts of its tokens.

    With several parts, one part's rows are on their way while another's are computed. The shared
    expert runs beside the first and the last exchange, the weight gradients beside the last one.
    """

    resident_bytes = 0

    def __init__(self, problem: Problem, linear: type[GroupedLinear], parts: int = 1):
        self.problem = problem
        in_parts = f" in {parts}" if parts > 1 else ""
        self.name = f"all-to-all{in_parts}, {linear.label}"
        self.link_bytes = problem.load.link_bytes
        self._gate_up = linear(torch.cat([problem.gate, problem.up], dim=1))
        self._down = linear(problem.down)
        self._shared = SharedExpert(problem)
        tokens = problem.case.tokens
        ends = [tokens * part // parts for part in range(parts + 1)]
        self._slices = [slice(ends[part], ends[part + 1]) for part in range(parts)]

    def plan(self) -> None:
        topk = self.problem.case.topk
        self._parts = [_Part(self.problem, tokens) for tokens in self._slices]
        # Returned rows of all parts lie one after the other; a part has topk rows a token.
        self._place_of_route = torch.cat(
            [
                p.place_of_route + s.start * topk
                for p, s in zip(self._parts, self._slices, strict=True)
            ]
        )

    def _send(self, tensor: Tensor) -> list[tuple[Tensor, dist.Work]]:
        """Rows of tokens -> the experts' ranks, part by part."""
        parts = zip(self._parts, self._slices, strict=True)
        return [p.to_owners(gather_rows(tensor[tokens], p.sent_token)) for p, tokens in parts]

    def _returned(self, *row_shape: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """A buffer for the rows that come back, and each part's piece of it."""
        problem = self.problem
        topk = problem.case.topk
        size = (problem.case.tokens * topk, *row_shape)
        buffer = torch.empty(size, dtype=dtype, device=problem.x.device)
        return buffer, [buffer[s.start * topk : s.stop * topk] for s in self._slices]

    def forward(self) -> Tensor:
        problem, x = self.problem, self.problem.x
        weights = [
            part.to_owners(problem.topk_weight[tokens].flatten()[part.sent_route])
            for part, tokens in zip(self._parts, self._slices, strict=True)
        ]
        received = self._send(x)
        self._shared.hidden(x)
        returned, pieces = self._returned(x.shape[1], dtype=x.dtype)
        self._saved, works = [], []
        for part, (rows, work), (weight, weight_work), piece in zip(
            self._parts, received, weights, pieces, strict=True
        ):
            weight_work.wait()
            work.wait()
            weight = weight[part.received_of_row]
            rows = gather_rows(rows, part.received_of_row)
            gate_up = self._gate_up.forward(rows, part.groups)
            y = self._down.forward(swiglu(gate_up, weight), part.groups)
            works.append(part.to_sources(y, piece))
            self._saved.append((weight, rows, gate_up))
        shared = self._shared.output()
        for work in works:
            work.wait()
        return combine_rows(returned, self._place_of_route, shared)

    def backward(self) -> dict[str, Tensor]:
        d_out = self.problem.d_out
        received = self._send(d_out)
        d_x_shared = self._shared.input_grad(d_out)
        returned, pieces = self._returned(d_out.shape[1], dtype=d_out.dtype)
        returned_weight, weight_pieces = self._returned(dtype=torch.float32)
        saved, works = [], []
        for index, (part, (d_rows, work)) in enumerate(zip(self._parts, received, strict=True)):
            weight, rows, gate_up = self._saved[index]
            work.wait()
            d_rows = gather_rows(d_rows, part.received_of_row)
            d_h = self._down.input_grad(d_rows, part.groups)
            d_gate_up, h, d_weight = swiglu_backward(d_h, gate_up, weight)
            d_x_rows = self._gate_up.input_grad(d_gate_up, part.groups)
            works.append(part.to_sources(d_x_rows, pieces[index]))
            works.append(part.to_sources(d_weight, weight_pieces[index]))
            saved.append((d_rows, h, d_gate_up, rows))
        grads = self._weight_grads(saved)  # beside the way back of d_x
        for work in works:
            work.wait()
        grads["x"] = combine_rows(returned, self._place_of_route, d_x_shared)
        grads["topk_weight"] = returned_weight[self._place_of_route]
        return grads

    def _weight_grads(self, saved: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        down = gate_up = None
        for part, (d_rows, h, d_gate_up, rows) in zip(self._parts, saved, strict=True):
            down = self._down.weight_grad(d_rows, h, part.groups, down)
            gate_up = self._gate_up.weight_grad(d_gate_up, rows, part.groups, gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return {"gate": gate, "up": up, "down": down} | self._shared.weight_grads()
