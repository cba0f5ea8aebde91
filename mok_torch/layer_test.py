"""MoELayer against the float64 reference, and what it promises about bits, ranks and gradients."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from mok_torch.fan_out import tree_sum
from mok_torch.full_state import full_state_dict, load_full_state_dict
from mok_torch.functional import MoKConfig, SharedExpert
from mok_torch.groups import InProcessGroup
from mok_torch.layer import MoELayer, expert_range
from mok_torch.reference import moe_reference, relative_error, worst_row_error
from mok_torch.self_test import run_on_ranks

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 64, 48, 5, 2


def make_layer(group=None, seed=1, std=0.1, **options):
    """A small layer; the same full layer for every group."""
    options = {"scoring": "sigmoid", "shared_intermediate_size": 40, **options}
    torch.manual_seed(seed)
    layer = MoELayer(HIDDEN, INTERMEDIATE, EXPERTS, TOPK, group=group, **options)
    layer.reset_parameters(std)
    return layer


def make_layers(size, **options):
    """One layer for each rank of an in-process group. Not from threads: they share one seed."""
    group = InProcessGroup(size)
    return [make_layer(group.member(rank), **options) for rank in range(size)]


def make_tokens(*shape, seed=2, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, HIDDEN, generator=generator) * scale).to(dtype)


def reference_layer(layer, x, topk_idx):
    """The layer in float64 from the layer's own parameters, with the routes it chose."""
    config = layer.router.config
    scores = router_scores_float64(x @ layer.router.weight.T, config.scoring)
    topk_weight = scores.gather(-1, topk_idx)
    if config.norm_topk_prob:
        topk_weight = topk_weight / topk_weight.sum(-1, keepdim=True)
    shared = layer.shared_expert
    if shared is not None:
        gate = shared.gate_weight
        scale = None if gate is None else torch.sigmoid(x @ gate.T).squeeze(-1)
        shared = SharedExpert(shared.w_gate, shared.w_up, shared.w_down, scale)
    experts = layer.experts
    return moe_reference(
        x,
        topk_idx,
        topk_weight * config.routed_scaling_factor,
        experts.w_gate,
        experts.w_up,
        experts.w_down,
        shared=shared,
        swiglu_limit=layer.swiglu_limit,
    )


def router_scores_float64(logits, scoring):
    if scoring == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)


@pytest.mark.parametrize("scale", [1.0, 0.02])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"scoring": "softmax", "norm_topk_prob": False},
        {"scoring": "sigmoid", "routed_scaling_factor": 2.5, "shared_gate": True},
        {"scoring": "sqrtsoftplus", "shared_intermediate_size": 0},
    ],
)
def test_forward_and_gradients_match_float64(options, dtype, scale):
    layer = make_layer(dtype=dtype, **options)
    x = make_tokens(3, 37, dtype=dtype, scale=scale).requires_grad_()
    out = layer(x)
    assert out.shape == x.shape and out.dtype == dtype
    d_out = make_tokens(3, 37, seed=3, dtype=dtype)
    out.backward(d_out)

    exact = copy.deepcopy(layer).double()
    exact_x = x.detach().double().reshape(-1, HIDDEN).requires_grad_()
    routes = layer.router(x.detach().reshape(-1, HIDDEN))
    expected = reference_layer(exact, exact_x, routes.topk_idx)
    exact.zero_grad()
    expected.backward(d_out.double().reshape(-1, HIDDEN))

    whole, row, router = (4e-3, 2e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5, 1e-5)
    tensors = {"out": (out, expected), "d_x": (x.grad, exact_x.grad)}
    exact_parameters = dict(exact.named_parameters())
    for name, parameter in layer.named_parameters():
        tensors[name] = (parameter.grad, exact_parameters[name].grad)
    for name, (actual, reference) in tensors.items():
        actual = actual.reshape(reference.shape)
        through_router_weights = name in ("router.weight", "shared_expert.gate_weight")
        limit = router if through_router_weights else whole
        assert relative_error(actual, reference) <= limit, name
        if not through_router_weights:
            assert worst_row_error(actual, reference) <= row, name


