"""Random arguments, a few of them odd: an error that names one, or what float64 makes of them."""

import re

import hypothesis
import numpy
import torch
from hypothesis import strategies as st

from mok_torch import functional
from mok_torch.functional import MoKConfig, SharedExpert, moe
from mok_torch.reference import moe_reference, relative_error
from mok_torch.self_test import Case
from mok_torch.test_support import routed_batch

TENSORS = ("x", "topk_idx", "topk_weight", "w_gate", "w_up", "w_down")
SHARED = ("shared.w_gate", "shared.w_up", "shared.w_down", "shared.scale")
EXPLICIT = ("x", "top_experts", "router_weights")
EXPLICIT += tuple(f"routed_{name}_weights" for name in ("gate", "up", "down"))
EXPLICIT += (*(f"shared_{name}_weights" for name in ("gate", "up", "down")), "shared_scale")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def transposed(tensor):
    """The same values, strides the other way round."""
    order = range(tensor.dim() - 1, -1, -1)
    return tensor.permute(*order).contiguous().permute(*order)


def misaligned(tensor):
    """The same values, at an odd place of a larger tensor."""
    memory = tensor.new_empty(tensor.numel() + 1)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


def swapped(tensor):
    return tensor.transpose(0, -1) if tensor.dim() else tensor


# What a caller may make of a tensor; whether the call then works is for the call to say.
CHANGES = {
    "transposed": transposed,
    "misaligned": misaligned,
    "subclass": lambda t: t.as_subclass(Named),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "negated twice": lambda t: torch._neg_view(-t),
    "copied by one": lambda t: t[:1].expand(t.shape) if t.dim() and t.shape[0] else t,
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "int32": lambda t: t.int(),
    "int16": lambda t: t.short(),
    "bool": lambda t: t > 0,
    "complex": lambda t: t + 0j,
    "one dimension more": lambda t: t.unsqueeze(0),
    "one dimension less": lambda t: t[0] if t.dim() and t.shape[0] else t.sum(),
    "one row less": lambda t: t[:-1] if t.dim() else t,
    "one column less": lambda t: t[..., :-1] if t.dim() else t,
    "no rows": lambda t: t[:0] if t.dim() else t,
    "swapped": swapped,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
    "array": lambda t: t.float().numpy(),
    "number": lambda t: 1.0,
    "one more": lambda t: t + 1,
}
OPTION_VALUES = {
    "swiglu_limit": [
        0.5,
        numpy.float32(0.5),
        1,
        0,
        -1,
        "1",
        True,
        float("inf"),
        float("nan"),
        1e-99,
    ],
    "num_experts": [numpy.int64(3), 3, 0, -1, 2.0, "3", True, 2**40],
    "config": [MoKConfig(minibatch_size=128, macrobatch_size=128), {}, 3, MoKConfig],
}


@st.composite
def recipes(draw):
    """A case, its dtype, what becomes of some of its tensors, and options."""
    case = Case(
        "fuzz",
        (draw(st.integers(0, 9)),),
        hidden=draw(st.sampled_from([8, 24])),
        intermediate=draw(st.sampled_from([8, 16])),
        experts=draw(st.integers(1, 4)),
        topk=draw(st.integers(1, 3)),
        shared=draw(st.sampled_from([0, 8])),
        scaled_shared=draw(st.booleans()),
        no_route_share=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 3)),
    )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    changed = draw(st.lists(st.sampled_from(TENSORS + SHARED), max_size=2, unique=True))
    changes = {name: draw(st.sampled_from(sorted(CHANGES))) for name in changed}
    named = draw(st.lists(st.sampled_from(sorted(OPTION_VALUES)), max_size=1))
    options = {name: draw(st.sampled_from(OPTION_VALUES[name])) for name in named}
    return case, dtype, changes, options


def arguments_of(case, dtype, changes, options):
    """The arguments by name; without a shared expert its tensors are None."""
    batch = routed_batch(case, dtype)
    shared = (None,) * 4 if batch.shared is None else batch.shared
    tensors = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights, *shared)
    arguments = dict(zip(TENSORS + SHARED, tensors, strict=True)) | options
    for name, change in changes.items():
        if arguments[name] is not None:
            try:
                arguments[name] = CHANGES[change](arguments[name].detach())
            except (RuntimeError, TypeError):
                hypothesis.reject()  # PyTorch makes no such tensor
    return arguments


