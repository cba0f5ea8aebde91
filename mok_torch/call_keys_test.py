"""The keys of accepted calls: what differs to the checks has another key, or none."""

import pytest
import torch

from mok_torch.accepted_calls import AcceptedCalls, exactly, key_of_call

CPU = torch.device("cpu")


class Subclass(torch.Tensor):
    pass


def test_the_collection_is_bounded():
    calls = AcceptedCalls()
    tensor = torch.zeros(3)
    for number in range(5000):
        calls.add(key_of_call(number, CPU, (tensor,))[0], number)
    assert 0 < len(calls) <= 1024
    assert calls.find(key_of_call(4999, CPU, (tensor,))[0]) == 4999
    while len(calls) < 1024:
        calls.add(len(calls) - 1024, None)
    for known in (None, [], 4999):  # nothing new
        calls.add(known if known != 4999 else key_of_call(4999, CPU, (tensor,))[0], 0)
        assert len(calls) == 1024
    assert exactly(1) != exactly(True)


class NotComparable:
    """Like an array of NumPy: equality is no truth value."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise ValueError("ambiguous")


@pytest.mark.parametrize("settings", [[1], NotComparable()], ids=["no hash", "no equality"])
def test_settings_that_cannot_be_looked_up_are_left_to_the_checks(settings):
    calls = AcceptedCalls()
    calls.add((NotComparable(), None), "accepted")
    key, addresses = key_of_call(settings, CPU, (None,))
    assert key == (settings, None) and addresses == [0]
    assert calls.find(key) is None
    calls.add(key, "not remembered")
    calls.add(None, "not remembered")
    assert len(calls) == 1 and calls.find(None) is None


def test_tensors_that_differ_have_other_keys_or_none():
    tensor = torch.zeros(4, 4)
    key, addresses = key_of_call("call", CPU, (tensor, None))
    assert addresses == [tensor.data_ptr(), 0]
    assert key_of_call("call", CPU, (tensor.clone(), None))[0] == key
    others = [
        ((tensor, tensor), CPU),
        ((None, tensor), CPU),
        ((tensor, None, None), CPU),
        ((tensor.int(), None), CPU),
        ((tensor.view(2, 8), None), CPU),
        ((tensor.view(1, 4, 4), None), CPU),
    ]
    keys = [key_of_call("call", device, tensors)[0] for tensors, device in others]
    assert len({key, *keys}) == 7 and None not in keys
    refused = [
        ((tensor.t(), None), CPU),
        ((torch._neg_view(tensor), None), CPU),
        ((tensor.flatten()[1:], None), CPU),
        ((tensor, None), torch.device("cuda", 0)),
        ((torch.empty(4, 4, device="meta"), None), CPU),
        ((tensor.as_subclass(Subclass), None), CPU),
        ((4.0, None), CPU),
    ]
    assert all(key_of_call("call", device, given) == (None, []) for given, device in refused)