def run_ranks(tokens_per_rank, x, d_out, **options):
    """(outputs, d_x, expert gradients, summed replicated gradients) over several ranks."""
    begins = [sum(tokens_per_rank[:rank]) for rank in range(len(tokens_per_rank) + 1)]
    layers = make_layers(len(tokens_per_rank), **options)

    def work(_, rank):
        layer = layers[rank]
        own_x = x[begins[rank] : begins[rank + 1]].clone().requires_grad_()
        out = layer(own_x)
        out.backward(d_out[begins[rank] : begins[rank + 1]])
        experts = {n: p.grad for n, p in layer.experts.named_parameters()}
        replicated = [p.grad for p in layer.replicated_parameters()]
        return out.detach(), own_x.grad, experts, replicated, layer.global_expert_load()

    parts = run_on_ranks(work, len(tokens_per_rank))
    out, d_x = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    experts = {name: torch.cat([part[2][name] for part in parts]) for name in parts[0][2]}
    replicated = [tree_sum(gradients) for gradients in zip(*(p[3] for p in parts), strict=True)]
    loads = [part[4] for part in parts]
    assert all(torch.equal(load, loads[0]) for load in loads)
    return out, d_x, experts, replicated, loads[0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_ep_size_changes_no_bit(precision):
    x, d_out = make_tokens(45), make_tokens(45, seed=3)
    options = {"precision": precision, "shared_gate": True}
    expected = run_ranks((45,), x, d_out, **options)
    assert int(expected[4].sum()) == 45 * TOPK
    for split in ((20, 25), (5, 0, 40), (9, 9, 9, 18), (45, 0, 0, 0, 0, 0, 0, 0)):
        out, d_x, experts, replicated, load = run_ranks(split, x, d_out, **options)
        assert torch.equal(out, expected[0])
        assert torch.equal(d_x, expected[1])
        assert torch.equal(load, expected[4])
        for name, gradient in experts.items():
            assert torch.equal(gradient, expected[2][name]), name
        # Parts of a sum: only their rounding differs.
        for actual, reference in zip(replicated, expected[3], strict=True):
            assert relative_error(actual, reference) < (1e-6 if precision == "fp32" else 8e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gradient_blocks_make_replicated_gradients_independent_of_ep_size(precision):
    x, d_out = make_tokens(64), make_tokens(64, seed=3)
    options = {"precision": precision, "shared_gate": True, "gradient_block": 8}
    expected = run_ranks((64,), x, d_out, **options)
    for split in ((32, 32), (16, 16, 16, 16), (8,) * 8):
        actual = run_ranks(split, x, d_out, **options)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
        assert all(torch.equal(a, b) for a, b in zip(actual[3], expected[3], strict=True))


@pytest.mark.parametrize("shared_gate", [False, True])
def test_gradient_blocks_compute_the_same_layer(shared_gate):
    x, d_out = make_tokens(50), make_tokens(50, seed=3)
    layers = [make_layer(gradient_block=n, shared_gate=shared_gate) for n in (None, 8, 64)]
    results = [gradients_of(layer, x, d_out, lambda layer, x: layer(x)) for layer in layers]
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert relative_error(actual, expected) < 2e-6


@pytest.mark.parametrize("size", [2, 3, 8])
def test_full_state_dict_does_not_depend_on_ep_size(size):
    single = make_layer().full_state_dict()
    assert single["experts.w_gate"].shape == (EXPERTS, INTERMEDIATE, HIDDEN)
    layers = make_layers(size)
    for state in run_on_ranks(lambda _, rank: layers[rank].full_state_dict(), size):
        assert list(state) == list(single)
        assert all(torch.equal(state[name], single[name]) for name in single)


def test_full_state_dicts_of_different_layers_are_not_mixed():
    layers = make_layers(2)
    # Made before the threads, which share the generator that make_layer seeds.
    other, expected = make_layer(layers[1].group, seed=8), make_layer().experts.w_up

    def work(_, rank):
        with pytest.raises(ValueError, match="weight or bias on rank 1 is not that on rank 0"):
            (layers[0], other)[rank].full_state_dict()
        assert torch.equal(layers[rank].full_state_dict()["experts.w_up"], expected)

    run_on_ranks(work, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_full_state_dict_loads_on_any_number_of_ranks(size):
    source = make_layer(seed=7)
    source.router.expert_bias.uniform_()
    state = source.full_state_dict()
    x = make_tokens(12)
    expected = source(x).detach()
    layers = make_layers(size, seed=8)

    def work(_, rank):
        assert not layers[rank].load_full_state_dict(state).missing_keys
        return layers[rank](x if rank == 0 else x[:0])

    assert torch.equal(run_on_ranks(work, size)[0], expected)


def test_full_state_dict_of_a_model_has_prefixes():
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), make_layer())
    state = full_state_dict(model)
    assert list(state) == list(model.state_dict())
    other = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), make_layer(seed=9))
    load_full_state_dict(other, state)
    assert torch.equal(other[1].experts.w_up, model[1].experts.w_up)
    assert torch.equal(other[0].weight, model[0].weight)


