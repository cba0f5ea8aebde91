"""Sums in a tree."""

import pytest
import torch

from mok_torch.fan_out import fan_out, tree_sum


@pytest.mark.parametrize("count", range(1, 10))
def test_tree_sum_adds_everything(count):
    terms = [torch.tensor(2**i) for i in range(count)]
    assert tree_sum(terms) == 2**count - 1


def test_tree_sum_of_equal_parts_has_the_bits_of_the_whole():
    terms = list(torch.randn(8, 1000, generator=torch.Generator().manual_seed(1)))
    whole = tree_sum(terms)
    for parts in (2, 4, 8):
        size = 8 // parts
        sums = [tree_sum(terms[i * size : (i + 1) * size]) for i in range(parts)]
        assert torch.equal(tree_sum(sums), whole)
    assert not torch.equal(sum(terms), whole)  # the order does matter


def test_fan_out_adds_gradients_in_a_tree():
    tensor = torch.zeros(1000, requires_grad=True)
    gradients = list(torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)))
    copies = fan_out(tensor, 6)
    # The last copy is not used; the others are used in another order than the tuple's.
    sum((copies[i] * gradients[i]).sum() for i in (3, 1, 4, 0, 2)).backward()
    assert torch.equal(tensor.grad, tree_sum(gradients))


def test_fan_out_rounds_once():
    tensor = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    copies = fan_out(tensor, 3)
    (copies[0] * 256 + copies[1] + copies[2]).sum().backward()
    assert tensor.grad == 258  # bf16 alone: 256 + 1 rounds to 256, twice