def options_of(arguments):
    return {name: arguments[name] for name in OPTION_VALUES if name in arguments}


def shared_of(arguments):
    given = [arguments[name] for name in SHARED]
    return None if all(value is None for value in given) else SharedExpert(*given)


def run_moe(arguments):
    tensors = [arguments[name] for name in TENSORS]
    return moe(*tensors, shared=shared_of(arguments), **options_of(arguments))


def run_explicitly(arguments, case, dtype):
    """The output of the explicit calls with a workspace for the case."""
    x, idx, weight, *routed = (arguments[name] for name in TENSORS)
    *shared, scale = (arguments[name] for name in SHARED)
    options = options_of(arguments)
    config, num_experts = options.pop("config", None), options.pop("num_experts", None)
    space = functional.get_workspace(
        num_local_tokens=0, hidden_size=case.hidden, topk=case.topk, dtype=dtype
    )
    schedule = functional.build_schedule(
        space, config, idx, num_local_experts=case.experts, num_experts=num_experts
    )
    call = (config, space, schedule, x, weight, *shared, *routed)
    return functional.forward(*call, **options, shared_scale=scale)[0]


def leaves_among(arguments):
    """The names of those that a gradient can be asked for."""
    return [n for n, value in arguments.items() if getattr(value, "requires_grad", False)]


def in_float64(arguments):
    """The arguments, floating-point tensors as float64 leaves."""

    def convert(value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        plain = value.detach().as_subclass(torch.Tensor).double()
        return plain.requires_grad_(value.requires_grad)

    return {name: convert(value) for name, value in arguments.items()}


def outcome(run, *arguments):
    """(result, None) or (None, error)."""
    try:
        return run(*arguments), None
    except Exception as error:
        return None, error


def assert_names_an_argument(error, names):
    assert isinstance(error, (TypeError, ValueError)), repr(error)
    named = re.match(r"([\w.]+): ", str(error))
    # The engine, which checks the ids, calls them topk_idx everywhere.
    assert named and named[1] in (*names, *OPTION_VALUES, "shared", "topk_idx"), repr(error)


def assert_right(out, arguments, dtype):
    """The output, and in fp32 the gradients, are those of float64."""
    exact = in_float64(arguments)
    tensors = [exact[name] for name in TENSORS]
    limit = arguments.get("swiglu_limit")
    expected = moe_reference(
        *tensors, shared=shared_of(exact), swiglu_limit=None if limit is None else float(limit)
    )
    assert relative_error(out.as_subclass(torch.Tensor), expected) < LIMITS[dtype]
    names = leaves_among(arguments)
    leaves, exact_leaves = ([values[name] for name in names] for values in (arguments, exact))
    if dtype != torch.float32 or not leaves:
        return
    gradients = torch.autograd.grad(out.sum(), leaves)
    references = [None] * len(leaves)
    if expected.requires_grad:  # else no route leads anywhere
        references = torch.autograd.grad(expected.sum(), exact_leaves, allow_unused=True)
    for gradient, reference in zip(gradients, references, strict=True):
        reference = torch.zeros_like(gradient) if reference is None else reference
        assert gradient.shape == reference.shape
        assert torch.allclose(gradient.double(), reference.double(), rtol=1e-4, atol=1e-4)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(recipes())
def test_an_error_that_names_an_argument_or_what_float64_says(recipe):
    case, dtype, *_ = recipe
    arguments = arguments_of(*recipe)
    out, error = outcome(run_moe, arguments)
    explicit, explicit_error = outcome(run_explicitly, arguments, case, dtype)
    for name, raised in ((TENSORS + SHARED, error), (EXPLICIT, explicit_error)):
        if raised is not None:
            assert_names_an_argument(raised, name)
    if error is None:
        assert_right(out, arguments, dtype)
    if error is None and explicit_error is None:
        assert torch.equal(explicit, out.detach())