def test_load_full_state_dict_rejects_a_share():
    state = make_layer().full_state_dict()
    state["experts.w_up"] = state["experts.w_up"][:2]
    with pytest.raises(ValueError, match=r"experts.w_up: expected all experts, \[5, 48, 64\], got"):
        make_layer().load_full_state_dict(state)
    del state["experts.w_up"]
    with pytest.raises(RuntimeError, match=r"Missing key.*experts\.w_up"):
        make_layer().load_full_state_dict(state)
    assert make_layer().load_full_state_dict(state, strict=False).missing_keys == ["experts.w_up"]


def gradients_of(layer, x, d_out, run):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = run(layer, x)
    out.backward(d_out)
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gradient_block", [None, 16])
def test_activation_checkpointing_changes_no_bit(use_reentrant, tied, gradient_block):
    layer = make_layer(shared_gate=True, precision="bf16", gradient_block=gradient_block)
    if tied:
        with torch.no_grad():  # all logits equal: only the rule for ties decides
            layer.router.weight.zero_()
    x, d_out = make_tokens(50), make_tokens(50, seed=3)
    plain = gradients_of(layer, x, d_out, lambda layer, x: layer(x))
    load = layer.expert_load.clone()
    if tied:
        assert load.tolist() == [50, 50, 0, 0, 0]

    def checkpointed(layer, x):
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    again = gradients_of(layer, x, d_out, checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert torch.equal(layer.expert_load, load)


def test_eval_and_no_grad_change_no_bit():
    layer = make_layer()
    x = make_tokens(19)
    trained = layer(x).detach()
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), trained)
    with torch.inference_mode():
        assert torch.equal(layer(x), trained)


@pytest.mark.parametrize("gradient_block", [None, 16])
def test_compiles_as_one_graph(gradient_block):
    layer = make_layer(shared_gate=True, gradient_block=gradient_block)
    x, d_out = make_tokens(4, 16), make_tokens(4, 16, seed=3)
    plain = gradients_of(layer, x, d_out, lambda layer, x: layer(x))
    load = layer.expert_load.clone()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = gradients_of(layer, x, d_out, lambda _, x: compiled(x))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert torch.equal(layer.expert_load, load)


@pytest.mark.parametrize("gradient_block", [None, 16])
def test_no_tokens(gradient_block):
    layer = make_layer(gradient_block=gradient_block, shared_gate=True)
    x = make_tokens(0).requires_grad_()
    out = layer(x)
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    assert x.grad.shape == (0, HIDDEN)
    assert all((p.grad == 0).all() for p in layer.parameters())
    assert layer.expert_load.tolist() == [0] * EXPERTS


