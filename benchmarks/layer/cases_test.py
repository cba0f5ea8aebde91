"""Sizes, routings, FLOPs and traffic of the cases."""

import pytest

from benchmarks.layer.cases import FAMILIES, MODELS, load_of, make_case, make_routing


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_routes_are_distinct_experts_of_each_token(family, ranks):
    case = make_case("tiny", family, tokens=200)
    routes = make_routing(case, ranks)
    assert routes.shape == (ranks, 200, case.topk)
    assert routes.min() >= 0 and routes.max() < ranks * case.local_experts
    ordered = routes.sort(dim=-1).values
    assert (ordered.diff(dim=-1) > 0).all()
    assert (make_routing(case, ranks) == routes).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_has_every_case(model, family):
    """kimi's has fewer experts than routes a token."""
    case = make_case(model, family, tokens=64)
    routes = make_routing(case, 1)
    assert routes.shape == (1, 64, case.topk)
    assert routes.min() >= 0 and routes.max() < case.local_experts


def test_families_have_the_design_s_sizes():
    kimi = make_case("kimi", "model")
    assert (kimi.tokens, kimi.topk, kimi.shared) == (2048, 8, 2048)
    traffic = make_case("qwen", "ep64")
    assert (traffic.tokens, traffic.topk, traffic.shared) == (20480, 1, 256)
    assert make_case("deepseek", "ep64").tokens == 12288
    assert make_case("glm", "model-8192").tokens == 8192
    assert set(MODELS) == {"kimi", "glm", "qwen", "deepseek", "tiny"}


def test_one_route_in_64_stays():
    case = make_case("kimi", "ep64")
    owner = make_routing(case, 2) // case.local_experts
    stays = sum(float((owner[rank] == rank).double().mean()) for rank in range(2)) / 2
    assert stays == pytest.approx(1 / 64, rel=0.2)


def test_balanced_is_flat_and_zipf_is_not():
    spread = {}
    for family in ("model", "model-zipf"):
        case = make_case("deepseek", family)
        counts = make_routing(case, 2).flatten().bincount()
        spread[family] = float(counts.max() / counts.double().mean())
    assert spread["model"] < 1.1 and spread["model-zipf"] > 1.3


def test_flops_and_load_by_hand():
    case = make_case("tiny", "model", tokens=2)
    assert case.flops(10) == 6 * 10 * 64 * 32 + 6 * 2 * 64 * 32
    routes = make_routing(case, 2)
    routes[0], routes[1] = 0, 4  # every route stays: nothing crosses
    assert (load_of(case, routes).rows, load_of(case, routes).link_bytes) == (6, 0)
    routes[1] = 0  # rank 1 sends 6 rows to rank 0 and gets as many back
    load = load_of(case, routes)
    assert (load.rows, load.link_bytes) == (12, 6 * 64 * 2)
    routes[0] = 4  # rank 0 does the same: each direction carries rows out and rows back
    assert load_of(case, routes).link_bytes == 2 * 6 * 64 * 2
