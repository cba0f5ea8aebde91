"""NVLink multicast is off while our heaps are made and mapped, and as before for everybody else."""

import concurrent.futures
import os
import threading

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from mok_torch import symmetric_heap
from mok_torch.symmetric_heap import map_heap, new_heap

CPU = torch.device("cpu")
NAME = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@pytest.fixture(params=[None, "0", "1"])
def before(request, monkeypatch):
    """What the variable was before."""
    monkeypatch.delenv(NAME, raising=False)
    if request.param is not None:
        monkeypatch.setenv(NAME, request.param)
    return request.param


def test_multicast_is_off_for_our_memory_alone(before, monkeypatch):
    seen = []

    def empty(size, dtype, device):
        seen.append(os.environ[NAME])
        return torch.ones(size, dtype=dtype, device=device)

    def rendezvous(heap, group_name):
        seen.append(os.environ[NAME])
        if group_name == "gone":
            raise RuntimeError("a rank is gone")
        return heap, group_name

    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    heap = new_heap(24, CPU)
    assert heap.dtype == torch.uint8 and heap.tolist() == [0] * 24
    assert os.environ.get(NAME) == before
    assert map_heap(heap, "a group") == (heap, "a group")
    assert os.environ.get(NAME) == before
    with pytest.raises(RuntimeError, match="gone"):
        map_heap(heap, "gone")
    assert os.environ.get(NAME) == before
    assert seen == ["1"] * 3


def test_two_threads_that_map_heaps_of_different_groups(before, monkeypatch):
    both, first_left = threading.Barrier(2), threading.Event()

    def rendezvous(heap, group_name):
        both.wait(60)
        if group_name == "second":
            assert first_left.wait(60)
        return os.environ.get(NAME)

    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        second = pool.submit(symmetric_heap.map_heap, None, "second")
        assert pool.submit(symmetric_heap.map_heap, None, "first").result() == "1"
        first_left.set()
        assert second.result() == "1"
    assert os.environ.get(NAME) == before
