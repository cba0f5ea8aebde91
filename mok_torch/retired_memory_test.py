"""Memory that kernels may still write outlives its owner until the GPU has been waited for."""

import weakref

import pytest
import torch

from mok_torch import retired_memory

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Owner:
    pass


@pytest.fixture
def waits(monkeypatch):
    """The GPUs that were waited for; what to do meanwhile may be put into waits.actions."""

    class Waits(list):
        actions = ()

    waited = Waits()

    def synchronize(device):
        waited.append(device)
        for action in waited.actions:
            action()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(retired_memory, "_retired", {})
    return waited


def owned(device):
    """An owner, and a weak reference to its memory."""
    owner, memory = Owner(), torch.zeros(8)
    retired_memory.keep_until_idle(owner, memory, device)
    return owner, weakref.ref(memory)


def test_memory_goes_when_its_gpu_has_been_waited_for(waits):
    (owner, memory), (other_owner, other) = owned(GPUS[0]), owned(GPUS[1])
    retired_memory.synchronize(GPUS[0])  # the owner lives
    assert memory() is not None
    del owner, other_owner
    assert memory() is not None and len(waits) == 1  # nobody waits while it goes
    waits.actions = [lambda: during.append(memory() is not None)]
    during = []
    retired_memory.synchronize(GPUS[0])
    assert during == [True] and memory() is None
    assert other() is not None and waits == GPUS[:1] * 2
    retired_memory.synchronize(GPUS[1])
    assert other() is None


def test_the_memory_of_an_owner_that_goes_meanwhile_waits_for_the_next_time(waits):
    owner, memory = owned(GPUS[0])
    owners = [owner]
    del owner
    waits.actions = [owners.clear]
    retired_memory.synchronize(GPUS[0])
    assert memory() is not None
    retired_memory.synchronize(GPUS[0])
    assert memory() is None
