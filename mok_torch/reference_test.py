"""The yardstick itself: against a loop over tokens, and its gradients by finite differences."""

import types

import pytest
import torch
from torch.nn import functional as F

from mok_torch.reference import moe_reference, relative_error, swiglu_mlp, worst_row_error


def make_case(tokens=6, hidden=5, intermediate=4, experts=3, topk=2):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    topk_idx = torch.randint(-1, experts, (tokens, topk), generator=generator)
    shared = types.SimpleNamespace(
        w_gate=randn(3, hidden), w_up=randn(3, hidden), w_down=randn(hidden, 3), scale=randn(tokens)
    )
    weights = (
        randn(experts, intermediate, hidden),
        randn(experts, intermediate, hidden),
        randn(experts, hidden, intermediate),
    )
    return randn(tokens, hidden), topk_idx, randn(tokens, topk), weights, shared


@pytest.mark.parametrize("limit", [None, 0.5])
def test_matches_a_loop_over_tokens(limit):
    x, topk_idx, topk_weight, weights, shared = make_case()
    topk_idx[0] = torch.tensor([2, 2])
    topk_idx[1] = -1

    def expert_of(token, w_gate, w_up, w_down):
        gate, up = w_gate @ token, w_up @ token
        if limit is not None:
            gate = torch.minimum(gate, torch.tensor(limit))
            up = torch.maximum(torch.minimum(up, torch.tensor(limit)), torch.tensor(-limit))
        return w_down @ (F.silu(gate) * up)

    expected = []
    for t in range(x.shape[0]):
        out = shared.scale[t] * expert_of(x[t], shared.w_gate, shared.w_up, shared.w_down)
        for k in range(topk_idx.shape[1]):
            if topk_idx[t, k] >= 0:
                y = expert_of(x[t], *(w[topk_idx[t, k]] for w in weights))
                out = out + topk_weight[t, k] * y
        expected.append(out)
    actual = moe_reference(x, topk_idx, topk_weight, *weights, shared=shared, swiglu_limit=limit)
    torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences():
    x, topk_idx, topk_weight, weights, shared = make_case()
    topk_idx[0] = torch.tensor([1, 1])

    def layer(x, topk_weight, w_gate, w_up, w_down, *shared_tensors):
        shared = types.SimpleNamespace(
            **dict(zip(("w_gate", "w_up", "w_down", "scale"), shared_tensors, strict=True))
        )
        return moe_reference(
            x, topk_idx, topk_weight, w_gate, w_up, w_down, shared=shared, swiglu_limit=2.0
        )

    shared_tensors = (shared.w_gate, shared.w_up, shared.w_down, shared.scale)
    assert torch.autograd.gradcheck(layer, (x, topk_weight, *weights, *shared_tensors))


def test_no_route_has_no_gradient_even_with_nan_weight():
    x, topk_idx, topk_weight, weights, _ = make_case()
    topk_idx[:] = torch.tensor([1, -1])
    with torch.no_grad():
        topk_weight[:, 1] = float("nan")
    moe_reference(x, topk_idx, topk_weight, *weights).sum().backward()
    assert (topk_weight.grad[:, 1] == 0).all()
    assert x.grad.isfinite().all()
    for weight in weights:
        assert (weight.grad[0] == 0).all() and (weight.grad[2] == 0).all()


def test_shapes_and_dtypes():
    x, topk_idx, topk_weight, weights, _ = make_case()
    x = x.detach().bfloat16().reshape(2, 3, -1).requires_grad_()
    out = moe_reference(x, topk_idx.reshape(2, 3, -1), topk_weight, *weights)
    assert out.shape == x.shape and out.dtype == torch.float64
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    empty = moe_reference(x.new_zeros(0, 5), topk_idx[:0], topk_weight[:0], *weights)
    assert empty.shape == (0, 5)


def test_gradients_pass_on_the_edge_of_the_clamp():
    # torch.clamp's own gradient there is 1 or 0, by PyTorch's version.
    one = torch.ones(1, 1, dtype=torch.float64)
    for gate, up in ((0.5, 1.0), (0.5, -1.0), (1.0, 0.5), (-1.0, 0.5)):
        w_gate, w_up = torch.tensor([[gate]]), torch.tensor([[up]])
        weights = [w.double().requires_grad_() for w in (w_gate, w_up)]
        gradients = [
            torch.autograd.grad(swiglu_mlp(one, *weights, one, swiglu_limit=limit).sum(), weights)
            for limit in (1.0, None)
        ]
        assert gradients[0] == gradients[1]


def test_storage_rounding_decides_the_clamp():
    # 1.001 rounds to 1.0 in bf16, which the clamp at 1 lets through: the gradient passes.
    x = torch.tensor([[1.001]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    swiglu_mlp(x, one, 0 * one + 0.5, one, swiglu_limit=1.0).backward()
    unrounded = x.grad.item()
    x.grad = None
    swiglu_mlp(
        x, one, 0 * one + 0.5, one, swiglu_limit=1.0, storage_dtype=torch.bfloat16
    ).backward()
    assert abs(unrounded) < abs(x.grad.item())


def test_errors():
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.ones(3), torch.zeros(3)) == float("inf")
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert worst_row_error(expected, expected) == 0
    assert worst_row_error(expected + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), expected) == 0.2
    assert worst_row_error(expected + 1, expected) == float("inf")
    nan = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]])
    assert worst_row_error(nan, expected) != worst_row_error(nan, expected)
    assert worst_row_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
