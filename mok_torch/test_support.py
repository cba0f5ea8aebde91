"""What several test files of mok_torch share."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mok_torch.reference import relative_error, worst_row_error
from mok_torch.self_test import (
    LIMITS,
    ROUTER_LIMITS,
    Batch,
    Case,
    make_batch,
    run_layer,
    run_reference,
)

# Of single rows, relative: five times what the whole tensor may have.
ROW_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 5e-5}


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
    if rounded:
        # run_reference rounds when there is a clamp: this one is at infinity.
        case = dataclasses.replace(case, swiglu_limit=case.swiglu_limit or math.inf)
    limit, row_limit = LIMITS[dtype][0], ROW_LIMITS[dtype]
    expected = {}
    if batch.shared is not None or (batch.topk_idx >= 0).any():
        expected = run_reference(case, batch)
    for name in actual:
        reference = expected.get(name)
        if reference is None:  # autograd has not met this leaf: no route leads to it
            reference = torch.zeros_like(actual[name])
        assert actual[name].shape == reference.shape, name
        error = relative_error(actual[name], reference)
        if name in ("d_topk_weight", "d_shared_scale"):
            assert error <= ROUTER_LIMITS[dtype], f"{name}: {error}"
            continue
        assert error <= limit, f"{name}: {error}"
        if not check_rows:
            continue
        row_error = worst_row_error(actual[name], reference)
        assert row_error <= row_limit, f"{name}: {row_error} in the worst row"
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