def test_parameter_groups_partition_the_parameters():
    layer = make_layer(shared_gate=True)
    experts, replicated = set(layer.expert_parameters()), set(layer.replicated_parameters())
    assert experts | replicated == set(layer.parameters())
    assert not experts & replicated
    assert len(experts) == 3 and len(replicated) == 5


def test_bf16_precision_of_fp32_parameters_rounds_them():
    master = make_layer(precision="bf16")
    assert master.experts.w_up.dtype == torch.float32
    rounded = copy.deepcopy(master)
    with torch.no_grad():
        for parameter in (*rounded.experts.parameters(), *rounded.shared_expert.parameters()):
            parameter.copy_(parameter.bfloat16())
    x = make_tokens(9)
    assert torch.equal(master(x), rounded(x))
    assert master(x.bfloat16()).dtype == torch.bfloat16


def test_update_expert_bias_balances():
    layer = make_layer()
    x = make_tokens(64)
    layer(x)
    before = layer.expert_load.max()
    for _ in range(50):
        layer.update_expert_bias(0.02)
        layer(x)
    assert layer.expert_load.max() < before
    assert int(layer.expert_load.sum()) == 64 * TOPK


def test_more_tokens_than_reserved_raise_on_every_rank_and_reserve_helps():
    layers = make_layers(2)
    x = make_tokens(40)

    def work(_, rank):
        layer = layers[rank]
        small = layer(x[:8])
        with pytest.raises(ValueError, match="40"):
            layer(x if rank == 0 else x[:3])
        layer.reserve(40 if rank == 0 else 1)
        return small, layer(x if rank == 0 else x[:3])

    (small, large), _ = run_on_ranks(work, 2)
    assert torch.equal(small, large[:8])


@pytest.mark.parametrize("num_experts", [1, 5, 8, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_expert_range(num_experts, size):
    ranges = [expert_range(num_experts, size, rank) for rank in range(size)]
    assert ranges[0][0] == 0 and ranges[-1][1] == num_experts
    assert all(ranges[i][1] == ranges[i + 1][0] for i in range(size - 1))
    counts = [end - begin for begin, end in ranges]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"hidden_size": 12}, ValueError, "hidden_size: expected a multiple of 8, got 12"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size: expected 8 to .*, got 0"),
        ({"intermediate_size": 16.0}, TypeError, "intermediate_size: expected an int, got float"),
        ({"shared_intermediate_size": 4}, ValueError, "shared_intermediate_size: .* got 4"),
        ({"shared_gate": True}, ValueError, "shared_gate needs a shared expert"),
        ({"top_k": 9}, ValueError, "top_k: expected at most"),
        ({"dtype": torch.float16}, TypeError, r"dtype: expected .* got torch\.float16"),
        ({"precision": "fp8"}, ValueError, "precision: expected None or one of .* got 'fp8'"),
        ({"group": InProcessGroup(2)}, TypeError, "member"),
        ({"config": MoKConfig, "dtype": torch.bfloat16}, TypeError, "config: expected a MoKConfig"),
        ({"gradient_block": 0}, ValueError, "gradient_block: expected 1 to .*, got 0"),
        (
            {"gradient_block": 1.5},
            TypeError,
            "gradient_block: expected an int or None, got float: 1.5",
        ),
        ({"gradient_block": "a"}, TypeError, "gradient_block: expected an int or None, got str"),
        ({"swiglu_limit": 0.0}, ValueError, "swiglu_limit: expected .* got 0.0"),
        ({"swiglu_limit": "a"}, TypeError, "swiglu_limit: expected a number or None, got str"),
        ({"routed_scaling_factor": "x"}, TypeError, "scaling_factor: expected a number, got str"),
        ({"max_tokens_per_rank": -5}, ValueError, "max_tokens_per_rank: expected 0 to .*, got -5"),
        ({"max_tokens_per_rank": 1.5}, TypeError, "max_tokens_per_rank: expected an int"),
    ],
)
def test_constructor_rejects(options, error, text):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_experts": 4, "top_k": 2}
    with pytest.raises(error, match=text):
        MoELayer(**{**sizes, **options})


