"""functional.moe against the float64 reference: shapes and routings that are easy to get wrong."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_torch import functional
from mok_torch.functional import MoKConfig, SharedExpert, moe
from mok_torch.lazy_memory import lazy_zeros
from mok_torch.reference import relative_error
from mok_torch.self_test import Case, few_terms_limit, make_batch, run_layer
from mok_torch.test_support import (
    assert_matches_float64,
    assert_matches_reference,
    expected_of,
    routed_batch,
)

DTYPES = [torch.bfloat16, torch.float32]
FULL = Case("full", (37,), shared=40, scaled_shared=True, no_route_share=0.2)


# Few tokens or channels make up for it with more of what bf16's roundings average over: see "What
# bf16 costs" in docs/numerics.md.
MANY = {"hidden": 128, "intermediate": 1024}
FEW_TOKENS = {"hidden": 512, "intermediate": 2048, "topk": 8}


@pytest.mark.parametrize(("dtype", "seed"), [*zip(DTYPES, (0, 0), strict=True), (DTYPES[0], 1)])
@pytest.mark.parametrize(
    "case",
    [
        Case("full", (640,), **MANY, shared=520, scaled_shared=True, no_route_share=0.2),
        Case("small inputs", (640,), **MANY, shared=520, input_scale=0.02),
        # Small: of a million projections one is on the other side of the clamp in fp32.
        Case("clamped", (300,), shared=40, swiglu_limit=0.5),
        Case("no shared expert", (200, 440), **MANY),
        Case("shared width differs", (640,), hidden=128, intermediate=520, shared=1000),
        Case("one route per token", (1200,), hidden=128, intermediate=1024, topk=1),
        Case("more routes than experts", (160,), **MANY, experts=3, topk=5),
        Case("more routes than local experts", (150, 150), **MANY, experts=4, topk=4),
        Case("experts no multiple of ranks", (300, 100, 240), **MANY, experts=7),
        Case("fewer experts than ranks", (200, 60, 140, 240), **MANY, experts=2, topk=3),
        Case("odd tails", (643,), hidden=104, intermediate=1000, experts=3),
        Case("0, 5, 17 tokens", (0, 5, 17), **FEW_TOKENS, shared=8192, scaled_shared=True),
    ],
    ids=lambda case: case.name,
)
def test_matches_float64(case, dtype, seed):
    assert_matches_float64(dataclasses.replace(case, seed=seed), dtype)


# x of a size at which no projection comes near g = -1.28, where silu' is 0.
SMALL_INPUTS = {"input_scale": 0.02}
MANY_SMALL = MANY | SMALL_INPUTS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case("0, 5, 17 tokens", (0, 5, 17), **FEW_TOKENS, **SMALL_INPUTS, shared=4096),
        Case("shared width differs", (300,), **MANY_SMALL, shared=520, scaled_shared=True),
        Case("more routes than local experts", (150, 150), **MANY_SMALL, experts=4, topk=4),
        Case("experts no multiple of ranks", (100, 50, 150), **MANY_SMALL, experts=7),
    ],
    ids=lambda case: case.name,
)
def test_every_row_of_small_inputs_matches_float64(case, dtype):
    """The limits without any exception: float64 that rounds nothing, rows of few tokens too."""
    assert_matches_reference(case, dtype)


def test_hidden_and_intermediate_2880_in_every_row():
    case = Case("2880", (30, 40), hidden=2880, intermediate=2880, experts=2, **SMALL_INPUTS)
    assert_matches_reference(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 127, 128, 129, 257])
def test_every_row_around_the_row_block(count, dtype):
    """Expert 1 gets `count` rows, expert 0 the rest.

    In fp32 a row of one token's gradient is as exact as the cancelling dot product in it: whole.
    """
    case = Case(f"count {count}", (160, 160), **MANY_SMALL, experts=2, topk=1)
    routes = (torch.arange(320) < count).long().reshape(320, 1)
    check_rows = count > 1 or dtype == torch.bfloat16
    assert_matches_reference(case, dtype, check_rows=check_rows, topk_idx=routes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("routes", "weight"),
    [
        ([3, 3, 3, 3], None),  # all to one expert
        ([4, 4, -1, -1], None),
        ([0, 1, 2, 3], 0.25),  # as tied logits choose
        ([0, 1, 2, 3], 0.0),
    ],
)
def test_every_row_of_routes_that_all_tokens_share(routes, weight, dtype):
    case = Case("the same routes", (150, 150), **MANY_SMALL, topk=4)
    changes = {"topk_idx": torch.tensor(routes).expand(300, 4)}
    if weight is not None:
        changes["topk_weight"] = torch.full((300, 4), weight)
    actual = assert_matches_reference(case, dtype, **changes)
    assert (actual["d_topk_weight"][changes["topk_idx"] < 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        FULL,
        Case("more routes than experts", (9,), experts=3, topk=5),
        Case("three ranks, one without tokens", (0, 5, 17), shared=40, scaled_shared=True),
        Case("experts no multiple of ranks", (11, 3, 8), experts=7),
        Case("fewer experts than ranks", (4, 6, 2, 3), experts=2, topk=3),
        Case("more routes than local experts", (20, 20), experts=4, topk=4),
        Case("odd tails", (131,), hidden=104, intermediate=72, experts=3),
    ],
    ids=lambda case: case.name,
)
def test_small_layers_match_float64_with_rounded_projections(case, dtype):
    assert_matches_reference(case, dtype, rounded=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens", [1, 3, 22, 64])
@pytest.mark.parametrize("width", [32, 128])
def test_small_layers_err_as_few_terms_do(width, tokens, seed):
    case = Case("small", (tokens,), hidden=width, intermediate=width, seed=seed)
    batch = routed_batch(case, torch.bfloat16)
    actual = run_layer(case, batch)
    expected = expected_of(case, batch, actual)
    for name in ("out", "d_x", "d_w_gate", "d_w_up", "d_w_down"):
        assert relative_error(actual[name], expected[name]) <= few_terms_limit(case), name


def test_hidden_and_intermediate_2880():
    assert_matches_float64(Case("2880", (60, 70), hidden=2880, intermediate=2880, experts=2))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 127, 128, 129, 257])
def test_rows_around_the_row_block(count):
    """Expert 1 gets `count` rows, expert 0 the rest."""
    case = Case(f"count {count}", (160, 160), hidden=128, intermediate=2048, experts=2, topk=1)
    assert_matches_float64(case, topk_idx=(torch.arange(320) < count).long().reshape(320, 1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_routes_lead_to_one_expert(ranks):
    case = Case("one expert", (150,) * ranks, hidden=128, intermediate=2048, experts=4)
    routes = torch.full((150 * ranks, 2), 3)
    actual = assert_matches_float64(case, topk_idx=routes)
    for name in ("d_w_gate", "d_w_up", "d_w_down"):
        assert (actual[name][:3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_duplicate_experts_and_missing_routes(dtype):
    case = Case("ids [4, 4, -1, -1]", (300,), **MANY, topk=4)
    routes = torch.tensor([4, 4, -1, -1]).expand(300, 4)
    actual = assert_matches_float64(case, dtype, topk_idx=routes)
    assert (actual["d_topk_weight"][:, 2:] == 0).all()


def test_no_routes_at_all():
    case = Case("no routes", (210, 40), hidden=128, intermediate=64, shared=2400)
    actual = assert_matches_float64(case, topk_idx=torch.full((250, 2), -1))
    assert (actual["d_topk_weight"] == 0).all()


def test_router_weight_zero():
    """The expert is computed all the same: d_topk_weight is not 0, all else of the route is."""
    case = Case("weight 0", (210,), **MANY)
    actual = assert_matches_float64(case, topk_weight=torch.zeros(210, 2))
    assert (actual["out"] == 0).all()
    assert (actual["d_topk_weight"] != 0).any()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_tokens_on_any_rank(ranks):
    case = Case("no tokens", (0,) * ranks, shared=40, scaled_shared=True)
    actual = run_layer(case, make_batch(case, torch.bfloat16))
    assert actual["out"].shape == (0, 128)
    for name in ("d_w_gate", "d_w_up", "d_w_down", "d_shared_gate"):
        assert (actual[name] == 0).all()


def test_more_than_2_31_elements():
    """Weights, ring and scratch of 2^31 elements and more, of which few are ever touched."""
    hidden, experts, routes = 2048, 8192 + 129, 8192
    weights = [
        lazy_zeros(shape, torch.bfloat16)
        for shape in ((experts, 128, hidden), (experts, 128, hidden), (experts, hidden, 128))
    ]
    assert weights[0].numel() > 2**31
    generator = torch.Generator().manual_seed(0)
    used = torch.tensor([0, 8191, experts - 1])
    case = Case("few", (1,), hidden=hidden, intermediate=128, experts=3)
    few = make_batch(case, torch.bfloat16)
    for weight, small in zip(weights, few.weights, strict=True):
        weight[used] = small.detach()
    # Every expert gets a row, so that the ring is as large as it can be; all rows but those of
    # the last expert, at the far end of every buffer, are zero.
    topk_idx = torch.randperm(experts, generator=generator)[:routes].reshape(-1, 8)
    topk_idx[-1, -1] = experts - 1
    x = torch.zeros(routes // 8, hidden, dtype=torch.bfloat16)
    x[-1] = few.x[0].detach()
    x.requires_grad_()
    topk_weight = torch.zeros(routes // 8, 8)
    topk_weight[-1, -1] = 0.5
    topk_weight.requires_grad_()
    out = moe(x, topk_idx, topk_weight, *weights)
    d_out = torch.zeros_like(out)
    d_out[-1] = few.d_out[0]
    out.backward(d_out)

    x_few = few.x.detach().requires_grad_()
    weight_few = torch.tensor([[0.5, 0.0]], requires_grad=True)
    out_few = moe(x_few, torch.tensor([[2, -1]]), weight_few, *(w.detach() for w in few.weights))
    out_few.backward(few.d_out)
    assert torch.equal(out[-1:], out_few) and (out[:-1] == 0).all()
    assert torch.equal(x.grad[-1:], x_few.grad) and (x.grad[:-1] == 0).all()
    assert topk_weight.grad[-1, -1] == weight_few.grad[0, 0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_shape(data):
    """In fp32: all whole tensors within 1e-5, whatever the shape, down to a single token."""
    tokens = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4), "tokens"))
    case = Case(
        "any shape",
        tokens,
        hidden=8 * data.draw(st.integers(1, 20), "hidden / 8"),
        intermediate=8 * data.draw(st.integers(1, 20), "intermediate / 8"),
        experts=data.draw(st.integers(1, 12), "experts"),
        topk=data.draw(st.integers(1, 9), "topk"),
        shared=8 * data.draw(st.integers(0, 8), "shared / 8"),
        scaled_shared=data.draw(st.booleans(), "scaled_shared"),
        no_route_share=data.draw(st.sampled_from([0.0, 0.3, 1.0]), "no_route_share"),
        config=MoKConfig(
            fwd_num_comm_sms=data.draw(st.integers(0, 2), "fwd_num_comm_sms"),
            bwd_num_comm_sms=data.draw(st.integers(0, 2), "bwd_num_comm_sms"),
            minibatch_size=data.draw(st.sampled_from([None, 1, 256]), "minibatch_size"),
            macrobatch_size=data.draw(st.sampled_from([None, -1, 1, 200]), "macrobatch_size"),
            num_threads=data.draw(st.integers(1, 3), "num_threads"),
        ),
        seed=data.draw(st.integers(0, 100), "seed"),
    )
    assert_matches_reference(case, torch.float32, check_rows=False)


def detached(batch):
    return (t.detach() for t in (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights))


def test_leading_dimensions_and_index_dtypes():
    batch = make_batch(FULL, torch.bfloat16)
    x, idx, weight, *weights = detached(batch)
    shared = SharedExpert(*(t.detach() for t in batch.shared))
    flat = moe(x[:36], idx[:36], weight[:36], *weights, shared=shared._replace(scale=None))
    for leading in ((4, 9), (2, 3, 6), (36, 1)):
        out = moe(
            x[:36].view(*leading, 128),
            idx[:36].view(*leading, 2).int(),
            weight[:36].view(*leading, 2),
            *weights,
            shared=shared._replace(scale=None),
        )
        assert out.shape == (*leading, 128)
        assert torch.equal(out.view(36, 128), flat)
    one = moe(x[0], idx[0], weight[0], *weights)
    assert one.shape == (128,)
    assert torch.equal(one, moe(x[:1], idx[:1], weight[:1], *weights)[0])


@pytest.mark.parametrize("scale_shape", [(36,), (36, 1)])
def test_shared_scale_shapes(scale_shape):
    batch = make_batch(dataclasses.replace(FULL, tokens=(36,)), torch.bfloat16)
    scale = batch.shared.scale.detach().view(scale_shape).requires_grad_()
    x, idx, weight, *weights = detached(batch)
    out = moe(x, idx, weight, *weights, shared=batch.shared._replace(scale=scale))
    out.backward(batch.d_out)
    assert scale.grad.shape == scale_shape


def test_non_contiguous_arguments():
    batch = make_batch(FULL, torch.bfloat16)
    arguments = list(detached(batch))
    shared = SharedExpert(*(t.detach() for t in batch.shared))

    def run(change):
        leaves = [change(t).requires_grad_(t.is_floating_point()) for t in arguments]
        shared_leaves = [change(t).requires_grad_() for t in shared]
        out = moe(*leaves, shared=SharedExpert(*shared_leaves))
        out.backward(change(batch.d_out))
        gradients = [t.grad for t in leaves if t.requires_grad] + [t.grad for t in shared_leaves]
        return [out.detach(), *gradients]

    def strided(tensor):
        """The same values, every other element of a larger tensor, last dimension first."""
        order = list(range(tensor.dim()))[::-1]
        wide = tensor.permute(order).repeat_interleave(2, 0).contiguous()[::2].permute(order)
        assert not wide.is_contiguous()
        return wide.detach()

    contiguous = run(lambda tensor: tensor.detach().clone())
    for plain, other in zip(contiguous, run(strided), strict=True):
        assert torch.equal(plain, other)


def test_expanded_output_gradient():
    batch = make_batch(FULL, torch.bfloat16)
    results = []
    for d_out in (torch.ones(37, 128), torch.ones(1).expand(37, 128)):
        x, idx, weight, *weights = detached(batch)
        x.requires_grad_()
        moe(x, idx, weight, *weights).backward(d_out.to(torch.bfloat16))
        results.append(x.grad)
    assert torch.equal(*results)


def test_autocast_casts_tokens_and_weights():
    batch = make_batch(FULL, torch.float32)
    x, idx, weight, *weights = detached(batch)
    shared = SharedExpert(*(t.detach() for t in batch.shared))
    expected = moe(
        x.bfloat16(),
        idx,
        weight,
        *(w.bfloat16() for w in weights),
        shared=SharedExpert(*(w.bfloat16() for w in shared[:3]), shared.scale),
    )
    x.requires_grad_()
    weights[0].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = moe(x, idx, weight, *weights, shared=shared)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert x.grad.dtype == torch.float32 and weights[0].grad.dtype == torch.float32


def test_the_default_workspace_grows():
    batch = make_batch(dataclasses.replace(FULL, hidden=24, tokens=(300,)), torch.bfloat16)
    x, idx, weight, *weights = detached(batch)
    x.requires_grad_()
    first = moe(x[:5], idx[:5], weight[:5], *weights)
    everything = moe(x, idx, weight, *weights)  # more than the first call made room for
    assert torch.equal(first, everything[:5])
    first.sum().backward()
    assert (x.grad[:5] != 0).any() and (x.grad[5:] == 0).all()


def test_the_explicit_names_are_exported():
    for name in functional.__all__:
        assert hasattr(functional, name)
