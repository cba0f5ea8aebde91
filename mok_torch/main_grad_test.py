"""gradient_accumulation_fusion: a backward of moe adds to main_grad as the explicit one does."""

import pytest
import torch

from mok_torch import MoELayer, functional
from mok_torch.functional import MainGrads, MoKConfig
from mok_torch.main_grad_test_support import BF16, CASE, Inputs
from mok_torch.self_test import run_on_ranks

SMALL_RING = MoKConfig(macrobatch_size=128, minibatch_size=128)
NAMES = ("w_gate", "w_up", "w_down", "shared.w_gate", "shared.w_up", "shared.w_down")


def explicitly(inputs: Inputs, config=None):
    """out, gradients of x, topk_weight and scale, and the buffers, of the explicit calls."""
    space = functional.get_workspace(
        config, num_local_tokens=40, hidden_size=CASE.hidden, topk=CASE.topk
    )
    schedule = functional.build_schedule(
        space, config, inputs.topk_idx, num_local_experts=CASE.experts
    )
    weights = [weight.detach().to(BF16) for weight in inputs.weights]
    given = (inputs.x.detach(), inputs.topk_weight.detach(), *weights[3:], *weights[:3])
    scale = {"shared_scale": inputs.scale.detach()}
    out, context = functional.forward(config, space, schedule, *given, **scale)
    buffers = MainGrads(*(buffer.clone() for buffer in inputs.main_grads()))
    gradients = functional.backward(
        config, space, schedule, context, inputs.d_out, *given, **scale, main_grads=buffers
    )
    return [out, gradients[0], gradients[1], gradients[8]], buffers


@pytest.mark.parametrize("config", [None, SMALL_RING], ids=["default", "small ring"])
@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("buffer_dtype", [BF16, torch.float32])
def test_bits_are_those_of_the_explicit_calls(config, weight_dtype, buffer_dtype):
    inputs = Inputs(weight_dtype=weight_dtype, buffer_dtype=buffer_dtype)
    expected, buffers = explicitly(inputs, config)
    out = inputs.moe(config=config)
    leaves = (inputs.x, inputs.topk_weight, inputs.scale)
    d_inputs = torch.autograd.grad(out, leaves, inputs.d_out, retain_graph=True)
    assert all(map(torch.equal, (out, *d_inputs), expected))
    assert all(map(torch.equal, inputs.main_grads(), buffers))
    assert all(weight.grad_added_to_main_grad for weight in inputs.weights)
    # A second backward adds the same again.
    for weight, buffer in zip(inputs.weights, buffers, strict=True):
        weight.main_grad = torch.zeros_like(buffer)
    again = torch.autograd.grad(out, leaves, inputs.d_out)
    assert all(map(torch.equal, again, d_inputs))
    zeros = Inputs(weight_dtype=weight_dtype, buffer_dtype=buffer_dtype)
    for weight in zeros.weights:
        weight.main_grad.zero_()
    assert all(map(torch.equal, inputs.main_grads(), explicitly(zeros, config)[1]))


def test_what_autograd_gets():
    told, untold = Inputs(), Inputs(tells=False)
    for inputs in (told, untold):
        inputs.moe().backward(inputs.d_out)
        assert inputs.x.grad is not None and inputs.scale.grad is not None
    assert all(weight.grad.shape == weight.shape for weight in told.weights)
    assert all(weight.grad is None for weight in untold.weights)
    assert all(map(torch.equal, told.main_grads(), untold.main_grads()))


def test_frozen_weights_need_no_buffer():
    inputs, all_of_them = Inputs(), Inputs()
    for index in (1, 3, 4, 5):
        inputs.weights[index].requires_grad_(False)
        del inputs.weights[index].main_grad
    for given in (inputs, all_of_them):
        given.moe().backward(given.d_out)
    for index in (0, 2):
        assert torch.equal(inputs.weights[index].main_grad, all_of_them.weights[index].main_grad)
    assert inputs.weights[1].grad is None and not inputs.weights[1].grad_added_to_main_grad
    with torch.no_grad():  # nobody adds anything
        del inputs.weights[0].main_grad
        assert torch.equal(inputs.moe(), all_of_them.moe())


