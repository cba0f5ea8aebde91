"""Kinds of wrong arguments that every function has in common: each refuses them by name."""

import math

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from mok_torch import MoELayer, functional, ops
from mok_torch.full_state import full_state_dict, load_full_state_dict
from mok_torch.functional import MainGrads, SharedExpert, moe
from mok_torch.router import Router, RouterConfig, route
from mok_torch.self_test import Case, run_on_ranks
from mok_torch.test_support import routed_batch

CASE = Case("odd", (12,), hidden=32, intermediate=24, experts=4, shared=16, scaled_shared=True)
MOE = ("x", "topk_idx", "topk_weight", "w_gate", "w_up", "w_down")
SHARED = ("shared.w_gate", "shared.w_up", "shared.w_down", "shared.scale")
EXPLICIT = ("x", "top_experts", "router_weights")
EXPLICIT += tuple(f"routed_{name}_weights" for name in ("gate", "up", "down"))
EXPLICIT += (*(f"shared_{name}_weights" for name in ("gate", "up", "down")), "shared_scale")
SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_experts": 4, "top_k": 2}


class Unreadable(torch.Tensor):
    """A wrapper without memory, in the manner of DTensor, that knows no operator."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    def to_local(self):
        return self.values

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


class Named(torch.Tensor):
    """A subclass with memory, which is as good as any tensor."""


def matrix(values):
    return values.reshape(len(values), -1)


WITHOUT_MEMORY = "expected a tensor with memory of its own, got a "
ODD_TENSORS = {
    "nested": (lambda v: torch.nested.nested_tensor([v, v]), "expected a dense tensor, got a nest"),
    "jagged": (
        lambda v: torch.nested.nested_tensor([matrix(v), matrix(v)], layout=torch.jagged),
        "expected a dense tensor, got a nest",
    ),
    "coo": (lambda v: v.to_sparse(), "expected layout torch.strided, got torch.sparse_coo"),
    "csr": (lambda v: matrix(v).to_sparse_csr(), "expected layout torch.strided, got torch.sp"),
    "wrapper": (Unreadable, rf"{WITHOUT_MEMORY}Unreadable \(see to_local\(\)"),
    "fake": (lambda v: FakeTensorMode().from_tensor(v), f"{WITHOUT_MEMORY}FakeTensor$"),
    "list": (lambda v: v.tolist(), "expected a torch.Tensor, got list"),
    "array": (lambda v: v.float().numpy(), "expected a torch.Tensor, got ndarray"),
}


def make_tensors():
    batch = routed_batch(CASE, torch.bfloat16)
    tensors = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights, *batch.shared)
    return [tensor.detach() for tensor in tensors]


def call_moe(tensors, **options):
    return moe(*tensors[:6], shared=SharedExpert(*tensors[6:]), **options)


def call_explicitly(tensors, gradient=None, **options):
    """build_schedule and forward, then backward if there is a gradient."""
    x, idx, weight, *weights, scale = tensors
    space = functional.get_workspace(num_local_tokens=12, hidden_size=32, topk=2)
    schedule = functional.build_schedule(space, None, idx, num_local_experts=4)
    inputs = (x, weight, *weights[3:], *weights[:3])
    options["shared_scale"] = scale
    common = (None, space, schedule)
    main_grads = options.pop("main_grads", None)
    out, context = functional.forward(*common, *inputs, **options)
    if gradient is not None:
        functional.backward(*common, context, gradient, *inputs, **options, main_grads=main_grads)
    return out


@pytest.mark.parametrize("make, text", ODD_TENSORS.values(), ids=ODD_TENSORS)
@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("call, names", [(call_moe, MOE + SHARED), (call_explicitly, EXPLICIT)])
def test_what_the_engine_cannot_read_is_refused(call, names, index, make, text):
    tensors = make_tensors()
    tensors[index] = make(tensors[index])
    with pytest.raises(TypeError, match=f"^{names[index]}: {text}"):
        call(tensors)


@pytest.mark.parametrize("make, text", ODD_TENSORS.values(), ids=ODD_TENSORS)
def test_of_other_functions_too(make, text):
    tensors = make_tensors()
    gradient = torch.zeros(12, 32, dtype=torch.bfloat16)
    buffers = MainGrads(*(make(weight.float()) for weight in tensors[3:6]))
    layer = MoELayer(**SIZES, scoring="sigmoid")
    weight = layer.router.weight.detach()
    calls = {
        "d_output": lambda: call_explicitly(tensors, make(gradient)),
        "main_grads.routed_gate": lambda: call_explicitly(tensors, gradient, main_grads=buffers),
        "x": lambda: layer(make(tensors[0].float())),
        "weight": lambda: ops.router_logits(tensors[0], make(weight)),
        "load": lambda: layer.update_expert_bias(1e-3, make(torch.ones(4))),
    }
    for name, call in calls.items():
        if name == "load" and text.startswith(WITHOUT_MEMORY):
            continue  # ordinary operators of PyTorch: they may know it
        with pytest.raises(TypeError, match=f"^{name}: {text}"):
            call()


def test_subclasses_with_memory_are_as_good():
    tensors = make_tensors()
    named = [tensor.as_subclass(Named) for tensor in tensors]
    for call in (call_moe, call_explicitly):
        assert torch.equal(call(named).as_subclass(torch.Tensor), call(tensors))


def test_negated_views_are_read_as_what_they_stand_for():
    tensors = make_tensors()
    views = [torch._neg_view(-tensor) for tensor in tensors]
    for call in (call_moe, call_explicitly):
        assert torch.equal(call(views), call(tensors))


def test_transforms_over_the_explicit_calls_are_refused():
    x, *others = make_tensors()

    def forward(x):
        return call_explicitly([x, *others]).sum()

    with pytest.raises(NotImplementedError, match=r"^build_schedule: torch\.vmap is not supported"):
        torch.vmap(forward)(x.expand(2, 12, 32))
    with pytest.raises(NotImplementedError, match=r"^build_schedule: torch\.func's gradients"):
        torch.func.grad(forward)(x)
    with pytest.raises(NotImplementedError, match=r"^build_schedule: torch\.jit\.trace"):
        torch.jit.trace(forward, (x,))
    with pytest.raises(NotImplementedError, match=r"^x: torch\.func's transforms"):
        torch.func.functionalize(forward)(x)


@pytest.mark.parametrize(
    ("limit", "error", "text"),
    [
        (math.inf, ValueError, "expected a finite number"),
        (math.nan, ValueError, "expected a finite number"),
        (1e39, ValueError, "expected a finite number .of float32., got 1e.39"),
        (10**400, ValueError, "expected a finite number"),
        (0, ValueError, "expected a number > 0"),
        (-1.0, ValueError, "expected a number > 0"),
        # To float32 it is 0, which the engine takes for no clamp at all.
        (1e-50, ValueError, "expected a number > 0 .of float32., got 1e-50"),
        ("1", TypeError, "expected a number or None, got str"),
        (True, TypeError, "expected a number or None, got bool"),
        (torch.tensor(1.0), TypeError, "expected a number or None, got Tensor"),
    ],
)
def test_one_rule_for_swiglu_limit(limit, error, text):
    tensors = make_tensors()
    calls = (
        lambda: call_moe(tensors, swiglu_limit=limit),
        lambda: call_explicitly(tensors, swiglu_limit=limit),
        lambda: MoELayer(**SIZES, swiglu_limit=limit),
    )
    for call in calls:
        with pytest.raises(error, match=f"^swiglu_limit: {text}"):
            call()


@pytest.mark.parametrize(
    "flag", ["norm_topk_prob", "expert_bias", "shared_gate", "gradient_accumulation_fusion"]
)
@pytest.mark.parametrize("value", ["x", "", 1, 0.0, [], numpy.bool_(True)])
def test_flags_are_bools(flag, value):
    text = f"^{flag}: expected a bool.*, got {type(value).__name__}"
    with pytest.raises(TypeError, match=text):
        MoELayer(**SIZES, shared_intermediate_size=8, **{flag: value})


@pytest.mark.parametrize("value", ["x", 1, numpy.bool_(True)])
def test_fusion_of_a_call_is_a_bool(value):
    with pytest.raises(TypeError, match=r"^gradient_accumulation_fusion: expected a bool, got"):
        call_moe(make_tensors(), gradient_accumulation_fusion=value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scoring": None}, TypeError, "scoring: expected one of .*, got NoneType: None"),
        ({"scoring": ["softmax"]}, TypeError, "scoring: expected one of .*, got list"),
        ({"precision": []}, TypeError, "precision: expected None or one of .*, got list"),
        ({"precision": torch.bfloat16}, TypeError, r"precision: .*, got dtype: torch\.bfloat16"),
        ({"dtype": "bf16"}, TypeError, "dtype: expected .*, got 'bf16'"),
        ({"dtype": []}, TypeError, r"dtype: expected .*, got \[\]"),
        ({"device": "gpu"}, ValueError, "device: expected cpu or cuda, got 'gpu'"),
        ({"device": 1.5}, ValueError, "device: expected cpu or cuda, got 1.5"),
        ({"num_experts": 2**40}, ValueError, "num_experts: expected 1 to"),
        ({"hidden_size": 2**40}, ValueError, "hidden_size: expected 8 to"),
        ({"routed_scaling_factor": 1e39}, ValueError, "routed_scaling_factor: expected a finite"),
        ({"routed_scaling_factor": math.nan}, ValueError, "routed_scaling_factor: expected a fin"),
        ({"routed_scaling_factor": True}, TypeError, "routed_scaling_factor: .* got bool"),
    ],
)
def test_constructor_refuses(options, error, text):
    with pytest.raises(error, match=text):
        MoELayer(**(SIZES | options))


def test_state_dicts_of_the_wrong_kind():
    layer = MoELayer(**SIZES)
    state = layer.state_dict()
    with pytest.raises(TypeError, match=r"^module: expected a torch\.nn\.Module, got OrderedDict"):
        full_state_dict(state)
    with pytest.raises(TypeError, match=r"^module: expected a torch\.nn\.Module, got NoneType"):
        load_full_state_dict(None, state)
    with pytest.raises(TypeError, match=r"^state: expected a dict of tensors, got list"):
        layer.load_full_state_dict([])
    with pytest.raises(TypeError, match=r"^strict: expected a bool, got str: 'no'"):
        layer.load_full_state_dict(state, strict="no")
    with pytest.raises(TypeError, match=r"^experts\.w_up: expected a torch\.Tensor, got list"):
        layer.load_full_state_dict(state | {"experts.w_up": []})


def test_routers_of_the_wrong_kind():
    config = RouterConfig(4, 2)
    with pytest.raises(TypeError, match=r"^config: expected a RouterConfig, got dict"):
        Router(32, {})
    with pytest.raises(TypeError, match=r"^hidden_size: expected an int, got str"):
        Router("32", config)
    with pytest.raises(TypeError, match=r"^config: expected a RouterConfig, got NoneType"):
        route(torch.zeros(3, 4), None)
    with pytest.raises(TypeError, match=r"^logits: expected a torch\.Tensor, got list"):
        route([[0.0] * 4], config)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[E, H\] with H >= 1, got"):
        ops.router_logits(torch.zeros(3, 0), torch.zeros(4, 0))


def everything(tensors):
    """Results of many functions, with whatever defaults PyTorch has by now."""
    layer = MoELayer(**SIZES, scoring="sigmoid", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.125)
    x = tensors[0].float().requires_grad_()
    layer(x).sum().backward()
    layer.update_expert_bias()
    space = functional.get_workspace(num_local_tokens=12, hidden_size=32, topk=2)
    schedule = functional.build_schedule(space, None, tensors[1], num_local_experts=4)
    results = [call_moe(tensors), call_explicitly(tensors, torch.ones_like(tensors[0])), x.grad]
    results += [space.input_buffer(2).zero_(), schedule.tokens_per_expert()]
    results += [layer.router.expert_bias, layer.global_expert_load()]
    return results + list(layer.full_state_dict().values())


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_defaults_of_pytorch_change_nothing(device, dtype):
    tensors = make_tensors()
    expected, default = everything(tensors), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        results = everything(tensors)
    finally:
        torch.set_default_dtype(default)
        torch.set_default_device(None)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype and torch.equal(result, other)


@pytest.mark.parametrize(
    ("std", "error"), [(math.nan, ValueError), (-1, ValueError), ("a", TypeError)]
)
def test_reset_parameters_refuses(std, error):
    layer = MoELayer(**SIZES)
    before = layer.experts.w_up.clone()
    with pytest.raises(error, match=r"^std: expected"):
        layer.reset_parameters(std)
    assert torch.equal(layer.experts.w_up, before)


LOAD = torch.tensor([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("rate", "load", "error", "text"),
    [
        (1e-3, [1, 2, 3, 4], TypeError, "load: expected a torch.Tensor, got list"),
        (1e-3, LOAD.numpy(), TypeError, "load: expected a torch.Tensor, got ndarray"),
        (1e-3, torch.tensor([1, math.nan, 1, 1]), ValueError, "load: expected finite numbers >= 0"),
        (1e-3, torch.tensor([1, math.inf, 1, 1]), ValueError, "load: expected finite numbers >= 0"),
        (1e-3, -LOAD, ValueError, r"load: expected finite numbers >= 0, got \[-1, -2"),
        (1e-3, LOAD > 2, TypeError, "load: expected numbers of routes, got torch.bool"),
        (1e-3, LOAD * 1j, TypeError, "load: expected numbers of routes, got torch.complex64"),
        (1e-3, LOAD[:3], ValueError, r"load: expected shape \[E\] = \[4\], got \[3\]"),
        (1e-3, LOAD.to("meta"), ValueError, "load: expected device cpu or cuda, got meta"),
        (math.nan, LOAD, ValueError, "rate: expected a finite number"),
        (-1e-3, LOAD, ValueError, "rate: expected at least 0, got -0.001"),
        ("1", LOAD, TypeError, "rate: expected a number, got str"),
        (LOAD, None, TypeError, "rate: expected a number, got Tensor"),
    ],
)
def test_update_expert_bias_refuses(rate, load, error, text):
    layer = MoELayer(**SIZES, scoring="sigmoid")
    for update in (
        lambda: layer.update_expert_bias(rate, load),
        lambda: layer.router.update_expert_bias(LOAD if load is None else load, rate),
    ):
        with pytest.raises(error, match=f"^{text}"):
            update()
    assert not layer.router.expert_bias.any()


def test_update_expert_bias_takes_numbers_of_any_kind():
    layer = MoELayer(**SIZES, scoring="sigmoid")
    for load in (LOAD, LOAD.int(), LOAD.float(), LOAD / 2, LOAD.bfloat16()):
        layer.router.expert_bias.zero_()
        layer.update_expert_bias(numpy.float32(0.5), load)
        assert layer.router.expert_bias.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_no_dtype_is_named_twice():
    tensors = [t.float() if t.is_floating_point() else t for t in make_tensors()]
    x, idx, weight, *weights, scale = tensors
    space = functional.get_workspace(
        num_local_tokens=12, hidden_size=32, topk=2, dtype=torch.float32
    )
    schedule = functional.build_schedule(space, None, idx, num_local_experts=4)
    inputs = (None, space, schedule), (x, weight, *weights[3:], *weights[:3])
    out, context = functional.forward(*inputs[0], *inputs[1], shared_scale=scale)
    halves = MainGrads(*(weight.half() for weight in weights[:3]))
    for options in ({"weight_grad_dtype": torch.float16}, {"main_grads": halves}):
        with pytest.raises(TypeError, match=r": expected torch.float32, got torch.float16$"):
            functional.backward(*inputs[0], context, out, *inputs[1], shared_scale=scale, **options)


def check_names_of_what_the_engine_refuses(group, rank):
    """Errors that only the engine can find, as it sees what all ranks have given."""
    shapes = {"num_local_tokens": 4, "hidden_size": 32, "topk": 2, "dtype": torch.float32}
    workspace = functional.create_workspace(None, group, **shapes)
    x, ids, weights = torch.ones(4, 32), torch.zeros(4, 2).long(), torch.ones(4, 2)
    experts = [torch.zeros(2, 16, 32), torch.zeros(2, 16, 32), torch.zeros(2, 32, 16)]
    none = [weight[:0] for weight in experts]
    total = 2 * workspace.ep_size

    def moe_of(ids, experts, **options):
        return moe(x, ids, weights, *experts, workspace=workspace, **options)

    def schedule_of(ids, num_local_experts, **options):
        options |= {"num_local_experts": num_local_experts}
        return functional.build_schedule(workspace, None, ids, **options)

    no_expert = "0 on every rank, expected at least one expert"
    wrong_id = f"rank 0, token 3, k 1: expected an expert id in [-1, {total}), got 9"
    for call, text in (
        (lambda: moe_of(ids, none), f"w_gate.shape[0]: {no_expert}"),
        (lambda: schedule_of(ids, 0), f"num_local_experts: {no_expert}"),
        (
            lambda: moe_of(ids, experts, num_experts=7),
            f"num_experts: expected 7, the ranks' w_gate.shape[0] add up to {total}",
        ),
        (
            lambda: schedule_of(ids, 2, num_experts=7),
            f"num_experts: expected 7, the ranks' num_local_experts add up to {total}",
        ),
        (lambda: moe_of(ids + 9, experts), f"topk_idx: {wrong_id}"),
        (lambda: schedule_of(ids + 9, 2), f"top_experts: {wrong_id}"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == text
    moe_of(ids, experts)


def test_the_engines_errors_name_the_callers_arguments():
    check_names_of_what_the_engine_refuses(None, 0)
    run_on_ranks(check_names_of_what_the_engine_refuses, 2)


def test_ranks_in_the_backwards_of_different_forwards_are_told_so():
    def work(member, rank):
        layer = MoELayer(**SIZES, group=member)
        generator = torch.Generator().manual_seed(rank)
        outs = [layer(torch.randn(8, 32, generator=generator)) for _ in range(2)]
        # In another order on rank 1. The graphs live on for the calls in order.
        for index in range(2):
            with pytest.raises(ValueError) as caught:
                outs[index ^ rank].sum().backward(retain_graph=True)
            assert str(caught.value) == (
                "backward: expected the backward of the same forward on every rank, got those of "
                "different forwards on ranks 0 and 1"
            )
        for out in outs:
            out.sum().backward()

    run_on_ranks(work, 2)


def test_ranks_that_swap_the_contexts_of_explicit_backwards_are_told_so():
    def work(member, rank):
        shapes = {"num_local_tokens": 4, "hidden_size": 32, "topk": 2, "dtype": torch.float32}
        workspace = functional.create_workspace(None, member, **shapes)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))
        experts = [torch.zeros(2, 16, 32), torch.zeros(2, 16, 32), torch.zeros(2, 32, 16)]
        tensors = (x, torch.ones(4, 2), None, None, None, *experts)
        calls = []
        for ids in ([[0, 3], [1, 2]] * 2, [[2, 1], [3, 0]] * 2):
            options = {"num_local_experts": 2}
            schedule = functional.build_schedule(workspace, None, torch.tensor(ids), **options)
            context = functional.forward(None, workspace, schedule, *tensors)[1]
            calls.append((schedule, context))

        def backward(schedule, context):
            functional.backward(None, workspace, schedule, context, x, *tensors)

        with pytest.raises(ValueError) as caught:
            backward(*calls[rank])
        assert str(caught.value) == (
            "backward: schedule: expected that of the same build_schedule on every rank, and its "
            "forward's context, got those of different calls on ranks 0 and 1"
        )
        # Of one rank its context only.
        with pytest.raises(
            ValueError, match=r"^rank 1: context\.ring\.x: row .* not token .* of x"
        ):
            backward(calls[0][0], calls[rank][1])
        for call in calls:
            backward(*call)

    run_on_ranks(work, 2)