def test_forward_rejects():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"x: expected shape \[\.\.\., 64\], got \[3, 63\]"):
        layer(torch.zeros(3, 63))
    with pytest.raises(TypeError, match=r"x: expected torch\.bfloat16 or torch\.float32"):
        layer(torch.zeros(3, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match="x: expected device cpu or cuda, got meta"):
        layer.to("meta")(torch.zeros(3, 64, device="meta"))


@pytest.mark.parametrize("warm", [False, True])
def test_wrong_input_of_one_rank_raises_on_every_rank(warm):
    layers = make_layers(2)
    x = make_tokens(6)

    def work(_, rank):
        if warm:
            layers[rank](x)
        with pytest.raises(ValueError, match=r"x: expected shape .* got \[6, 63\]"):
            layers[rank](x[:, :63] if rank == 0 else x)
        return layers[rank](x)

    outputs = run_on_ranks(work, 2)
    assert torch.equal(*outputs)


def dual(x):
    return forward_ad.make_dual(x, torch.ones_like(x))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda x: [1], TypeError, "x: expected a torch.Tensor, got list"),
        (lambda x: None, TypeError, "x: expected a torch.Tensor, got NoneType"),
        (lambda x: x.to_sparse(), TypeError, "x: expected layout torch.strided, got torch.sparse"),
        (dual, NotImplementedError, "x: MoELayer has no forward-mode differentiation"),
    ],
)
def test_what_is_no_dense_tensor_on_one_rank_raises_on_every_rank(warm, wrong, error, text):
    layers = make_layers(2)
    x = make_tokens(6)

    def work(_, rank):
        layer = layers[rank]
        if warm:
            layer(x)
        with pytest.raises(error, match=text):
            layer(wrong(x) if rank == 0 else x)
        return layer(x)

    with forward_ad.dual_level():
        outputs = run_on_ranks(work, 2)
    assert torch.equal(*outputs)


class NoTextError(Exception):
    """Cannot be made from a text."""

    def __init__(self, a, b):
        super().__init__(a + b)


@pytest.mark.parametrize("warm", [False, True])
def test_failing_router_of_one_rank_raises_on_every_rank(warm):
    layers = make_layers(2)
    x = make_tokens(6)

    def fail(module, arguments):
        raise NoTextError("router ", "fails")

    def work(_, rank):
        layer = layers[rank]
        if warm:
            layer(x)
        hook = layer.router.register_forward_pre_hook(fail) if rank == 1 else None
        with pytest.raises(NoTextError if hook else RuntimeError, match="router fails"):
            layer(x)
        if hook:
            hook.remove()
        return layer(x)

    assert torch.equal(*run_on_ranks(work, 2))


@pytest.mark.parametrize("gradient_block", [None, 4])
@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 32), (32,), (2, 0, 32)])
def test_outputs_are_no_views(shape, gradient_block):
    """Hooks of wrappers on an output outlive its change in place."""
    layer = MoELayer(32, 16, 4, 2, shared_intermediate_size=8, gradient_block=gradient_block)
    out = layer(torch.randn(shape))
    assert out.shape == shape and not out._is_view()
    ran = []
    out.register_hook(ran.append)
    out += 1
    out.sum().backward()
    assert len(ran) == 1


def test_printing_names_rank_and_sizes():
    text = repr(make_layer(InProcessGroup(2).member(1)))
    assert "rank=1 of 2" in text and "experts=3..4" in text and "num_experts=5" in text


def test_export_with_any_number_of_tokens():
    layer = make_layer(None).eval()
    x, shapes = torch.randn(20, layer.hidden_size), ({0: torch.export.Dim("tokens")},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=shapes).module()
    for count in (20, 7):
        assert torch.equal(exported(x[:count]), layer(x[:count]))
