"""What several test files of mok_torch share."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mok_torch.reference import relative_error, swiglu_mlp, worst_row_error
from mok_torch.self_test import (
    LIMITS,
    ROUTER_LIMITS,
    Batch,
    Case,
    make_batch,
    run_layer,
    run_reference,
)

# Of single rows, relative.
ROW_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
# Dot products, one for each route or token: see router_gradient_error.
ROUTER_GRADIENTS = ("d_topk_weight", "d_shared_scale")
# So many rows of an expert average the effect of one rounding out of its weight gradients' rows.
FULL_EXPERT_ROWS = 64


def routed_batch(case: Case, dtype: torch.dtype, **changes: Tensor) -> Batch:
    """make_batch with routes as a router draws them: positive weights, distinct experts.

    (Two routes to one expert whose weights almost cancel have a sum that no rounding survives.)
    changes: fields of the Batch to replace.
    """
    batch = make_batch(case, dtype)
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = batch.topk_idx.shape
    topk_weight = 0.2 + torch.rand(shape, generator=generator)
    topk_idx = batch.topk_idx
    if case.topk <= case.experts:
        scores = torch.rand(shape[0], case.experts, generator=generator)
        topk_idx = torch.where(topk_idx < 0, topk_idx, scores.topk(case.topk).indices)
    fields = {"topk_idx": topk_idx, "topk_weight": topk_weight} | changes
    fields["topk_weight"] = fields["topk_weight"].requires_grad_()
    return dataclasses.replace(batch, **fields)


def typical_router_gradients(case: Case, batch: Batch) -> dict[str, Tensor]:
    """How large router gradients are that do not cancel: fp64 d_topk_weight [T, K], d_shared_scale.

    The gradient of a route's weight is the dot product <d_out_t, y_k> over H channels, y_k the
    expert's output. Of vectors of these norms and of independent directions its root mean square is
    |d_out_t| |y_k| / sqrt(H); Cauchy and Schwarz bound it by sqrt(H) times that.
    """
    x, root = batch.x.detach().double(), math.sqrt(case.hidden)
    size = torch.linalg.vector_norm(batch.d_out.double(), dim=-1) / root

    def output_norms(tokens: Tensor, weights) -> Tensor:
        y = swiglu_mlp(tokens, *(w.double() for w in weights), swiglu_limit=case.swiglu_limit)
        return torch.linalg.vector_norm(y.detach(), dim=-1)

    norms = torch.zeros(batch.topk_idx.shape, dtype=torch.float64)
    for expert, weights in enumerate(zip(*batch.weights, strict=True)):
        token, k = torch.nonzero(batch.topk_idx == expert, as_tuple=True)
        norms[token, k] = output_norms(x[token], weights)
    typical = {"d_topk_weight": size.unsqueeze(-1) * norms}
    if batch.shared is not None:
        typical["d_shared_scale"] = size * output_norms(x, batch.shared[:3])
    return typical


def router_gradient_error(actual: Tensor, expected: Tensor, typical: Tensor) -> float:
    """Norm of the difference over the norm of expected or, if larger, of typical.

    The two norms are about the same where there are many gradients. A single one may cancel to
    almost nothing, and its relative error be anything, without a digit of any product being wrong.
    """
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    scale = max(torch.linalg.vector_norm(tensor.double()) for tensor in (expected, typical))
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return float(difference / scale)


def expected_of(case: Case, batch: Batch, actual: dict[str, Tensor]) -> dict[str, Tensor]:
    """run_reference's tensor for every one of actual, and its shape checked."""
    reference = {}
    if batch.shared is not None or (batch.topk_idx >= 0).any():
        reference = run_reference(case, batch)
    expected = {}
    for name, tensor in actual.items():
        # autograd may not have met a leaf: no route leads to it.
        met = reference.get(name)
        expected[name] = torch.zeros_like(tensor) if met is None else met
        assert tensor.shape == expected[name].shape, name
    return expected


def rounding_case(case: Case) -> Case:
    """The case whose reference rounds gate and up to the batch's dtype, as the layer does."""
    # run_reference rounds when there is a clamp: this one is at infinity.
    return dataclasses.replace(case, swiglu_limit=case.swiglu_limit or math.inf)


