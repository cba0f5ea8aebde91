"""functional.moe as PyTorch sees it: operators, compilation, checkpointing, lifetimes."""

import dataclasses
import functools
import gc
import random
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from mok_torch import MoELayer, custom_ops, ops
from mok_torch.functional import MoKConfig, SharedExpert, create_workspace, moe
from mok_torch.plan import make_plan
from mok_torch.self_test import Case, run_on_ranks
from mok_torch.test_support import routed_batch

CASE = Case(
    "autograd", (150,), hidden=64, intermediate=40, experts=5, shared=24, scaled_shared=True
)
SMALL_RING = MoKConfig(macrobatch_size=128, minibatch_size=128)


def make_leaves(case=CASE, dtype=torch.bfloat16, seed=0):
    """(arguments of moe, leaves that require gradients)."""
    batch = routed_batch(dataclasses.replace(case, seed=seed), dtype)
    weights = batch.weights
    arguments = (batch.x, batch.topk_idx, batch.topk_weight, *weights)
    return arguments, {"shared": batch.shared}, list(batch.leaves().values()), batch.d_out


def forward_and_gradients(function, leaves, d_out):
    for leaf in leaves:
        leaf.grad = None
    out = function()
    out.backward(d_out)
    return [out.detach()] + [leaf.grad for leaf in leaves]


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def operator_arguments(arguments, shared, config):
    x, topk_idx, *_, w_down = arguments
    tokens, topk = x.numel() // x.shape[-1], topk_idx.shape[-1]
    plan = make_plan(config, 1, tokens, topk, w_down.shape[0])
    shared = (None,) * 4 if shared is None else tuple(shared)
    return (*arguments, *shared, 0, list(plan), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [150, 1, 0])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("config", [MoKConfig(), SMALL_RING], ids=["default", "small ring"])
def test_opcheck_forward(dtype, tokens, has_shared, config):
    arguments, options, *_ = make_leaves(dataclasses.replace(CASE, tokens=(tokens,)), dtype)
    shared = options["shared"] if has_shared else None
    torch.library.opcheck(custom_ops.moe_forward, operator_arguments(arguments, shared, config))


@pytest.mark.parametrize("needed", [[True] * 6, [True, False] * 3])
@pytest.mark.parametrize("config", [MoKConfig(), SMALL_RING], ids=["default", "small ring"])
def test_opcheck_backward(needed, config):
    arguments, options, _, d_out = make_leaves()
    inputs = operator_arguments(arguments, options["shared"], config)
    with torch.no_grad():
        _, *saved = custom_ops.moe_forward(*inputs)
    tensors = [tensor.detach() for tensor in (*arguments[:1], *arguments[2:], *options["shared"])]
    torch.library.opcheck(custom_ops.moe_backward, (d_out, *tensors, *saved, *inputs[-3:], needed))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_gradients(backend):
    arguments, options, leaves, d_out = make_leaves()
    x, *others = arguments

    def function(x):
        return moe(x * 1.5, *others, **options, config=SMALL_RING, swiglu_limit=2.0) + 1

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = forward_and_gradients(lambda: function(x), leaves, d_out)
    assert_equal(forward_and_gradients(lambda: compiled(x), leaves, d_out), expected)


def test_compiled_with_dynamic_shapes():
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 150, 2, 300):
        arguments, options, leaves, d_out = make_leaves(dataclasses.replace(CASE, tokens=(tokens,)))
        results = [
            forward_and_gradients(functools.partial(function, *arguments, **options), leaves, d_out)
            for function in (compiled, moe)
        ]
        assert_equal(*results)


