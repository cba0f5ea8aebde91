"""Whole-layer cases against the float64 reference; what `check` runs and what tests build on.

A case names the tokens of every rank; the ranks are threads of this process.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math

import torch
from torch import Tensor

from mok_torch import functional
from mok_torch.groups import InProcessGroup
from mok_torch.layer import expert_range
from mok_torch.reference import moe_reference, relative_error, worst_row_error

# (whole tensor, worst row) relative to the float64 reference.
LIMITS = {torch.bfloat16: (4e-3, 2e-2), torch.float32: (1e-5, 1e-5)}
# A router weight's gradient is one number, the dot product of two rounded vectors: whole tensor.
ROUTER_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and its tokens.

    Attributes:
      tokens: of each rank; their number is the EP size.
      scaled_shared: the shared expert's output has a factor per token.
      no_route_share: the part of the routes that is -1.
      input_scale: standard deviation of x.
    """

    name: str
    tokens: tuple[int, ...]
    hidden: int = 128
    intermediate: int = 96
    experts: int = 8
    topk: int = 2
    shared: int = 0
    scaled_shared: bool = False
    swiglu_limit: float | None = None
    no_route_share: float = 0.0
    input_scale: float = 1.0
    config: functional.MoKConfig = dataclasses.field(default_factory=functional.MoKConfig)
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs of a case, over all ranks; leaves of the dtype under test."""

    x: Tensor  # [T, H]
    topk_idx: Tensor  # int64 [T, K]
    topk_weight: Tensor  # fp32 [T, K]
    weights: tuple[Tensor, Tensor, Tensor]  # routed gate, up [E, I, H], down [E, H, I]
    shared: functional.SharedExpert | None
    d_out: Tensor  # [T, H]

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable inputs by name."""
        named = {"x": self.x, "topk_weight": self.topk_weight}
        named |= dict(zip(("w_gate", "w_up", "w_down"), self.weights, strict=True))
        if self.shared is not None:
            names = ("shared_gate", "shared_up", "shared_down", "shared_scale")
            given = zip(names, self.shared, strict=True)
            named |= {name: tensor for name, tensor in given if tensor is not None}
        return named


def make_batch(case: Case, dtype: torch.dtype) -> Batch:
    """Random inputs; the same for every dtype but for rounding."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return values.to(dtype).requires_grad_()

    tokens, hidden, intermediate = sum(case.tokens), case.hidden, case.intermediate
    x = draw(tokens, hidden, scale=case.input_scale)
    topk_idx = torch.randint(case.experts, (tokens, case.topk), generator=generator)
    dropped = torch.rand(tokens, case.topk, generator=generator) < case.no_route_share
    topk_weight = draw(tokens, case.topk, dtype=torch.float32)
    weights = (
        draw(case.experts, intermediate, hidden, scale=hidden**-0.5),
        draw(case.experts, intermediate, hidden, scale=hidden**-0.5),
        draw(case.experts, hidden, intermediate, scale=intermediate**-0.5),
    )
    shared = None
    if case.shared:
        shared = functional.SharedExpert(
            draw(case.shared, hidden, scale=hidden**-0.5),
            draw(case.shared, hidden, scale=hidden**-0.5),
            draw(hidden, case.shared, scale=case.shared**-0.5),
            draw(tokens, dtype=torch.float32) if case.scaled_shared else None,
        )
    d_out = draw(tokens, hidden).detach()
    return Batch(x, topk_idx.masked_fill(dropped, -1), topk_weight, weights, shared, d_out)


def run_reference(case: Case, batch: Batch) -> dict[str, Tensor]:
    """out and the gradient of every leaf in float64."""
    leaves = {
        name: leaf.detach().double().requires_grad_() for name, leaf in batch.leaves().items()
    }
    shared = None
    if batch.shared is not None:
        names = ("shared_gate", "shared_up", "shared_down", "shared_scale")
        shared = functional.SharedExpert(*(leaves.get(name) for name in names))
    out = moe_reference(
        leaves["x"],
        batch.topk_idx,
        leaves["topk_weight"],
        leaves["w_gate"],
        leaves["w_up"],
        leaves["w_down"],
        shared=shared,
        swiglu_limit=case.swiglu_limit,
        # The clamp's gradient jumps; which side an element is on, the rounded value decides.
        storage_dtype=batch.x.dtype if case.swiglu_limit is not None else None,
    )
    out.backward(batch.d_out.double())
    return {"out": out.detach()} | {f"d_{name}": leaf.grad for name, leaf in leaves.items()}


def _run_rank(case: Case, batch: Batch, member, rank: int, device: str) -> dict[str, Tensor]:
    """out and gradients of one rank's tokens and experts."""
    begin = sum(case.tokens[:rank])
    own = slice(begin, begin + case.tokens[rank])
    held = slice(*expert_range(case.experts, len(case.tokens), rank))
    leaves = {}
    for name, leaf in batch.leaves().items():
        if name in ("x", "topk_weight", "shared_scale"):
            leaf = leaf[own]
        elif name.startswith("w_"):
            leaf = leaf[held]
        leaves[name] = leaf.detach().to(device, copy=True).requires_grad_()
    shared = None
    if batch.shared is not None:
        names = ("shared_gate", "shared_up", "shared_down", "shared_scale")
        shared = functional.SharedExpert(*(leaves.get(name) for name in names))
    workspace = functional.create_workspace(
        case.config,
        member,
        device=device,
        num_local_tokens=max(case.tokens),
        hidden_size=case.hidden,
        topk=case.topk,
        dtype=batch.x.dtype,
    )
    routes, d_out = batch.topk_idx[own].to(device), batch.d_out[own].to(device)
    if device != "cpu" and len(case.tokens) > 1:
        results = _run_explicitly(case, leaves, routes, d_out, workspace)
        workspace.check()
        return {name: result.cpu() for name, result in results.items()}
    out = functional.moe(
        leaves["x"],
        routes,
        leaves["topk_weight"],
        leaves["w_gate"],
        leaves["w_up"],
        leaves["w_down"],
        shared=shared,
        workspace=workspace,
        config=case.config,
        swiglu_limit=case.swiglu_limit,
    )
    out.backward(d_out)
    workspace.check()
    results = {"out": out.detach()} | {f"d_{name}": leaf.grad for name, leaf in leaves.items()}
    return {name: result.cpu() for name, result in results.items()}


