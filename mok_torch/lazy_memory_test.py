"""Large tensors: what a caller may rely on, below and above each threshold of their memory."""

import gc
import threading

import pytest
import torch

from mok_torch import _C
from mok_torch.lazy_memory import lazy_zeros, recycled_empty

HUGE_PAGE = 1 << 21
# Bytes around the least size with memory of its own, the least with huge pages, and above a page.
SIZES = [0, 64, (1 << 18) - 64, 1 << 18, (1 << 20) - 64, 1 << 20, HUGE_PAGE, 5 * HUGE_PAGE // 2]


@pytest.fixture(autouse=True)
def collect_garbage():
    """Tensors of earlier tests of the process end now, and not in the middle of one."""
    gc.collect()


def use_more_than_ever():
    """Blocks, in use, with which more is in use than at any time before in the process."""
    _C.RecycledMemory(1)  # the latest free block, of one page: the last one to go
    blocks = []
    while _C.RecycledMemory.free_bytes():
        blocks.append(_C.RecycledMemory(100 * HUGE_PAGE))  # never touched
    return blocks


@pytest.mark.parametrize("allocate", [lazy_zeros, recycled_empty])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_is_contiguous_and_owns_its_memory(num_bytes, allocate):
    tensor = allocate((num_bytes // 32, 16), torch.bfloat16)
    assert tensor.shape == (num_bytes // 32, 16) and tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous() and tensor.storage_offset() == 0
    gc.collect()  # nothing but the tensor keeps the memory
    assert allocate is not lazy_zeros or (tensor == 0).all()
    tensor.fill_(3)
    other = allocate((num_bytes // 32, 16), torch.bfloat16).fill_(5)
    assert (tensor == 3).all() and (other == 5).all()


@pytest.mark.parametrize("num_bytes", [size for size in SIZES if size >= 1 << 20])
def test_recycled_tensors_begin_at_a_huge_page(num_bytes):
    tensor = recycled_empty((num_bytes // 4,), torch.float32)
    assert tensor.data_ptr() % HUGE_PAGE == 0


def test_memory_is_used_again_once_the_last_tensor_is_gone():
    shape = (3 * HUGE_PAGE // 4 + 1,)
    tensor = recycled_empty(shape, torch.float32).fill_(1)
    view, place = tensor[5:], tensor.data_ptr()
    del tensor
    other = recycled_empty(shape, torch.float32).fill_(2)
    assert other.data_ptr() != place and (view == 1).all()
    del view
    # Of another dtype and shape, but as many huge pages.
    again = recycled_empty((4 * HUGE_PAGE // 2 // 2, 2), torch.bfloat16)
    assert again.data_ptr() == place


@pytest.mark.parametrize("earlier_pages", [1, 500])
def test_no_more_is_held_than_was_in_use_at_once(earlier_pages):
    recycled_empty((earlier_pages * HUGE_PAGE,), torch.uint8)  # gone at once
    blocks = use_more_than_ever()
    tensors = [recycled_empty((pages * HUGE_PAGE // 4,), torch.float32) for pages in (20, 30, 40)]
    most = _C.RecycledMemory.bytes_in_use()
    del tensors
    in_use = _C.RecycledMemory.bytes_in_use()
    assert in_use == most - 90 * HUGE_PAGE
    for pages in range(1, 60):
        held = recycled_empty((pages * HUGE_PAGE // 4,), torch.float32)
        assert _C.RecycledMemory.bytes_in_use() == in_use + pages * HUGE_PAGE
        assert _C.RecycledMemory.bytes_in_use() + _C.RecycledMemory.free_bytes() <= most
        del held
    # The latest ones are those that stay.
    assert _C.RecycledMemory.free_bytes() >= 59 * HUGE_PAGE
    del blocks


def test_tensors_may_end_in_another_thread():
    def make_and_drop():
        for _ in range(50):
            tensor = recycled_empty((HUGE_PAGE // 4,), torch.float32).fill_(1)
            assert (tensor == 1).all()

    before = _C.RecycledMemory.bytes_in_use()
    threads = [threading.Thread(target=make_and_drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _C.RecycledMemory.bytes_in_use() == before
    with pytest.raises(MemoryError):
        recycled_empty((1 << 60,), torch.uint8)
