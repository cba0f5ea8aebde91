"""Both passes on one GPU: against float64 and the host engine, and the determinism contract.

Several ranks share the GPU. Needs a GPU of compute capability 9.0: without one everything fails.
"""

import dataclasses

import pytest
import torch

from mok_torch import functional
from mok_torch.functional import MoKConfig
from mok_torch.reference import relative_error
from mok_torch.self_test import Case, make_batch, run_layer
from mok_torch.test_support import as_bits, assert_matches_reference, routed_batch

BF16 = torch.bfloat16
FULL = Case("full", (300,), shared=40, scaled_shared=True, no_route_share=0.2)


def assert_forward(case: Case, **options) -> torch.Tensor:
    """Against float64 with the host's limits, and within them of the host engine."""
    actual = assert_matches_reference(case, BF16, device="cuda", **options)
    changes = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    host = run_layer(case, routed_batch(case, BF16, **changes))
    for name in ("out", "d_x", "d_w_gate", "d_w_up", "d_w_down"):
        assert relative_error(actual[name], host[name]) <= 5e-3, name
    return actual["out"]


@pytest.mark.parametrize(
    "case",
    [
        FULL,
        Case("small inputs", (300,), shared=40, input_scale=0.02),
        Case("clamped", (300,), shared=40, swiglu_limit=0.5),
        Case("no shared expert", (100, 200)),
        Case("shared width differs", (300,), intermediate=64, shared=200),
        Case("one route per token", (600,), topk=1),
        Case("wide", (700,), hidden=1024, intermediate=512, experts=6, topk=3, shared=256),
    ],
    ids=lambda case: case.name,
)
def test_matches_float64(case):
    assert_forward(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("more routes than experts", (9,), experts=3, topk=5),
        Case("three ranks, one without tokens", (0, 5, 17), shared=40, scaled_shared=True),
        Case("experts no multiple of ranks", (11, 3, 8), experts=7),
        Case("fewer experts than ranks", (4, 6, 2, 3), experts=2, topk=3),
        Case("more routes than local experts", (20, 20), experts=4, topk=4),
        Case("odd tails", (131,), hidden=104, intermediate=72, experts=3),
        Case("one token", (1,), shared=8),
        Case("2880", (5, 6), hidden=2880, intermediate=2880, experts=2),
        Case("8 ranks", (100, 0, 3, 250, 17, 128, 129, 73), experts=24, topk=4, shared=40),
        Case("64 ranks", tuple(7 * rank % 23 for rank in range(64)), experts=64, topk=6, shared=40),
    ],
    ids=lambda case: case.name,
)
def test_few_tokens_match_float64(case):
    assert_forward(case, rounded=True)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 127, 128, 129, 257])
def test_rows_around_the_row_block(count):
    case = Case(f"count {count}", (150, 150), hidden=64, intermediate=40, experts=2, topk=1)
    routes = (torch.arange(300) < count).long().reshape(300, 1)
    assert_forward(case, rounded=True, topk_idx=routes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_routes_lead_to_one_expert(ranks):
    case = Case("one expert", (150,) * ranks, hidden=64, intermediate=40, experts=4)
    assert_forward(case, rounded=True, topk_idx=torch.full((150 * ranks, 2), 3))


def test_duplicate_experts_and_missing_routes():
    case = Case("ids [4, 4, -1, -1]", (21,), topk=4)
    routes = torch.tensor([4, 4, -1, -1]).repeat(21, 1)
    assert_forward(case, rounded=True, topk_idx=routes)


def test_no_routes_at_all():
    routes = torch.full((25, 2), -1)
    assert_forward(Case("no routes", (21, 4), shared=40), rounded=True, topk_idx=routes)
    out = assert_forward(Case("nothing", (21, 4)), rounded=True, topk_idx=routes)
    assert (out == 0).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_tokens_on_any_rank(ranks):
    case = Case("no tokens", (0,) * ranks, shared=40, scaled_shared=True)
    assert run_layer(case, make_batch(case, BF16), "cuda")["out"].shape == (0, 128)


@pytest.mark.parametrize("ranks", [(300,), (100, 200)], ids=len)
def test_experts_without_rows_are_never_read(ranks):
    case = Case("empty experts", ranks)
    batch = routed_batch(case, BF16)
    batch = dataclasses.replace(batch, topk_idx=batch.topk_idx % 5)  # experts 5, 6, 7: none
    expected = run_layer(case, batch, "cuda")["out"]
    weights = tuple(weight.detach().clone() for weight in batch.weights)
    for weight in weights:
        weight[5:] = float("nan")
    poisoned = dataclasses.replace(batch, weights=weights)
    assert torch.equal(run_layer(case, poisoned, "cuda")["out"], expected)


def test_random_shapes():
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for seed in range(30):
        case = Case(
            f"random {seed}",
            tuple(draw(0, 200) for _ in range(draw(1, 4))),
            hidden=8 * draw(1, 60),
            intermediate=8 * draw(1, 60),
            experts=draw(1, 12),
            topk=draw(1, 9),
            shared=8 * draw(0, 30),
            scaled_shared=draw(0, 1) == 1,
            no_route_share=draw(0, 3) / 10,
            config=MoKConfig(
                fwd_num_comm_sms=draw(0, 3),
                minibatch_size=[None, 1, 256][draw(0, 2)],
                macrobatch_size=[None, -1, 1, 300][draw(0, 3)],
            ),
            seed=seed,
        )
        assert_matches_reference(case, BF16, rounded=True, check_rows=False, device="cuda")


def test_same_bits_whatever_the_settings_and_ranks():
    results = []
    for tokens in ((600,), (400, 200), (0, 299, 301), (75,) * 8, (9, 10) * 31 + (5, 6)):
        for settings in (
            {},
            {"fwd_num_comm_sms": 4},
            {"minibatch_size": 128},
            {"macrobatch_size": 256},
        ):
            case = Case("bits", tokens, experts=11, topk=3, shared=40, config=MoKConfig(**settings))
            results.append((case, run_layer(case, routed_batch(case, BF16), "cuda")))
    for case, tensors in results:
        for name, tensor in tensors.items():
            if name in ("d_shared_gate", "d_shared_up", "d_shared_down"):
                continue  # one for each rank, over its own tokens
            same = torch.equal(as_bits(tensor), as_bits(results[0][1][name]))
            assert same, (name, case.tokens, case.config)


def cuda_inputs(case: Case):
    """x, topk_idx, topk_weight, weights and shared expert on the GPU, without gradients."""
    batch = routed_batch(case, BF16)
    tensors = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights)
    shared = batch.shared
    if shared is not None:
        moved = (None if t is None else t.detach().cuda() for t in shared)
        shared = functional.SharedExpert(*moved)
    return *(tensor.detach().cuda() for tensor in tensors), shared