def test_a_second_differentiation_is_refused():
    inputs, once = Inputs(), Inputs()
    leaves = (inputs.x, inputs.topk_weight, inputs.scale)
    out = inputs.moe()
    gradients = torch.autograd.grad(out, leaves, inputs.d_out, create_graph=True)
    once.moe().backward(once.d_out)
    for leaf, gradient in zip((once.x, once.topk_weight, once.scale), gradients, strict=True):
        assert torch.equal(leaf.grad, gradient)
        # As a penalty, which must not be lost.
        with pytest.raises(NotImplementedError, match="no double backward"):
            torch.autograd.grad(out.sum() + gradient.square().sum(), leaves, retain_graph=True)


def test_under_autocast():
    inputs, rounded = Inputs(weight_dtype=torch.float32), Inputs()
    inputs.x = inputs.x.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = inputs.moe()
    out.backward(inputs.d_out)
    rounded.moe().backward(rounded.d_out)
    assert all(map(torch.equal, inputs.main_grads(), rounded.main_grads()))
    assert inputs.x.grad.dtype == torch.float32


def test_compiled_functions_leave_the_call_out():
    inputs, eager = Inputs(), Inputs()
    eager.moe().backward(eager.d_out)
    compiled = torch.compile(lambda: 2 * inputs.moe(), backend="aot_eager")
    compiled().backward(inputs.d_out / 2)
    assert all(map(torch.equal, inputs.main_grads(), eager.main_grads()))
    with pytest.raises(TypeError, match=r"gradient_accumulation_fusion: expected a bool, got str"):
        torch.compile(lambda: 2 * inputs.moe(gradient_accumulation_fusion="x"), backend="eager")()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_fused_out_of_graphs"):
        torch.compile(inputs.moe, backend="aot_eager", fullgraph=True)()


def spoil_missing(weight):
    del weight.main_grad


def spoil_dtype(weight):
    weight.main_grad = weight.main_grad.half()


def spoil_mixture(weight):
    weight.main_grad = weight.main_grad.bfloat16()


def spoil_shape(weight):
    weight.main_grad = weight.main_grad[:-1]


SPOILED = {
    "missing": (spoil_missing, ValueError, "expected a tensor to add the gradient to"),
    "dtype": (
        spoil_dtype,
        TypeError,
        "expected torch.float32 or torch.bfloat16, got torch.float16",
    ),
    "mixture": (
        spoil_mixture,
        TypeError,
        r"expected torch.float32 \(the dtype of .*w_gate.main_grad",
    ),
    "shape": (spoil_shape, ValueError, "expected shape of the weight"),
}


def test_a_weight_is_not_its_own_main_grad():
    inputs = Inputs()
    for weight in inputs.weights:
        weight.main_grad = torch.zeros_like(weight)
    inputs.moe()
    inputs.weights[2].main_grad = inputs.weights[2].detach()
    with pytest.raises(ValueError, match=rf"^{NAMES[2]}.main_grad: shares memory with a tensor"):
        inputs.moe()


@pytest.mark.parametrize("index", [1, 5])
@pytest.mark.parametrize("spoil, error, text", SPOILED.values(), ids=SPOILED)
def test_buffers_that_will_not_do_are_refused(index, spoil, error, text):
    """Before the ranks meet, and in the backward if they were replaced meanwhile."""
    inputs = Inputs()
    text = rf"^{NAMES[index]}.main_grad: {text}"
    out = inputs.moe()
    spoil(inputs.weights[index])
    with pytest.raises(error, match=text):
        inputs.moe()
    with pytest.raises(error, match=text):
        out.backward(inputs.d_out)


def test_an_error_reaches_the_other_rank():
    def work(member, rank):
        layer = MoELayer(32, 16, 4, 2, group=member, dtype=BF16, gradient_accumulation_fusion=True)
        x = torch.ones(3, 32, dtype=BF16)
        for weight in layer.expert_parameters():
            weight.main_grad = torch.zeros(weight.shape)
        first = layer.experts.w_up
        buffer = first.main_grad
        layer(x)
        if rank == 0:
            del first.main_grad
        with pytest.raises(ValueError, match=r"w_up.main_grad: expected a tensor"):
            layer(x)
        first.main_grad = buffer
        layer(x).sum().backward()
        return buffer.any()

    torch.manual_seed(0)
    assert any(run_on_ranks(work, 2))


def test_layers_refuse_what_would_add_blocks():
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_experts": 4, "top_k": 2}
    with pytest.raises(
        ValueError, match=r"gradient_block: expected None with gradient_acc.*, got 8"
    ):
        MoELayer(**sizes, gradient_block=8, gradient_accumulation_fusion=True)