def test_compiled_on_two_ranks():
    """The graph is traced once per rank; the ranks' different token counts meet at run time."""

    def rank_function(member, rank):
        config = MoKConfig(timeout_seconds=20)
        workspace = create_workspace(config, member, num_local_tokens=20, hidden_size=64, topk=2)
        case = dataclasses.replace(CASE, tokens=(9 + rank,), experts=4)
        (x, idx, weight, *weights), _, leaves, d_out = make_leaves(case)
        weights = [w[2 * rank : 2 * rank + 2] for w in weights]

        def function(x):
            return moe(x, idx, weight, *weights, workspace=workspace)

        expected = forward_and_gradients(lambda: function(x), leaves[:2], d_out)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        return expected, forward_and_gradients(lambda: compiled(x), leaves[:2], d_out)

    for expected, actual in run_on_ranks(rank_function, 2):
        assert_equal(actual, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("config", [MoKConfig(), SMALL_RING], ids=["default", "small ring"])
def test_activation_checkpointing(use_reentrant, config):
    """Routes with ties included: a recomputed forward must route alike."""
    arguments, options, leaves, d_out = make_leaves()
    x, _, _, *weights = arguments
    router = torch.zeros(5, 64)  # all logits are tied

    def block(x):
        probabilities = torch.softmax(x.float() @ router.T, -1)
        topk_weight, topk_idx = probabilities.topk(2)
        out = moe(x, topk_idx, topk_weight, *weights, **options, config=config)
        return moe(torch.tanh(out), topk_idx, topk_weight, *weights, **options, config=config)

    leaves = [leaf for leaf in leaves if leaf is not arguments[2]]
    expected = forward_and_gradients(lambda: block(x), leaves, d_out)
    actual = forward_and_gradients(
        lambda: checkpoint(block, x, use_reentrant=use_reentrant), leaves, d_out
    )
    assert_equal(actual, expected)


def test_live_forwards_in_any_backward_order():
    """Several layers share a workspace; their backwards come in any order, some twice."""
    workspace = create_workspace(None, None, num_local_tokens=150, hidden_size=64, topk=2)
    runs, expected = [], []
    for seed in range(5):
        config = SMALL_RING if seed % 2 else MoKConfig()
        arguments, options, leaves, d_out = make_leaves(seed=seed)
        options = options | {"workspace": workspace, "config": config}
        call = functools.partial(moe, *arguments, **options)
        expected.append(forward_and_gradients(call, leaves, d_out))
        workspace.poison()
        runs.append((call(), leaves, d_out))
    order = [*range(5), *range(5)]
    random.Random(0).shuffle(order)
    for index in order:
        out, leaves, d_out = runs[index]
        gradients = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        workspace.poison()
        assert_equal([out.detach(), *gradients], expected[index])


def test_saved_tensors_can_be_moved():
    """What autograd holds are ordinary tensors: offloading hooks may copy them."""
    arguments, options, leaves, d_out = make_leaves()
    expected = forward_and_gradients(lambda: moe(*arguments, **options), leaves, d_out)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().clone(), lambda tensor: tensor
    )
    with hooks:
        out = moe(*arguments, **options)
    assert_equal([out.detach(), *torch.autograd.grad(out, leaves, d_out)], expected)


def test_memory_is_released_with_the_graph():
    arguments, options, *_ = make_leaves()
    storages = []

    def note(tensor):
        storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = moe(*arguments, **options)
    persistent = {leaf.untyped_storage().data_ptr() for leaf in (*arguments, *options["shared"])}
    held = [s for s in (ref() for ref in storages) if s and s.data_ptr() not in persistent]
    assert held, "the ring is saved"
    addresses = [weakref.ref(storage) for storage in held]
    del held, out
    gc.collect()
    assert not any(ref() for ref in addresses)


def test_the_graph_keeps_its_workspace():
    arguments, options, leaves, d_out = make_leaves()
    workspace = create_workspace(None, None, num_local_tokens=150, hidden_size=64, topk=2)
    out = moe(*arguments, **options, workspace=workspace)
    reference = weakref.ref(workspace)
    del workspace
    gc.collect()
    out.backward(d_out)
    assert leaves[0].grad is not None
    del out
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("wanted", range(9))
def test_single_gradients(wanted):
    """Each input may be the only one that needs a gradient."""
    arguments, options, leaves, d_out = make_leaves()
    expected = forward_and_gradients(lambda: moe(*arguments, **options), leaves, d_out)
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index == wanted)
    out = moe(*arguments, **options)
    assert torch.equal(torch.autograd.grad(out, leaves[wanted], d_out)[0], expected[1 + wanted])


def test_no_gradients():
    arguments, options, *_ = make_leaves()
    with torch.no_grad():
        assert not moe(*arguments, **options).requires_grad
    with torch.inference_mode():
        moe(*arguments, **options)


def test_unused_output_has_no_gradient():
    arguments, options, leaves, _ = make_leaves()
    out = moe(*arguments, **options)
    (leaves[0].sum() + 0 * out.detach().sum()).backward()
    assert leaves[3].grad is None