def test_repeats_over_poisoned_memory_have_the_same_bits():
    x, idx, weight, *weights, shared = cuda_inputs(FULL)
    workspace = functional.create_workspace(
        device="cuda", num_local_tokens=300, hidden_size=128, topk=2
    )
    expected = functional.moe(x, idx, weight, *weights, shared=shared, workspace=workspace)
    workspace.poison()
    for _ in range(200):
        out = functional.moe(x, idx, weight, *weights, shared=shared, workspace=workspace)
        assert torch.equal(out, expected)
    workspace.check()
    assert workspace.info()["heap_bytes"] > 300 * 2 * 128 * 2


def test_the_default_workspace_grows_and_leading_dimensions_stay():
    for tokens in (3, 700, 40):
        case = dataclasses.replace(FULL, tokens=(tokens,))
        x, idx, weight, *weights, shared = cuda_inputs(case)
        scale = shared.scale.view(tokens, 1)
        flat = functional.moe(x, idx, weight, *weights, shared=shared)
        out = functional.moe(
            x.view(tokens, 1, 128),
            idx.view(tokens, 1, 2).int(),
            weight.view(tokens, 1, 2),
            *weights,
            shared=shared._replace(scale=scale),
        )
        assert out.shape == (tokens, 1, 128) and torch.equal(out.view(tokens, 128), flat)


def test_unaligned_and_strided_arguments():
    x, idx, weight, *weights, _ = cuda_inputs(FULL)
    expected = functional.moe(x[1:], idx[1:], weight[1:], *weights)
    wide = torch.randn(300, 256, dtype=BF16, device="cuda")
    wide[:, 3:131] = x
    turned = weights[0].transpose(1, 2).contiguous().transpose(1, 2)
    out = functional.moe(wide[1:, 3:131], idx[1:], weight[1:], turned, *weights[1:])
    assert torch.equal(out, expected)


def test_explicit_calls_give_the_bits_of_moe():
    x, idx, weight, *weights, shared = cuda_inputs(FULL)
    workspace = functional.get_workspace(
        device="cuda", num_local_tokens=300, hidden_size=128, topk=2
    )
    schedule = functional.build_schedule(workspace, None, idx, num_local_experts=8)
    out, context = functional.forward(
        None,
        workspace,
        schedule,
        x,
        weight,
        *shared[:3],
        *weights,
        shared_scale=shared.scale,
    )
    assert torch.equal(out, functional.moe(x, idx, weight, *weights, shared=shared))
    host_workspace = functional.get_workspace(num_local_tokens=300, hidden_size=128, topk=2)
    host = functional.build_schedule(host_workspace, None, idx.cpu(), num_local_experts=8)
    assert torch.equal(schedule.tokens_per_expert().cpu(), host.tokens_per_expert())
    for name in ("num_tokens", "num_tokens_total", "num_experts", "num_local_experts", "num_rows"):
        assert getattr(schedule.info, name) == getattr(host.info, name), name
    for name in ("first_expert", "num_macrobatches", "num_row_blocks"):
        assert getattr(schedule.info, name) == getattr(host.info, name), name
    # What the backward will find: the activations that the host engine keeps too.
    _, host_context = functional.forward(
        None,
        host_workspace,
        host,
        x.cpu(),
        weight.cpu(),
        *(t.cpu() for t in shared[:3]),
        *(t.cpu() for t in weights),
        shared_scale=shared.scale.cpu(),
    )
    ring, host_ring = context.layout.views(context.ring.buffer), host_context.ring
    rows = 0
    for count in host.tokens_per_expert().tolist():
        assert torch.equal(ring.x[rows : rows + count].cpu(), host_ring.x[rows : rows + count])
        gate, host_gate = (r.gate[rows : rows + count] for r in (ring, host_ring))
        if count:
            assert relative_error(gate.cpu(), host_gate) <= 4e-3
        rows += -(-count // 128) * 128


def test_other_streams():
    """Calls on one workspace follow each other, whatever their streams."""
    x, idx, weight, *weights, shared = cuda_inputs(FULL)
    expected = functional.moe(x, idx, weight, *weights, shared=shared)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for call in range(60):
        with torch.cuda.stream(streams[call % 3]):
            outs.append(functional.moe(x, idx, weight, *weights, shared=shared))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
