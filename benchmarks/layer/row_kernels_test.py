"""The plain forms of the row kernels; on a GPU the Triton forms run the same tests."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.layer.row_kernels import combine_rows, gather_rows, swiglu, swiglu_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 1100  # more than one block of columns, and not a whole number of them


def draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE)


def test_gather():
    source = draw(9, WIDTH)
    index = torch.tensor([3, 3, 0, 8], device=DEVICE)
    assert torch.equal(gather_rows(source, index), source[index])
    assert gather_rows(source, index[:0]).shape == (0, WIDTH)


@pytest.mark.parametrize("with_base", [False, True])
def test_combine_adds_the_rows_of_each_token(with_base):
    rows, base = draw(7, WIDTH), draw(3, WIDTH) if with_base else None
    index = torch.tensor([[0, 6], [-1, 2], [-1, -1]], device=DEVICE)
    start = torch.zeros(3, WIDTH, device=DEVICE) if base is None else base
    expected = start + torch.stack([rows[0] + rows[6], rows[2], torch.zeros_like(rows[0])])
    torch.testing.assert_close(combine_rows(rows, index, base), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_and_its_gradients(weighted):
    gate_up = draw(5, 2 * WIDTH).requires_grad_()
    weight = torch.rand(5, device=DEVICE).requires_grad_() if weighted else None
    gate, up = gate_up.chunk(2, dim=1)
    expected = F.silu(gate) * up * (1 if weight is None else weight.unsqueeze(1))
    d_h = draw(5, WIDTH)
    expected.backward(d_h)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(gate_up, weight), expected)
        d_gate_up, h, d_weight = swiglu_backward(d_h, gate_up, weight)
    torch.testing.assert_close(d_gate_up, gate_up.grad)
    torch.testing.assert_close(h, expected.detach())
    if weight is None:
        assert d_weight is None
    else:
        torch.testing.assert_close(d_weight, weight.grad, rtol=1e-4, atol=1e-3)
