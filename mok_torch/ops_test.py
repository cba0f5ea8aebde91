"""The router's linear layer: exact enough, batch-invariant, differentiable."""

import pytest
import torch
from torch.autograd import forward_ad

from mok_torch import ops
from mok_torch.reference import relative_error


def make(tokens=70, hidden=104, experts=9, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(experts, hidden, generator=generator).to(dtype).requires_grad_()
    return x, weight


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [1, 9, 256])
def test_matches_float64(x_dtype, experts):
    x, weight = make(experts=experts)
    x = x.detach().to(x_dtype).requires_grad_()
    logits = ops.router_logits(x, weight)
    assert logits.dtype == torch.float32
    d_logits = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    logits.backward(d_logits)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = x64 @ weight64.T
    expected.backward(d_logits.double())
    assert relative_error(logits.detach(), expected.detach()) < 1e-6
    assert relative_error(weight.grad, weight64.grad) < 1e-6
    assert x.grad.dtype == x_dtype
    assert relative_error(x.grad, x64.grad) < (1e-6 if x_dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_of_a_token_do_not_depend_on_the_others(threads):
    x, weight = make(tokens=300)
    d_logits = torch.randn(300, 9, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = ops.router_logits(x, weight)
        (d_x,) = torch.autograd.grad(logits, x, d_logits)
        for begin, end in ((0, 1), (7, 8), (3, 40), (100, 300), (299, 300)):
            part = x[begin:end].detach().requires_grad_()
            part_logits = ops.router_logits(part, weight)
            assert torch.equal(part_logits, logits[begin:end])
            part_logits.backward(d_logits[begin:end])
            assert torch.equal(part.grad, d_x[begin:end])
    finally:
        torch.set_num_threads(before)


def test_shapes():
    x, weight = make(tokens=24)
    logits = ops.router_logits(x, weight)
    assert torch.equal(ops.router_logits(x.view(2, 3, 4, 104), weight).view(24, 9), logits)
    assert torch.equal(ops.router_logits(x[0], weight), logits[0])
    assert ops.router_logits(x[:0], weight).shape == (0, 9)
    assert torch.equal(ops.router_logits(x.T.contiguous().T, weight), logits)
    empty = x[:0].detach().requires_grad_()
    ops.router_logits(empty, weight).sum().backward()
    assert (weight.grad == 0).all()


def test_gradients_of_gradients():
    x, weight = (t.detach()[:5, :16].contiguous().double().requires_grad_() for t in make(5, 16, 5))

    def function(x, weight):
        return ops.router_logits(x.float(), weight.float()).double()

    options = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-3}
    assert torch.autograd.gradcheck(function, (x, weight), **options)
    assert torch.autograd.gradgradcheck(function, (x, weight), **options)


@pytest.mark.parametrize(
    "layout, shapes",
    [(0, ((7, 16), (5, 16))), (1, ((7, 16), (16, 5))), (2, ((16, 7), (16, 5)))],
)
def test_operator(layout, shapes):
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    torch.library.opcheck(torch.ops.mok.matmul.default, (a, b, layout))


def test_compiled():
    x, weight = make()
    compiled = torch.compile(ops.router_logits, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), ops.router_logits(x, weight))


def test_autocast_leaves_it_alone():
    x, weight = make()
    expected = ops.router_logits(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ops.router_logits(x, weight), expected)


def test_errors():
    x, weight = make()
    with pytest.raises(ValueError, match=r"x: expected shape \[..., H\] with weight's H = 104"):
        ops.router_logits(x[:, :8], weight)
    with pytest.raises(ValueError, match=r"weight: expected shape \[E, H\] with H >= 1, got"):
        ops.router_logits(x, weight[0])
    with pytest.raises(TypeError, match=r"x: expected a floating-point dtype, got torch.int64"):
        ops.router_logits(x.long(), weight)
    with pytest.raises(TypeError, match=r"weight: expected a torch.Tensor, got NoneType"):
        ops.router_logits(x, None)
    matmul = torch.ops.mok.matmul
    square = torch.ones(16, 16)
    with pytest.raises(TypeError, match=r"a: expected torch.float32, got torch.bfloat16"):
        matmul(square.bfloat16(), square.bfloat16(), 0)
    with pytest.raises(TypeError, match=r"b: expected torch.float32, got torch.float64"):
        matmul(square, square.double(), 0)
    with pytest.raises(ValueError, match=r"layout: expected 0 to 2, got 3"):
        matmul(square, square, 3)
    with pytest.raises(ValueError, match=r"b: expected two dimensions, got \[16\]"):
        matmul(square, square[0], 0)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="router_logits has no forward-mode"):
            ops.router_logits(dual, weight)
