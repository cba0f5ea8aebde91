"""lazy_zeros: what a caller may rely on, below and above each of its thresholds."""

import gc

import pytest
import torch

from mok_torch.lazy_memory import lazy_zeros

HUGE_PAGE = 1 << 21
# Bytes around a mapping's least size, around the least size with huge pages, and above a page.
SIZES = [0, 64, (1 << 18) - 64, 1 << 18, (1 << 20) - 64, 1 << 20, HUGE_PAGE, 5 * HUGE_PAGE // 2]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_is_zero_contiguous_and_owns_its_memory(num_bytes, dense):
    tensor = lazy_zeros((num_bytes // 32, 16), torch.bfloat16, dense)
    assert tensor.shape == (num_bytes // 32, 16) and tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous() and tensor.storage_offset() == 0
    gc.collect()  # nothing but the tensor keeps the memory
    assert (tensor == 0).all()
    tensor.fill_(3)
    other = lazy_zeros((num_bytes // 32, 16), torch.bfloat16, dense)
    assert (tensor == 3).all() and (other == 0).all()


@pytest.mark.parametrize("num_bytes", [size for size in SIZES if size >= 1 << 20])
def test_dense_tensors_begin_at_a_huge_page(num_bytes):
    tensor = lazy_zeros((num_bytes // 4,), torch.float32, dense=True)
    assert tensor.data_ptr() % HUGE_PAGE == 0
