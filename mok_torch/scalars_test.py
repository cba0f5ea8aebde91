"""Numbers of any type, NumPy's above all, are arguments wherever Python's are."""

import dataclasses
import fractions

import numpy
import pytest
import torch

from mok_torch import InProcessGroup, MoELayer, functional
from mok_torch.config import MoKConfig
from mok_torch.router import RouterConfig
from mok_torch.scalars import as_integer, as_number
from mok_torch.self_test import Case, make_batch


def test_integers():
    for value in (5, numpy.int64(5), numpy.uint8(5)):
        number = as_integer("n", value, 1, 9)
        assert number == 5 and type(number) is int
    assert as_integer("n", None, 1, optional=True) is None
    with pytest.raises(TypeError, match=r"^n: expected an int, got NoneType: None$"):
        as_integer("n", None, 1)
    for value in (5.0, numpy.float64(5), True, numpy.bool_(True), "5", torch.tensor(5)):
        with pytest.raises(
            TypeError, match=f"^n: expected an int or None, got {type(value).__name__}"
        ):
            as_integer("n", value, 1, optional=True)
    with pytest.raises(ValueError, match=r"^n: expected at least 6, got 5$"):
        as_integer("n", numpy.int8(5), 6)
    with pytest.raises(ValueError, match=r"^n: expected 1 to 4, got 5$"):
        as_integer("n", 5, 1, 4)


def test_numbers():
    for value in (2, 2.0, numpy.float32(2), numpy.int64(2), fractions.Fraction(2)):
        number = as_number("n", value)
        assert number == 2 and type(number) is float
    assert as_number("n", None, optional=True) is None
    for value in ("2", 2j, False, numpy.bool_(False), None, torch.tensor(2.0)):
        with pytest.raises(TypeError, match=f"^n: expected a number, got {type(value).__name__}"):
            as_number("n", value)


def test_configurations_equal_those_of_python_numbers():
    """And print alike: what is compared, hashed or sent to other ranks has one form."""
    for kind, integers, number in (
        (
            MoKConfig,
            {"num_threads": 2, "macrobatch_size": -1, "num_sms": 9},
            {"timeout_seconds": 3},
        ),
        (RouterConfig, {"num_experts": 8, "top_k": 2}, {"routed_scaling_factor": 2.5}),
    ):
        expected = kind(**integers, **number)
        of_numpy = {name: numpy.int32(value) for name, value in integers.items()}
        given = kind(**of_numpy, **{name: numpy.float32(value) for name, value in number.items()})
        assert given == expected and hash(given) == hash(expected) and repr(given) == repr(expected)
        for field in dataclasses.fields(given):
            assert type(getattr(given, field.name)) is type(getattr(expected, field.name))


def test_a_layer_of_numpys_numbers():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_experts": 4, "top_k": 2}
    sizes |= {"shared_intermediate_size": 8, "gradient_block": 4, "max_tokens_per_rank": 6}
    layers = []
    for kinds in ((int, float), (numpy.int64, numpy.float32)):
        torch.manual_seed(0)
        integers = {name: kinds[0](value) for name, value in sizes.items()}
        layers.append(MoELayer(**integers, swiglu_limit=kinds[1](0.5)))
    assert repr(layers[0]) == repr(layers[1])
    x = torch.randn(6, 16)
    assert torch.equal(layers[0](x), layers[1](x))


def test_calls_with_numpys_numbers():
    case = Case("", tokens=(9,), hidden=16, intermediate=8, experts=4)
    batch = make_batch(case, torch.float32)
    given = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights)
    expected = functional.moe(*given, swiglu_limit=0.5, num_experts=4)
    number, integer = numpy.float32(0.5), numpy.int64(4)
    assert torch.equal(functional.moe(*given, swiglu_limit=number, num_experts=integer), expected)
    sizes = {"num_local_tokens": 9, "hidden_size": 16, "topk": 2}
    sizes = {name: numpy.int64(size) for name, size in sizes.items()}
    space = functional.get_workspace(None, **sizes, dtype=torch.float32)
    schedule = functional.build_schedule(
        space, None, batch.topk_idx, num_local_experts=integer, num_experts=integer
    )
    x, weight, *weights = (
        tensor.detach() for tensor in (batch.x, batch.topk_weight, *batch.weights)
    )
    tensors = (x, weight, None, None, None, *weights)
    out, context = functional.forward(None, space, schedule, *tensors, swiglu_limit=number)
    assert torch.equal(out, expected)
    d_x, *_ = functional.backward(
        None, space, schedule, context, torch.ones_like(out), *tensors, swiglu_limit=0.5
    )
    (expected_d_x,) = torch.autograd.grad(expected.sum(), batch.x)
    assert torch.equal(d_x, expected_d_x)
    assert space.input_buffer(numpy.int64(3)).shape == (3, 16)
    assert InProcessGroup(numpy.int64(2)).member(numpy.int64(1)).rank == 1