def assert_close_as_a_whole(
    case: Case, batch: Batch, actual: dict[str, Tensor], expected: dict[str, Tensor]
):
    """Every whole tensor is within its limit, relative to expected."""
    typical = typical_router_gradients(case, batch)
    for name, reference in expected.items():
        if name in typical:
            error = router_gradient_error(actual[name], reference, typical[name])
            limit = ROUTER_LIMITS[batch.x.dtype]
        else:
            error, limit = relative_error(actual[name], reference), LIMITS[batch.x.dtype][0]
        assert error <= limit, f"{name}: {error}"


def assert_close_in_every_row(actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float):
    """Every row (last dimension) is within the limit, relative to expected's."""
    for name, reference in expected.items():
        error = worst_row_error(actual[name], reference)
        assert error <= limit, f"{name}: {error} in the worst row"


def assert_close_everywhere(
    case: Case,
    batch: Batch,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    check_rows: bool = True,
):
    """Every whole tensor is within its limit, and every row, if wanted, but router gradients'."""
    assert_close_as_a_whole(case, batch, actual, expected)
    if check_rows:
        rows = {name: e for name, e in expected.items() if name not in ROUTER_GRADIENTS}
        assert_close_in_every_row(actual, rows, ROW_LIMITS[batch.x.dtype])


def assert_matches_reference(
    case: Case,
    dtype: torch.dtype = torch.bfloat16,
    rounded: bool = False,
    check_rows: bool = True,
    device: str = "cpu",
    **changes: Tensor,
) -> dict[str, Tensor]:
    """Runs a case, checks out and every gradient that there is against float64, returns them.

    Args:
      rounded: the reference rounds gate and up to dtype, as the layer is defined to do. The errors
        of bf16's roundings average out over many tokens only: where silu'(g) is near 0, for
        example, the rounding of g decides the gradient's sign. Cases with few tokens need this.
      check_rows: judge every row too. In a row of a weight gradient that one token alone makes,
        the zero of silu' amplifies any error without bound: not for random shapes.
      changes: see routed_batch.
    """
    batch = routed_batch(case, dtype, **changes)
    actual = run_layer(case, batch, device)
    expected = expected_of(rounding_case(case) if rounded else case, batch, actual)
    assert_close_everywhere(case, batch, actual, expected, check_rows)
    return actual


def assert_matches_float64(
    case: Case, dtype: torch.dtype = torch.bfloat16, **changes: Tensor
) -> dict[str, Tensor]:
    """Runs a case, checks out and every gradient against plain float64, returns them.

    Whole tensors, and the rows of out and d_x, are held to float64 that rounds nothing. So are rows
    of weight gradients where every expert that has tokens has FULL_EXPERT_ROWS of them; with fewer,
    what silu' makes of the rounding of gate is not bounded, and these rows are held to the
    reference that rounds gate and up.
    """
    batch = routed_batch(case, dtype, **changes)
    actual = run_layer(case, batch)
    expected = expected_of(case, batch, actual)
    assert_close_as_a_whole(case, batch, actual, expected)
    rows_of_experts = batch.topk_idx[batch.topk_idx >= 0].unique(return_counts=True)[1].tolist()
    if batch.shared is not None:
        rows_of_experts.append(len(batch.x))
    exact = expected
    if min(rows_of_experts, default=0) < FULL_EXPERT_ROWS:
        exact = expected_of(rounding_case(case), batch, actual)
    rows = {name: expected[name] for name in ("out", "d_x")}
    rows |= {name: e for name, e in exact.items() if name.startswith(("d_w_", "d_shared_"))}
    rows.pop("d_shared_scale", None)
    assert_close_in_every_row(actual, rows, ROW_LIMITS[dtype])
    return actual


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]):
    """Every tensor is there and equal bit for bit (0.0 and -0.0 differ)."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        same = torch.equal(as_bits(actual[name]), as_bits(tensor))
        assert same, f"{name}: {(actual[name] != tensor).sum()} of {tensor.numel()} differ"


def as_bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor, as integers."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
