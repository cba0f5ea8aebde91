"""Which modes of PyTorch leave functional.moe on a GPU its autograd function."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mok_torch.moe_cuda import _modes_only_set_a_device


class Watches(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_default_device_is_no_reason_for_the_operator():
    assert _modes_only_set_a_device()
    with torch.device("cpu"):
        assert _modes_only_set_a_device()
        with torch.device("meta"):
            assert _modes_only_set_a_device()
    try:
        torch.set_default_device("meta")
        assert _modes_only_set_a_device()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("device_first", [False, True])
def test_a_mode_that_looks_at_functions_is(device_first):
    modes = [torch.device("cpu"), Watches()]
    first, second = modes if device_first else reversed(modes)
    with first, second:
        assert not _modes_only_set_a_device()
    with Watches():
        assert not _modes_only_set_a_device()
        with torch._C.DisableTorchFunction():  # then it does not
            assert _modes_only_set_a_device()
    assert _modes_only_set_a_device()
