"""Routers against naive implementations of the published rules, over random configurations."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from mok_torch.router import (
    SCORINGS,
    Router,
    RouterConfig,
    count_routes,
    position_independent_sigmoid,
    route,
    router_scores,
    topk_lowest_id_first,
)

_SETTINGS = hypothesis.settings(max_examples=300, deadline=None, derandomize=True)


@st.composite
def router_cases(draw):
    """A valid configuration, with logits and bias from a coarse grid, so that ties are common."""
    n_group = draw(st.integers(1, 4))
    group_size = draw(st.integers(1, 6))
    topk_group = draw(st.integers(1, n_group))
    config = RouterConfig(
        num_experts=n_group * group_size,
        top_k=draw(st.integers(1, topk_group * group_size)),
        scoring=draw(st.sampled_from(SCORINGS)),
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        n_group=n_group,
        topk_group=topk_group,
        expert_bias=draw(st.booleans()),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = draw(st.integers(0, 9))
    step = draw(st.sampled_from([0.0, 1.0, 0.01]))
    shape = (tokens, config.num_experts)
    logits = torch.randint(-3, 4, shape, generator=generator) * step
    bias = torch.randint(-2, 3, (config.num_experts,), generator=generator) * 0.25
    return config, logits, bias if config.expert_bias else None


def exact_scores(logits, scoring):
    """The scores by their definitions, in float64."""
    return {
        "softmax": lambda v: torch.exp(v) / torch.exp(v).sum(-1, keepdim=True),
        "sigmoid": lambda v: 1 / (1 + torch.exp(-v)),
        "sqrtsoftplus": lambda v: torch.sqrt(torch.log1p(torch.exp(v))),
    }[scoring](logits.double())


def naive_route(logits, config, bias):
    """One token at a time, with Python's sort: [(id, weight)] in selection order."""
    scores = exact_scores(logits, config.scoring)
    # Near-ties are decided by the fp32 scores; they have a test of their own.
    selection = router_scores(logits, config.scoring)
    if bias is not None:
        selection = selection + bias
    selection = selection.tolist()
    size = config.num_experts // config.n_group
    group_scores = []
    for group in range(config.n_group):
        members = sorted(selection[group * size : (group + 1) * size], reverse=True)
        best = members[:2] if bias is not None else members[:1]
        group_scores.append(torch.tensor(best).sum().item())
    groups = sorted(range(config.n_group), key=lambda g: (-group_scores[g], g))
    groups = set(groups[: config.topk_group])
    eligible = [e for e in range(config.num_experts) if e // size in groups]
    chosen = sorted(eligible, key=lambda e: (-selection[e], e))[: config.top_k]
    weights = [scores[e].item() for e in chosen]
    total = sum(weights) if config.norm_topk_prob else 1.0
    return [
        (e, w / total * config.routed_scaling_factor) for e, w in zip(chosen, weights, strict=True)
    ]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores(scoring):
    logits = torch.randn(500, 7, generator=torch.Generator().manual_seed(1)) * 5
    scores = router_scores(logits, scoring)
    assert scores.dtype == torch.float32
    expected = exact_scores(logits, scoring)
    # The difference of two logits, up to 40, is rounded before exp: 40 * 2**-24 = 2.4e-6.
    torch.testing.assert_close(scores.double(), expected, rtol=4e-6, atol=0)


@_SETTINGS
@hypothesis.given(router_cases())
def test_route_matches_naive_rule(case):
    config, logits, bias = case
    topk_idx, topk_weight = route(logits, config, bias)
    assert topk_idx.dtype == torch.int64 and topk_weight.dtype == torch.float32
    assert topk_idx.shape == topk_weight.shape == (logits.shape[0], config.top_k)
    for token in range(logits.shape[0]):
        expected = naive_route(logits[token], config, bias)
        assert topk_idx[token].tolist() == [e for e, _ in expected]
        torch.testing.assert_close(
            topk_weight[token].double(),
            torch.tensor([w for _, w in expected], dtype=torch.float64),
            rtol=2e-6,
            atol=1e-12,
        )


@_SETTINGS
@hypothesis.given(router_cases())
def test_routes_of_a_token_do_not_depend_on_the_batch(case):
    config, logits, bias = case
    whole = route(logits, config, bias)
    for token in range(logits.shape[0]):
        alone = route(logits[token : token + 1], config, bias)
        assert torch.equal(alone.topk_idx[0], whole.topk_idx[token])
        assert torch.equal(alone.topk_weight[0], whole.topk_weight[token])


@_SETTINGS
@hypothesis.given(router_cases())
def test_weight_gradient_is_that_of_the_selected_scores(case):
    config, logits, bias = case
    logits = logits.double().requires_grad_()
    direction = torch.linspace(0.5, 1.5, config.top_k, dtype=torch.float64)
    topk_idx, topk_weight = route(logits.float(), config, bias)
    (topk_weight * direction).sum().backward()
    actual, logits.grad = logits.grad, None

    scores = {
        "softmax": lambda v: torch.softmax(v, -1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda v: torch.nn.functional.softplus(v).sqrt(),
    }[config.scoring](logits)
    weights = scores.gather(-1, topk_idx)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    (weights * direction * config.routed_scaling_factor).sum().backward()
    # Differences of fp32 numbers up to 1.5 * 2.5: a few of their roundings remain.
    torch.testing.assert_close(actual, logits.grad, rtol=1e-5, atol=2e-6)


def test_group_score_with_bias_is_the_sum_of_the_two_best():
    # Group 0 has the best expert, group 1 the best pair: DeepSeek-V3 visits group 1.
    config = RouterConfig(4, 2, "sigmoid", n_group=2, topk_group=1)
    logits = torch.tensor([[2.0, -4.0, 1.0, 1.0]])
    assert route(logits, config, torch.zeros(4)).topk_idx.tolist() == [[2, 3]]
    # Without expert bias (DeepSeek-V2) the best single expert decides.
    config = RouterConfig(4, 2, "softmax", n_group=2, topk_group=1)
    assert route(logits, config).topk_idx.tolist() == [[0, 1]]


def test_bias_moves_the_selection_and_not_the_weights():
    config = RouterConfig(3, 1, "sigmoid", norm_topk_prob=False)
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    topk_idx, topk_weight = route(logits, config, torch.tensor([0.0, 0.0, 5.0]))
    assert topk_idx.tolist() == [[2]]
    torch.testing.assert_close(topk_weight, torch.sigmoid(torch.tensor([[-1.0]])))


@_SETTINGS
@hypothesis.given(
    st.lists(
        st.sampled_from([-math.inf, -2.5, -1e-40, 0.0, 1e-40, 1.0, 3e38, math.inf]),
        min_size=1,
        max_size=40,
    ),
    st.data(),
)
def test_topk_orders_floats_and_breaks_ties_by_id(values, data):
    k = data.draw(st.integers(1, len(values)))
    # fp32 first: 1e-40 is subnormal there, and must not be taken for 0.
    scores = torch.tensor([values], dtype=torch.float32)
    expected = sorted(range(len(values)), key=lambda i: (-scores[0, i].item(), i))[:k]
    assert topk_lowest_id_first(scores, k).tolist() == [expected]


def test_nan_score_is_selected_and_visible():
    config = RouterConfig(4, 1, "sigmoid")
    logits = torch.tensor([[0.0, math.nan, 9.0, 1.0]])
    topk_idx, topk_weight = route(logits, config, torch.zeros(4))
    assert topk_idx.tolist() == [[1]] and topk_weight.isnan().all()


def test_sigmoid_bits_do_not_depend_on_the_position():
    logits = torch.randn(20011, generator=torch.Generator().manual_seed(1)) * 4
    whole = position_independent_sigmoid(logits)
    for offset in range(1, 18):
        assert torch.equal(position_independent_sigmoid(logits[offset:].clone()), whole[offset:])
    alone = torch.cat([position_independent_sigmoid(v.clone()) for v in logits[:2000].split(1)])
    assert torch.equal(alone, whole[:2000])


@_SETTINGS
@hypothesis.given(st.lists(st.integers(-1, 6), max_size=60))
def test_count_routes(ids):
    load = count_routes(torch.tensor(ids, dtype=torch.int64).reshape(-1, 1), 7)
    assert load.dtype == torch.int64
    assert load.tolist() == [ids.count(expert) for expert in range(7)]


def test_update_expert_bias_moves_towards_balance():
    router = Router(8, RouterConfig(4, 2, "sigmoid"))
    router.update_expert_bias(torch.tensor([10, 2, 6, 6]), rate=0.5)
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    router.update_expert_bias(torch.tensor([6, 6, 5, 7]), rate=0.25)
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.25, -0.25]


def test_update_expert_bias_rejects_wrong_use():
    with pytest.raises(RuntimeError, match="no expert bias"):
        Router(8, RouterConfig(4, 2)).update_expert_bias(torch.zeros(4))
    with pytest.raises(ValueError, match=r"load: expected shape \[E\] = \[4\], got \[3\]"):
        Router(8, RouterConfig(4, 2, "sigmoid")).update_expert_bias(torch.zeros(3))


def test_expert_bias_stays_fp32():
    router = Router(8, RouterConfig(4, 2, "sigmoid"))
    router.expert_bias.fill_(1.001)
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias.dtype == torch.float32
    assert router.expert_bias[0] == torch.tensor(1.001)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_experts": 0}, ValueError, "num_experts: expected 1 to .*, got 0"),
        ({"top_k": 0}, ValueError, "top_k: expected 1 to .*, got 0"),
        ({"top_k": 2.0}, TypeError, "top_k: expected an int, got float"),
        ({"top_k": True}, TypeError, "top_k: expected an int, got bool"),
        ({"top_k": 9}, ValueError, "at most the 8 experts .* got 9"),
        ({"scoring": "tanh"}, ValueError, "scoring: expected one of .* got 'tanh'"),
        ({"n_group": 3}, ValueError, "num_experts: expected a multiple of n_group = 3, got 8"),
        ({"n_group": 2, "topk_group": 3}, ValueError, "topk_group: expected at most n_group = 2"),
        ({"n_group": 4, "top_k": 3}, ValueError, "at most the 2 experts .* got 3"),
        ({"routed_scaling_factor": math.inf}, ValueError, "expected a finite number .*, got inf"),
    ],
)
def test_config_rejects(changes, error, text):
    arguments = {"num_experts": 8, "top_k": 2, **changes}
    with pytest.raises(error, match=text):
        RouterConfig(**arguments)


def test_route_rejects():
    config = RouterConfig(4, 2, "sigmoid")
    logits, bias = torch.zeros(3, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"shape \[T, 4\], got \[3, 5\]"):
        route(torch.zeros(3, 5), config, bias)
    with pytest.raises(TypeError, match=r"torch\.float32, got torch\.float64"):
        route(logits.double(), config, bias)
    with pytest.raises(ValueError, match=r"expert_bias: expected a tensor .* got NoneType"):
        route(logits, config)
    with pytest.raises(ValueError, match=r"expert_bias: expected None .* got Tensor"):
        route(logits, RouterConfig(4, 2), bias)
    with pytest.raises(ValueError, match=r"expert_bias: expected shape \[4\], got \[5\]"):
        route(logits, config, torch.zeros(5))
