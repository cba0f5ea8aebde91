"""Inputs of one case on one rank, and the float64 layer that results are compared with."""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layer.cases import Case, Load, load_of, make_routing
from mok_torch.reference import moe_reference


@dataclasses.dataclass
class Problem:
    """What every layer is given. Weights of this rank's experts, in PyTorch's [out, in] layout."""

    case: Case
    rank: int
    ranks: int
    group: dist.ProcessGroup | None
    load: Load
    x: Tensor  # [T, H]
    d_out: Tensor  # [T, H]
    topk_idx: Tensor  # [T, K] int64
    topk_weight: Tensor  # [T, K] fp32
    gate: Tensor  # [El, I, H]
    up: Tensor  # [El, I, H]
    down: Tensor  # [El, H, I]
    shared_gate: Tensor  # [Is, H]
    shared_up: Tensor  # [Is, H]
    shared_down: Tensor  # [H, Is]

    @property
    def first_expert(self) -> int:
        return self.rank * self.case.local_experts

    @property
    def num_experts(self) -> int:
        return self.ranks * self.case.local_experts

    def tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}


# Names of what a backward returns, in this order.
GRADIENTS = ("x", "topk_weight", "gate", "up", "down", "shared_gate", "shared_up", "shared_down")


def make_problem(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Collective: all ranks call it with the same arguments."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.Generator(device).manual_seed(1000 * seed + rank + 1)
    common = torch.Generator(device).manual_seed(1000 * seed + 999)

    def draw(*size: int, scale: float = 1.0, generator=own) -> Tensor:
        return torch.randn(size, device=device, generator=generator, dtype=dtype).mul_(scale)

    hidden, inner, shared = case.hidden, case.intermediate, case.shared
    routes = make_routing(case, ranks, seed)
    weight = torch.rand(case.tokens, case.topk, device=device, generator=own)
    return Problem(
        case=case,
        rank=rank,
        ranks=ranks,
        group=dist.group.WORLD,
        load=load_of(case, routes, torch.finfo(dtype).bits // 8),
        x=draw(case.tokens, hidden),
        d_out=draw(case.tokens, hidden),
        topk_idx=routes[rank].to(device),
        topk_weight=weight / weight.sum(1, keepdim=True),
        gate=draw(case.local_experts, inner, hidden, scale=hidden**-0.5),
        up=draw(case.local_experts, inner, hidden, scale=hidden**-0.5),
        down=draw(case.local_experts, hidden, inner, scale=inner**-0.5),
        shared_gate=draw(shared, hidden, scale=hidden**-0.5, generator=common),
        shared_up=draw(shared, hidden, scale=hidden**-0.5, generator=common),
        shared_down=draw(hidden, shared, scale=shared**-0.5, generator=common),
    )


@dataclasses.dataclass
class _Shared:
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    scale = None


def reference(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """The float64 output and gradients of this rank's tokens and weights. Collective.

    Every rank computes the layer of all ranks on the CPU: for small cases. Gradients of the shared
    expert are this rank's part, as the layers return it (data parallelism adds them up).
    """
    gathered: list = [None] * problem.ranks
    dist.all_gather_object(gathered, {k: v.cpu() for k, v in problem.tensors().items()})

    def leaf(values: list[Tensor]) -> Tensor:
        return torch.cat(values).double().requires_grad_()

    per_rank = ("x", "topk_weight", "gate", "up", "down")
    leaves = {name: leaf([of_rank[name] for of_rank in gathered]) for name in per_rank}
    own = {name: leaf([gathered[problem.rank][name]]) for name in GRADIENTS[5:]}
    others = {name: value.detach() for name, value in own.items()}
    topk_idx = torch.cat([of_rank["topk_idx"] for of_rank in gathered])
    outputs = []
    for rank in range(problem.ranks):
        tokens = slice(rank * problem.case.tokens, (rank + 1) * problem.case.tokens)
        shared = own if rank == problem.rank else others
        outputs.append(
            moe_reference(
                leaves["x"][tokens],
                topk_idx[tokens],
                leaves["topk_weight"][tokens],
                *(leaves[name] for name in ("gate", "up", "down")),
                shared=_Shared(*(shared[name] for name in GRADIENTS[5:])),
            )
        )
    torch.cat(outputs).backward(torch.cat([of_rank["d_out"] for of_rank in gathered]).double())
    grads = {name: value.grad.chunk(problem.ranks)[problem.rank] for name, value in leaves.items()}
    grads |= {name: value.grad for name, value in own.items()}
    return outputs[problem.rank].detach(), grads