def _run_explicitly(case: Case, leaves, routes: Tensor, d_out: Tensor, workspace):
    """out and gradients without autograd, which would run all ranks' backwards in one thread.

    On a GPU they all have to be under way at the same time.
    """
    names = ("x", "topk_weight", "shared_gate", "shared_up", "shared_down")
    names += ("w_gate", "w_up", "w_down")
    tensors = [leaves[name].detach() if name in leaves else None for name in names]
    scale = leaves["shared_scale"].detach() if "shared_scale" in leaves else None
    experts = leaves["w_gate"].shape[0]
    schedule = functional.build_schedule(workspace, case.config, routes, num_local_experts=experts)
    limit = {"swiglu_limit": case.swiglu_limit, "shared_scale": scale}
    out, context = functional.forward(case.config, workspace, schedule, *tensors, **limit)
    gradients = functional.backward(
        case.config, workspace, schedule, context, d_out, *tensors, **limit
    )
    order = ("x", "topk_weight", "w_gate", "w_up", "w_down")
    order += ("shared_gate", "shared_up", "shared_down", "shared_scale")
    named = zip(order[: len(gradients)], gradients, strict=True)
    return {"out": out} | {f"d_{name}": d for name, d in named if d is not None}


def run_on_ranks(function, size: int) -> list:
    """[function(member, rank) of every rank of an in-process group]; raises what a rank raises."""
    group = InProcessGroup(size)
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, group.member(rank), rank) for rank in range(size)]
        return [future.result() for future in futures]


def run_layer(case: Case, batch: Batch, device: str = "cpu") -> dict[str, Tensor]:
    """out and the gradient of every leaf, put together from the ranks, which share a GPU.

    Gradients of the shared expert are the fp32 sum of the ranks' parts, as data parallelism adds
    them.
    """
    parts = run_on_ranks(
        lambda member, rank: _run_rank(case, batch, member, rank, device), len(case.tokens)
    )
    whole = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if name in ("d_shared_gate", "d_shared_up", "d_shared_down"):
            whole[name] = torch.stack(pieces).float().sum(dim=0)
        else:
            whole[name] = torch.cat(pieces)
    return whole


def few_terms_limit(case: Case) -> float:
    """What the error of a whole tensor stays within in bf16, at four standard deviations of out's.

    The squares of the roundings' errors average out over the T * H elements of out and over the
    elements of h, of which fewer count, as few are large: docs/numerics.md has the measurements.
    Small layers exceed 4e-3, the limit of large ones, by these roundings alone.
    """
    tokens = sum(case.tokens)
    h_elements = tokens * (case.topk * case.intermediate + case.shared)
    deviation = math.sqrt(1 / (tokens * case.hidden) + 16 / h_elements)
    return max(LIMITS[torch.bfloat16][0], 3.9e-3 * (1 + 4 * deviation))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor of one case against the reference; errors are relative."""

    tensor: str
    error: float
    row_error: float | None  # None where single rows are not judged
    limit: float
    row_limit: float

    @property
    def ok(self) -> bool:
        # Written so that a NaN fails.
        rows_ok = self.row_error is None or self.row_error <= self.row_limit
        return self.error <= self.limit and rows_ok


def compare(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[Comparison]:
    """Runs a case and judges every output and gradient."""
    batch = make_batch(case, dtype)
    expected, actual = run_reference(case, batch), run_layer(case, batch, device)
    limit, row_limit = LIMITS[dtype]
    if dtype == torch.bfloat16:
        limit = few_terms_limit(case)
    comparisons = []
    for name, reference in expected.items():
        error = relative_error(actual[name], reference)
        if name in ("d_topk_weight", "d_shared_scale"):
            judged = Comparison(name, error, None, ROUTER_LIMITS[dtype], row_limit)
        else:
            row_error = worst_row_error(actual[name], reference)
            judged = Comparison(name, error, row_error, limit, row_limit)
        comparisons.append(judged)
    return comparisons