def test_double_backward_is_refused():
    arguments, options, leaves, d_out = make_leaves()
    out = moe(*arguments, **options)
    (d_x,) = torch.autograd.grad(out, leaves[0], d_out, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        d_x.float().sum().backward()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_mode_is_refused(requires_grad):
    (x, *others), options, *_ = make_leaves()
    x = x.detach().requires_grad_(requires_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="x: moe has no forward-mode"):
            moe(dual, *others, **options)
    with pytest.raises(NotImplementedError, match=r"moe: torch\.func's forward-mode"):
        weight = others[1].detach()
        torch.func.jvp(
            lambda w: moe(x, others[0], w, *others[2:]), (weight,), (torch.ones_like(weight),)
        )


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (torch.func.grad, "torch.func's gradients"),
        (torch.func.jacrev, "torch.func's gradients"),
        (torch.func.jacfwd, "torch.func's forward-mode|torch.vmap"),
        (torch.vmap, "torch.vmap is not supported"),
    ],
)
def test_function_transforms_are_refused(transform, text):
    (x, *others), *_ = make_leaves(dtype=torch.float32)
    layer = MoELayer(x.shape[-1], 16, 4, 2)
    functions = {
        "moe": lambda x: moe(x, *others).sum(),
        "MoELayer": layer,
        "router_logits": lambda x: ops.router_logits(x, layer.router.weight).sum(),
    }
    for name, function in functions.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: ({text})"):
            transform(function)(x.detach())


def test_traces_with_fixed_sizes_are_refused():
    (x, *others), *_ = make_leaves(dtype=torch.float32)
    layer = MoELayer(x.shape[-1], 16, 4, 2)
    for function, name in ((lambda x: moe(x, *others), "moe"), (layer, "MoELayer")):
        with pytest.raises(NotImplementedError, match=f"{name}: torch.jit.trace"):
            torch.jit.trace(function, (x.detach(),))


def test_shared_expert_is_a_plain_tuple():
    arguments, options, *_ = make_leaves()
    shared = options["shared"]
    assert torch.equal(
        moe(*arguments, shared=tuple(shared)[:3]), moe(*arguments, shared=SharedExpert(*shared[:3]))
    )


def constant_operator_arguments():
    arguments, options, _, d_out = make_leaves()
    inputs = operator_arguments(arguments, options["shared"], MoKConfig())
    return [v.detach() if isinstance(v, torch.Tensor) else v for v in inputs], d_out


@pytest.mark.parametrize("operator", [torch.ops.mok.moe_forward, custom_ops.moe_forward])
@pytest.mark.parametrize("index, name", [(0, "x"), (2, "topk_weight"), (7, "shared_w_up")])
def test_the_operators_refuse_forward_mode(operator, index, name):
    inputs, _ = constant_operator_arguments()
    with forward_ad.dual_level():
        inputs[index] = forward_ad.make_dual(inputs[index], torch.ones_like(inputs[index]))
        with pytest.raises(NotImplementedError, match=f"{name}: moe_forward has no forward-mode"):
            operator(*inputs)
        inputs[index] = inputs[index].requires_grad_()
        with pytest.raises(NotImplementedError):
            operator(*inputs)


def test_compiled_functions_refuse_forward_mode():
    (x, *others), options, *_ = make_leaves()
    x = x.detach()
    compiled = torch.compile(lambda x: moe(x, *others, **options), backend="aot_eager")
    compiled(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward"):
            compiled(dual)


def test_the_backward_operator_checks_what_autograd_saved():
    inputs, d_out = constant_operator_arguments()
    _, words, *ring = custom_ops.moe_forward(*inputs)
    tensors = [inputs[0], *inputs[2:10]]

    def backward(words, ring, d_out=d_out):
        return custom_ops.moe_backward(d_out, *tensors, words, *ring, *inputs[10:], [True] * 6)

    backward(words, ring)
    with pytest.raises(TypeError, match=r"ring_gate: expected torch.bfloat16"):
        backward(words, [ring[0], ring[1].to(torch.float8_e4m3fn), *ring[2:]])
    with pytest.raises(ValueError, match="ring_x: expected shape"):
        backward(words, [ring[0][1:], *ring[1:]])
    with pytest.raises(TypeError, match=r"schedule_words: expected torch.int32"):
        backward(words.float(), ring)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(d_out, torch.ones_like(d_out))
        with pytest.raises(NotImplementedError, match="d_out: moe_backward has no forward-mode"):
            backward(words, ring, dual)
