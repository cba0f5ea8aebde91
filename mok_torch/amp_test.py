"""torch.amp: what autocast does to tokens, routers and weights; docs/training.md has the rules."""

import pytest
import torch

from mok_torch import MoELayer, functional, ops
from mok_torch.functional import SharedExpert, moe
from mok_torch.self_test import Case
from mok_torch.test_support import routed_batch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASE = Case("amp", (60,), hidden=64, intermediate=40, experts=5, shared=24, scaled_shared=True)


def autocast(dtype=BF16):
    return torch.autocast("cpu", dtype=dtype)


def leaves(dtype=FP32):
    """moe's arguments: (x, idx, router weights, gate, up, down), the shared expert, all leaves."""
    batch = routed_batch(CASE, dtype)
    x, weight, *others = (
        t.detach().requires_grad_()
        for t in (batch.x, batch.topk_weight, *batch.weights, *batch.shared)
    )
    return (x, batch.topk_idx, weight, *others[:3]), SharedExpert(*others[3:]), [x, weight, *others]


def gradients(out, inputs):
    generator = torch.Generator().manual_seed(0)
    d_out = torch.randn(out.shape, generator=generator).to(out.dtype)
    return torch.autograd.grad(out, inputs, d_out)


def make_layer(**options) -> MoELayer:
    torch.manual_seed(1)
    return MoELayer(64, 40, 6, 2, shared_intermediate_size=24, shared_gate=True, **options)


def tokens(dtype=FP32) -> torch.Tensor:
    return torch.randn(50, 64, generator=torch.Generator().manual_seed(2)).to(dtype)


def layer_results(layer, x):
    x = x.detach().requires_grad_()
    out = layer(x)
    return [out, *gradients(out, [x, *layer.parameters()])]


def test_moe_computes_in_the_autocast_dtype_and_returns_gradients_in_the_leaves():
    arguments, shared, inputs = leaves()
    with autocast():
        out = moe(*arguments, shared=shared)
    assert out.dtype == BF16
    actual = gradients(out, inputs)
    assert [grad.dtype for grad in actual] == [FP32] * len(inputs)
    # As if the caller had cast tokens and weights; router weights and the shared scale stay fp32.
    x, idx, weight, *weights = arguments
    rounded = SharedExpert(*(w.to(BF16) for w in shared[:3]), shared.scale)
    expected_out = moe(x.to(BF16), idx, weight, *(w.to(BF16) for w in weights), shared=rounded)
    assert torch.equal(out, expected_out)
    assert all(map(torch.equal, actual, gradients(expected_out, inputs)))


def test_moe_runs_its_backward_inside_and_outside_of_autocast_alike():
    arguments, shared, inputs = leaves()
    with autocast():
        out = moe(*arguments, shared=shared)
        inside = gradients(out, inputs)
        out = moe(*arguments, shared=shared)
    assert all(map(torch.equal, inside, gradients(out, inputs)))


def test_moe_refuses_float16():
    arguments, shared, _ = leaves()
    with autocast(FP16), pytest.raises(TypeError, match=r"x: expected .*, got torch\.float16"):
        moe(*arguments, shared=shared)


@pytest.mark.parametrize("autocast_dtype", [BF16, FP16])
@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_layer_has_a_precision_of_its_own(precision, x_dtype, autocast_dtype):
    """No bit changes, and out has x's dtype: neither are the weights cast nor the tokens."""
    layer = make_layer(precision=precision)
    expected = layer_results(layer, tokens(x_dtype))
    with autocast(autocast_dtype):
        actual = layer_results(layer, tokens(x_dtype))
    assert actual[0].dtype == x_dtype
    assert all(grad.dtype == FP32 for grad in actual[2:])  # the parameters'
    assert all(map(torch.equal, actual, expected))


def test_a_layer_after_an_autocast_layer_gets_and_returns_bf16():
    layer, dense = make_layer(precision="bf16"), torch.nn.Linear(64, 64)
    with autocast():
        out = layer(dense(tokens()))
    assert out.dtype == BF16
    with autocast(FP16), pytest.raises(TypeError, match=r"x: expected .*, got torch\.float16"):
        layer(dense(tokens()))


def test_the_router_is_fp32_under_autocast():
    layer, x = make_layer(scoring="sigmoid"), tokens()
    expected = layer.router(x)
    with autocast():
        assert ops.router_logits(x, layer.router.weight).dtype == FP32
        actual = layer.router(x)
    assert actual.topk_weight.dtype == FP32
    assert all(map(torch.equal, actual, expected))


def test_the_explicit_calls_do_not_see_autocast():
    arguments, shared, _ = leaves()
    x, idx, weight, *weights = (t.detach() for t in arguments)
    workspace = functional.create_workspace(num_local_tokens=60, hidden_size=64, topk=2, dtype=FP32)
    shared = [t.detach() for t in shared]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            schedule = functional.build_schedule(workspace, None, idx, num_local_experts=5)
            call = (x, weight, *shared[:3], *weights)
            out, context = functional.forward(
                None, workspace, schedule, *call, shared_scale=shared[3]
            )
            grads = functional.backward(
                None, workspace, schedule, context, out, *call, shared_scale=shared[3]
            )
        assert out.dtype == FP32
        results.append([out, *grads])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_loss_scale_of_a_power_of_two_changes_no_mantissa(precision):
    """GradScaler is not needed with bf16; where a model has one, its scale passes through."""
    layer, x = make_layer(precision=precision), tokens().requires_grad_()
    inputs = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x).square().sum(), inputs)
    scaled = torch.autograd.grad(layer(x).square().sum() * 1024, inputs)
    for one, other in zip(plain, scaled, strict=True):
        assert torch.equal(one * 1024, other)
