"""Peers from other libraries, used where they are installed, through the APIs that they document.

None of them has been run yet: no machine at hand had one. Stand-ins test the arithmetic; where the
libraries do otherwise, the comparison with float64 before the measurement notices.
"""

import torch
from torch import Tensor

from benchmarks.layer.all_gather_layer import NcclAllGather, Wait
from benchmarks.layer.grouped_linear import RowGroups
from benchmarks.layer.problem import Problem
from benchmarks.layer.shared_expert import SharedExpert


class DeepEpExchange:
    """DeepEP V2's ElasticBuffer: a token goes once to each rank that wants it."""

    label = "DeepEP"

    def __init__(self, problem: Problem):
        import deep_ep

        case = problem.case
        self.problem = problem
        self._buffer = deep_ep.ElasticBuffer(
            problem.group,
            num_max_tokens_per_rank=case.tokens,
            hidden=case.hidden,
            num_topk=case.topk,
        )
        self._num_sms = self._buffer.get_theoretical_num_sms(problem.num_experts, case.topk)
        wanted = problem.topk_idx // case.local_experts
        peers = [rank for rank in range(problem.ranks) if rank != problem.rank]
        tokens = sum(int((wanted == rank).any(1).sum()) for rank in peers)
        # Tokens out and sums back; as many the other way in a balanced case.
        self.link_bytes = 2.0 * tokens * case.hidden * problem.x.element_size()

    def plan(self, topk_idx: Tensor, topk_weight: Tensor) -> tuple[Tensor, Tensor]:
        _, idx, weight, self._handle, event = self._buffer.dispatch(
            self.problem.x,
            topk_idx=topk_idx,
            topk_weights=topk_weight,
            num_experts=self.problem.num_experts,
            num_max_tokens_per_rank=self.problem.case.tokens,
            num_sms=self._num_sms,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        return idx.long(), weight

    def send(self, tokens: Tensor) -> tuple[Tensor, Wait]:
        received, _, _, _, event = self._buffer.dispatch(
            tokens, handle=self._handle, num_sms=self._num_sms, async_with_compute_stream=True
        )
        return received, event.current_stream_wait

    def sum(self, partial: Tensor) -> tuple[Tensor, Wait]:
        out, _, event = self._buffer.combine(
            partial, handle=self._handle, num_sms=self._num_sms, async_with_compute_stream=True
        )
        return out, event.current_stream_wait

    def sum_weights(self, partial: Tensor) -> Tensor:
        rows = self.problem.x.new_zeros(partial.shape[0], self.problem.case.hidden)
        _, weights, event = self._buffer.combine(
            rows,
            handle=self._handle,
            topk_weights=partial,
            num_sms=self._num_sms,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        return weights


class TransformerEngineLinear:
    """transformer_engine.pytorch.GroupedLinear; its autograd gives both gradients at once."""

    label = "TransformerEngine"

    def __init__(self, weight: Tensor):
        import transformer_engine.pytorch as te

        experts, width, k = weight.shape
        self._module = te.GroupedLinear(experts, k, width, bias=False, params_dtype=weight.dtype)
        self._weights = [getattr(self._module, f"weight{expert}") for expert in range(experts)]
        with torch.no_grad():
            for own, given in zip(self._weights, weight, strict=True):
                own.copy_(given)

    def forward(self, a: Tensor, groups: RowGroups) -> Tensor:
        with torch.enable_grad():
            self._a = a.detach().requires_grad_()
            self._c = self._module(self._a, groups.counts)
        return self._c.detach()

    def input_grad(self, d_c: Tensor, groups: RowGroups) -> Tensor:
        d_a, *self._d_weights = torch.autograd.grad(self._c, [self._a, *self._weights], d_c)
        return d_a

    def weight_grad(
        self, d_c: Tensor, a: Tensor, groups: RowGroups, total: Tensor | None = None
    ) -> Tensor:
        grad = torch.stack(self._d_weights)
        return grad if total is None else total.add_(grad)


class SonicMoeLayer:
    """SonicMoE computes the local experts of all tokens, which NCCL gathers and reduces."""

    name = "all-gather, SonicMoE"
    resident_bytes = 0

    def __init__(self, problem: Problem):
        self.problem = problem
        self._exchange = NcclAllGather(problem)
        self.link_bytes = self._exchange.link_bytes
        self._shared = SharedExpert(problem)
        # It wants rows of gate and up in turns, and the expert as the last dimension.
        both = torch.stack([problem.gate, problem.up], dim=2).flatten(1, 2)
        self._gate_up = both.permute(1, 2, 0).requires_grad_()
        self._down = problem.down.clone().permute(1, 2, 0).requires_grad_()

    def plan(self) -> None:
        local, weight = self._exchange.plan(self.problem.topk_idx, self.problem.topk_weight)
        self._mine = local >= 0
        self._expert = local[self._mine].int()
        self._token = torch.nonzero(self._mine)[:, 0].int()  # ascending
        self._weight = weight[self._mine].requires_grad_()

    def forward(self) -> Tensor:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        tokens, wait = self._exchange.send(self.problem.x)
        self._shared.hidden(self.problem.x)
        wait()
        with torch.enable_grad():
            self._tokens = tokens.requires_grad_()
            self._partial, _ = moe_general_routing_inputs(
                self._tokens, self._weight, self._token, self._expert, self._gate_up, None,
                self._down, None, self.problem.case.local_experts,
                torch.cuda.current_stream().cuda_stream, ActivationType.SWIGLU,
            )  # fmt: skip
        out, wait = self._exchange.sum(self._partial.detach())
        shared = self._shared.output()
        wait()
        return out.add_(shared)

    def backward(self) -> dict[str, Tensor]:
        d_tokens, wait = self._exchange.send(self.problem.d_out)
        d_x_shared = self._shared.input_grad(self.problem.d_out)
        wait()
        leaves = [self._tokens, self._weight, self._gate_up, self._down]
        d_x, d_weight, d_gate_up, d_down = torch.autograd.grad(self._partial, leaves, d_tokens)
        d_x, wait = self._exchange.sum(d_x)
        grads = self._shared.weight_grads()
        d_gate, d_up = d_gate_up.permute(2, 0, 1).unflatten(1, (-1, 2)).unbind(2)
        grads |= {"gate": d_gate, "up": d_up, "down": d_down.permute(2, 0, 1)}
        d_routes = torch.zeros(self._mine.shape, device=d_weight.device)
        d_routes[self._mine] = d_weight
        wait()
        grads["topk_weight"] = self._exchange.sum_weights(d_routes)
        grads["x"] = d_x.add_(d_x_shared)
        return grads
