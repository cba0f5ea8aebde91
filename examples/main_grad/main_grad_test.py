"""The buffers get what autograd would have given, added once; what has no tokens stays as it is."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from examples.main_grad.gradient_buffer import GradientBuffer
from examples.main_grad.main_grad import MainGradMoE
from mok_torch import MoELayer
from mok_torch.functional import MoKConfig
from mok_torch.reference import relative_error
from mok_torch.self_test import run_on_ranks

HIDDEN, EXPERTS, TOKENS = 64, 6, 90
BF16 = torch.bfloat16


def make_layer(group=None, **options) -> MoELayer:
    torch.manual_seed(1)
    options = {"dtype": BF16, "shared_intermediate_size": 24, "shared_gate": True} | options
    return MoELayer(HIDDEN, 40, EXPERTS, 2, group=group, config=MoKConfig(num_threads=1), **options)


def microbatches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, d_out) of each."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(count, 2, TOKENS, HIDDEN, generator=generator).to(BF16)
    return [tuple(pair) for pair in values]


def train_step(module: MainGradMoE, buffer: GradientBuffer, batches, call=None) -> list:
    """Adds up the gradients of the microbatches; returns the gradients of x."""
    buffer.zero()
    d_inputs = []
    for x, d_out in batches:
        buffer.start_microbatch()
        x = x.clone().requires_grad_()
        (call or module)(x).backward(d_out)
        d_inputs.append(x.grad)
    return d_inputs


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_buffers_hold_the_sum_of_the_microbatches(dtype):
    layer = make_layer()
    module = MainGradMoE(layer, TOKENS)
    buffer = GradientBuffer(layer.parameters(), dtype)
    d_inputs = train_step(module, buffer, microbatches())
    ordinary = make_layer()
    for (x, d_out), d_x in zip(microbatches(), d_inputs, strict=True):
        x = x.clone().requires_grad_()
        ordinary(x).backward(d_out)
        assert torch.equal(d_x, x.grad)
    for (name, own), other in zip(layer.named_parameters(), ordinary.parameters(), strict=True):
        assert own.grad is None and own.main_grad.dtype == dtype
        # Both sides round to bf16 in every microbatch.
        assert relative_error(own.main_grad, other.grad) < 1e-2, name
        assert (own.main_grad.data_ptr() - buffer.buffer.data_ptr()) % 128 == 0
    # Every hook ran once for each microbatch.
    assert len(buffer.ready) == 3 * len(list(layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_each_microbatch_is_added_with_one_rounding(dtype):
    """Of the fp32 gradient, to the buffer's dtype: bit for bit."""
    single = []
    for batch in microbatches():
        layer = make_layer()
        buffer = GradientBuffer(layer.parameters(), torch.float32)
        train_step(MainGradMoE(layer, TOKENS), buffer, [batch])
        single.append([parameter.main_grad for parameter in layer.parameters()])
    layer = make_layer()
    train_step(
        MainGradMoE(layer, TOKENS), GradientBuffer(layer.parameters(), dtype), microbatches()
    )
    for index, parameter in enumerate(layer.parameters()):
        total = torch.zeros(parameter.shape, dtype=dtype)
        for gradients in single:
            total = (total.float() + gradients[index]).to(dtype)
        assert same_bits(parameter.main_grad, total)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_experts_without_tokens_leave_their_bits_alone(dtype):
    layer = make_layer()
    with torch.no_grad():  # no token goes to the last experts
        layer.router.weight.zero_()
    module = MainGradMoE(layer, TOKENS)
    buffer = GradientBuffer(layer.parameters(), dtype)
    # -0.0 + 0.0 would be +0.0, and a NaN's bits would change if it were added to.
    unusual = torch.tensor([-0.0, float("nan"), 1e-40, 1.0]).to(dtype)
    buffer.buffer.copy_(unusual.repeat(len(buffer.buffer) // 4))
    before = [p.main_grad.clone() for p in layer.experts.parameters()]
    buffer.start_microbatch()
    x, d_out = microbatches(1)[0]
    module(x.clone().requires_grad_()).backward(d_out)
    for parameter, old in zip(layer.experts.parameters(), before, strict=True):
        assert same_bits(parameter.main_grad[2:], old[2:])
        assert not same_bits(parameter.main_grad[:2], old[:2])
        assert parameter.grad_added_to_main_grad and parameter.grad is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_bit(use_reentrant):
    layer = make_layer()
    module = MainGradMoE(layer, TOKENS)
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    expected_d_inputs = train_step(module, buffer, microbatches())
    expected = buffer.buffer.clone()

    def checkpointed(x):
        return checkpoint(module, x, use_reentrant=use_reentrant)

    d_inputs = train_step(module, buffer, microbatches(), checkpointed)
    assert same_bits(buffer.buffer, expected)
    assert all(map(torch.equal, d_inputs, expected_d_inputs))


def test_a_small_ring_can_be_used_twice():
    """Several macrobatches: the first backward overwrites the ring, the second recomputes."""
    torch.manual_seed(1)
    config = MoKConfig(num_threads=1, macrobatch_size=128, minibatch_size=128)
    layer = MoELayer(HIDDEN, 40, EXPERTS, 2, dtype=BF16, config=config)
    module = MainGradMoE(layer, TOKENS)
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    x, d_out = microbatches(1)[0]
    out = module(x.requires_grad_())
    first, second = [], []
    for results in (first, second):
        buffer.zero()
        results += torch.autograd.grad(out, [x], d_out, retain_graph=True)
        results.append(buffer.buffer.clone())
    assert all(map(same_bits, first, second)) and first[1].any()


def test_without_the_attribute_autograd_gets_no_gradient():
    layer = make_layer(shared_intermediate_size=0, shared_gate=False)
    module = MainGradMoE(layer, TOKENS)
    for parameter in module.main_grad_parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    x, d_out = microbatches(1)[0]
    module(x).backward(d_out)
    for parameter in module.main_grad_parameters():
        assert parameter.grad is None and parameter.main_grad.any()
        assert not hasattr(parameter, "grad_added_to_main_grad")
    assert layer.router.weight.grad.any()


def test_fp32_parameters_computed_in_bf16():
    layer = make_layer(dtype=torch.float32, precision="bf16")
    module = MainGradMoE(layer, TOKENS)
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    train_step(module, buffer, microbatches())
    rounded = make_layer()
    rounded.load_state_dict(layer.state_dict())
    other = GradientBuffer(rounded.parameters(), torch.float32)
    train_step(MainGradMoE(rounded, TOKENS), other, microbatches())
    for own, expected in zip(
        module.main_grad_parameters(), rounded.experts.parameters(), strict=False
    ):
        assert same_bits(own.main_grad, expected.main_grad)


def test_ranks_have_the_bits_of_one():
    layer = make_layer()
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    train_step(MainGradMoE(layer, TOKENS), buffer, microbatches())

    def on_rank(member, rank):
        own = make_layer(member)
        own.load_full_state_dict(layer.state_dict())
        own_buffer = GradientBuffer(own.parameters(), torch.float32)
        half = slice(0, 40) if rank == 0 else slice(40, TOKENS)
        batches = [(x[half], d_out[half]) for x, d_out in microbatches()]
        train_step(MainGradMoE(own, 50), own_buffer, batches)
        return [parameter.main_grad for parameter in own.experts.parameters()]

    for index, parts in enumerate(zip(*run_on_ranks(on_rank, 2), strict=True)):
        whole = list(layer.experts.parameters())[index].main_grad
        assert same_bits(torch.cat(parts), whole)


def test_gradient_blocks_are_refused():
    with pytest.raises(ValueError, match="layer: expected gradient_block None, got 8"):
        MainGradMoE(make_layer(gradient_block=8), TOKENS)


def test_the_router_learns_its_load():
    (x, _), *_ = microbatches()
    layer, ordinary = make_layer(scoring="sigmoid"), make_layer(scoring="sigmoid")
    MainGradMoE(layer, TOKENS)(x)
    ordinary(x)
    assert layer.expert_load.sum() == 2 * TOKENS
    assert torch.equal(layer.expert_load, ordinary.expert_load)


def test_tokens_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"expected shape \[..., 64\], got \[2, 32\]"):
        MainGradMoE(make_layer(), TOKENS)(torch.zeros(2, 32, dtype=BF16))
