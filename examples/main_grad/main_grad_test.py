"""The buffers get what autograd would have given, added once; what has no tokens stays as it is."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from examples.main_grad import main_grad
from examples.main_grad.gradient_buffer import GradientBuffer
from examples.main_grad.main_grad import accumulate
from mok_torch import MoELayer
from mok_torch.functional import MoKConfig
from mok_torch.reference import relative_error
from mok_torch.self_test import run_on_ranks

HIDDEN, EXPERTS, TOKENS = 64, 6, 90
BF16 = torch.bfloat16


def make_layer(group=None, **options) -> MoELayer:
    torch.manual_seed(1)
    options = {"dtype": BF16, "shared_intermediate_size": 24, "shared_gate": True} | options
    options = {"group": group, "config": MoKConfig(num_threads=1)} | options
    return main_grad.make_layer(HIDDEN, 40, EXPERTS, 2, **options)


def make_ordinary_layer(**options) -> MoELayer:
    layer = make_layer(**options)
    layer.gradient_accumulation_fusion = False
    return layer


def expert_parameters(layer: MoELayer) -> list:
    """Those whose gradients the kernels add."""
    named = dict(layer.named_parameters())
    return [p for name, p in named.items() if name.split(".")[-1] in ("w_gate", "w_up", "w_down")]


def microbatches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, d_out) of each."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(count, 2, TOKENS, HIDDEN, generator=generator).to(BF16)
    return [tuple(pair) for pair in values]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_buffers_hold_the_sum_of_the_microbatches(dtype):
    layer = make_layer()
    buffer = GradientBuffer(layer.parameters(), dtype)
    d_inputs = accumulate(layer, buffer, microbatches())
    ordinary = make_ordinary_layer()
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
        accumulate(layer, buffer, [batch])
        single.append([parameter.main_grad for parameter in layer.parameters()])
    layer = make_layer()
    accumulate(layer, GradientBuffer(layer.parameters(), dtype), microbatches())
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
    buffer = GradientBuffer(layer.parameters(), dtype)
    # -0.0 + 0.0 would be +0.0, and a NaN's bits would change if it were added to.
    unusual = torch.tensor([-0.0, float("nan"), 1e-40, 1.0]).to(dtype)
    buffer.buffer.copy_(unusual.repeat(len(buffer.buffer) // 4))
    before = [p.main_grad.clone() for p in layer.experts.parameters()]
    buffer.start_microbatch()
    x, d_out = microbatches(1)[0]
    layer(x.clone().requires_grad_()).backward(d_out)
    for parameter, old in zip(layer.experts.parameters(), before, strict=True):
        assert same_bits(parameter.main_grad[2:], old[2:])
        assert not same_bits(parameter.main_grad[:2], old[:2])
        assert parameter.grad_added_to_main_grad and parameter.grad is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_bit(use_reentrant):
    layer = make_layer()
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    expected_d_inputs = accumulate(layer, buffer, microbatches())
    expected = buffer.buffer.clone()

    def checkpointed(x):
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    d_inputs = accumulate(checkpointed, buffer, microbatches())
    assert same_bits(buffer.buffer, expected)
    assert all(map(torch.equal, d_inputs, expected_d_inputs))


def test_a_small_ring_can_be_used_twice():
    """Several macrobatches: the first backward overwrites the ring, the second recomputes."""
    config = MoKConfig(num_threads=1, macrobatch_size=128, minibatch_size=128)
    layer = make_layer(shared_intermediate_size=0, shared_gate=False, config=config)
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    x, d_out = microbatches(1)[0]
    out = layer(x.requires_grad_())
    first, second = [], []
    for results in (first, second):
        buffer.zero()
        results += torch.autograd.grad(out, [x], d_out, retain_graph=True)
        results.append(buffer.buffer.clone())
    assert all(map(same_bits, first, second)) and first[1].any()


def test_without_the_attribute_autograd_gets_no_gradient():
    layer = make_layer(shared_intermediate_size=0, shared_gate=False)
    for parameter in expert_parameters(layer):
        parameter.main_grad = torch.zeros(parameter.shape)
    x, d_out = microbatches(1)[0]
    layer(x).backward(d_out)
    for parameter in expert_parameters(layer):
        assert parameter.grad is None and parameter.main_grad.any()
        assert not hasattr(parameter, "grad_added_to_main_grad")
    assert layer.router.weight.grad.any()


def test_fp32_parameters_computed_in_bf16():
    layer = make_layer(dtype=torch.float32, precision="bf16")
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    accumulate(layer, buffer, microbatches())
    rounded = make_layer()
    rounded.load_state_dict(layer.state_dict())
    other = GradientBuffer(rounded.parameters(), torch.float32)
    accumulate(rounded, other, microbatches())
    for own, expected in zip(expert_parameters(layer), rounded.experts.parameters(), strict=False):
        assert same_bits(own.main_grad, expected.main_grad)


def test_ranks_have_the_bits_of_one():
    layer = make_layer()
    buffer = GradientBuffer(layer.parameters(), torch.float32)
    accumulate(layer, buffer, microbatches())

    def on_rank(member, rank):
        own = make_layer(member)
        own.load_full_state_dict(layer.state_dict())
        own_buffer = GradientBuffer(own.parameters(), torch.float32)
        half = slice(0, 40) if rank == 0 else slice(40, TOKENS)
        batches = [(x[half], d_out[half]) for x, d_out in microbatches()]
        accumulate(own, own_buffer, batches)
        return [parameter.main_grad for parameter in own.experts.parameters()]

    for index, parts in enumerate(zip(*run_on_ranks(on_rank, 2), strict=True)):
        whole = list(layer.experts.parameters())[index].main_grad
        assert same_bits(torch.cat(parts), whole)
