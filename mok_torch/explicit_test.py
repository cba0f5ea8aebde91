"""The explicit calls: same bits as moe, contexts, main gradients, poisoned memory."""

import dataclasses

import pytest
import torch

from mok_torch import functional
from mok_torch.functional import MainGrads, MoKConfig, create_workspace, moe
from mok_torch.self_test import Case, run_on_ranks
from mok_torch.test_support import (
    as_bits,
    assert_close_everywhere,
    expected_of,
    routed_batch,
)

CASE = Case(
    "explicit", (150,), hidden=64, intermediate=40, experts=5, shared=24, scaled_shared=True
)
CONFIGS = {"default": MoKConfig(), "small ring": MoKConfig(macrobatch_size=128, minibatch_size=128)}


class Layer:
    """The arguments of one layer's explicit calls."""

    def __init__(self, case=CASE, config=None, workspace=None, dtype=torch.bfloat16, **changes):
        batch = routed_batch(case, dtype, **changes)
        self.batch = batch
        self.config = config
        self.workspace = workspace or create_workspace(
            config,
            None,
            device="cpu",
            num_local_tokens=sum(case.tokens),
            hidden_size=case.hidden,
            topk=case.topk,
            dtype=dtype,
        )
        shared = (None,) * 4 if batch.shared is None else batch.shared
        self.shared_scale = shared[3]
        self.tensors = (batch.x, batch.topk_weight, *shared[:3], *batch.weights)
        self.schedule = functional.build_schedule(
            self.workspace, config, batch.topk_idx, num_local_experts=case.experts
        )

    def _common(self):
        return self.config, self.workspace, self.schedule

    def forward(self, **options):
        options.setdefault("shared_scale", self.shared_scale)
        return functional.forward(*self._common(), *self.tensors, **options)

    def recompute(self):
        return functional.recompute_forward_context(
            *self._common(), *self.tensors, shared_scale=self.shared_scale
        )

    def backward(self, context, **options):
        options.setdefault("shared_scale", self.shared_scale)
        return functional.backward(
            *self._common(), context, self.batch.d_out, *self.tensors, **options
        )

    def autograd(self):
        """(out, the gradients in backward's order) of moe."""
        batch = self.batch
        out = moe(batch.x, batch.topk_idx, batch.topk_weight, *batch.weights, shared=batch.shared)
        shared = batch.shared or ()
        inputs = [batch.x, batch.topk_weight, *batch.weights, *(s for s in shared if s is not None)]
        return out.detach(), torch.autograd.grad(out, inputs, batch.d_out)


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(as_bits(one), as_bits(other)), index


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_as_moe(config, dtype):
    layer = Layer(config=config, dtype=dtype)
    expected_out, expected = layer.autograd()
    out, context = layer.forward()
    assert not out.requires_grad
    assert torch.equal(out, expected_out)
    assert_equal(layer.backward(context), expected)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_contexts_survive_and_can_be_recomputed(config):
    layer = Layer(config=config)
    _, expected = layer.autograd()
    _, context = layer.forward()
    _, other = layer.forward()
    for _ in range(3):
        layer.workspace.poison()
        assert_equal(layer.backward(context), expected)
    assert_equal(layer.backward(other), expected)
    recomputed = layer.recompute()
    for tensor in recomputed.ring:
        tensor.fill_(float("nan"))
    assert_equal(layer.backward(recomputed), expected)
    assert_equal(layer.backward(recomputed), expected)


def test_without_shared_expert():
    layer = Layer(dataclasses.replace(CASE, shared=0))
    _, expected = layer.autograd()
    gradients = layer.backward(layer.forward()[1])
    assert len(gradients) == 8 and gradients[5:] == (None, None, None)
    assert_equal(gradients[:5], expected)


def test_without_shared_scale():
    layer = Layer()
    layer.shared_scale = None
    layer.batch = dataclasses.replace(layer.batch, shared=layer.batch.shared._replace(scale=None))
    out, context = layer.forward()
    expected_out, expected = layer.autograd()
    assert torch.equal(out, expected_out)
    assert_equal(layer.backward(context), expected)


def test_swiglu_limit_is_the_last_positional_argument():
    layer = Layer()
    batch = layer.batch
    out, context = functional.forward(
        *layer._common(), *layer.tensors, 0.5, shared_scale=layer.shared_scale
    )
    expected = moe(
        batch.x,
        batch.topk_idx,
        batch.topk_weight,
        *batch.weights,
        shared=batch.shared,
        swiglu_limit=0.5,
    )
    assert torch.equal(out, expected)
    gradients = functional.backward(
        *layer._common(),
        context,
        batch.d_out,
        *layer.tensors,
        0.5,
        shared_scale=layer.shared_scale,
    )
    assert torch.equal(gradients[0], torch.autograd.grad(expected, batch.x, batch.d_out)[0])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_float32_weight_gradients(config):
    layer = Layer(config=config)
    rounded = layer.backward(layer.forward()[1])
    exact = layer.backward(layer.forward()[1], weight_grad_dtype=torch.float32)
    for one, other in zip(exact[2:8], rounded[2:8], strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one.bfloat16(), other)
    assert_equal(exact[:2], rounded[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_accumulation_into_main_grads(config, dtype):
    layer = Layer(config=config)
    exact = layer.backward(layer.forward()[1], weight_grad_dtype=torch.float32)[2:8]
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(g.shape, generator=generator).to(dtype) for g in exact]
    buffers = MainGrads(*(b.clone() for b in before))
    gradients = layer.backward(layer.forward()[1], main_grads=buffers)
    for index, (old, gradient) in enumerate(zip(before, exact, strict=True)):
        assert gradients[2 + index] is buffers[index]
        assert torch.equal(buffers[index], (old.float() + gradient).to(dtype))


def test_accumulation_of_routed_weights_only():
    layer = Layer()
    expected = layer.backward(layer.forward()[1])
    buffers = [torch.zeros(g.shape) for g in expected[2:5]]
    gradients = layer.backward(layer.forward()[1], main_grads=MainGrads(*buffers))
    assert all(gradients[2 + index] is buffer for index, buffer in enumerate(buffers))
    assert_equal(gradients[5:], expected[5:])


def test_empty_experts_among_poisoned_memory():
    """One of 256 experts has rows; nothing of the poison or of the others may come through."""
    sizes = {"hidden": 128, "intermediate": 512, "topk": 1, "input_scale": 0.02}
    case = Case("empty experts", (600,), experts=256, **sizes)
    layer = Layer(case, topk_idx=torch.full((600, 1), 100))
    used = torch.arange(256) == 100
    with torch.no_grad():
        for weight in layer.batch.weights:
            weight[~used] = float("nan")
    layer.workspace.poison()
    out, context = layer.forward()
    assert out.isfinite().all() and (out != 0).any()
    for tensor in context.ring:
        tensor[600:] = float("nan")
    layer.workspace.poison()
    gradients = layer.backward(context)
    assert all(gradient.isfinite().all() for gradient in gradients[:5])
    for gradient in gradients[2:5]:
        assert (gradient[used] != 0).any()
        assert (as_bits(gradient[~used]) == 0).all()

    # Again, in the memory of gradients that were there before.
    kept = [gradient.clone() for gradient in gradients[:5]]
    places = sorted(gradient.data_ptr() for gradient in gradients[2:5])
    for gradient in gradients[2:5]:
        gradient.fill_(float("nan"))
    del gradient, gradients
    gradients = layer.backward(context)
    assert sorted(gradient.data_ptr() for gradient in gradients[2:5]) == places
    assert_equal(gradients[:5], kept)

    # What the one expert computes is what it computes as the only one.
    weights = tuple(weight.detach()[used].requires_grad_() for weight in layer.batch.weights)
    changes = {"topk_idx": torch.zeros(600, 1, dtype=torch.int64), "weights": weights}
    alone, batch = Case("alone", (600,), experts=1, **sizes), layer.batch
    batch = dataclasses.replace(batch, **changes)
    names = ("out", "d_x", "d_topk_weight", "d_w_gate", "d_w_up", "d_w_down")
    tensors = (out, *gradients[:2], *(gradient[used] for gradient in gradients[2:5]))
    actual = dict(zip(names, tensors, strict=True))
    assert_close_everywhere(alone, batch, actual, expected_of(alone, batch, actual))

    # Added to buffers of NaN, the empty experts' gradients leave every bit alone.
    buffers = [torch.full(g.shape, float("nan")) for g in gradients[2:5]]
    for buffer in buffers:
        buffer.view(torch.int32).bitwise_xor_(0x1234)
        buffer[used] = 0
    before = [as_bits(buffer).clone() for buffer in buffers]
    layer.workspace.poison()
    layer.backward(layer.forward()[1], main_grads=MainGrads(*buffers))
    for buffer, bits, gradient in zip(buffers, before, gradients[2:5], strict=True):
        assert torch.equal(as_bits(buffer)[~used], bits[~used])
        assert torch.equal(buffer[used].bfloat16(), gradient[used])


def test_one_schedule_serves_several_layers():
    layer = Layer()
    other = Layer(dataclasses.replace(CASE, seed=3), workspace=layer.workspace)
    batch = dataclasses.replace(other.batch, topk_idx=layer.batch.topk_idx)
    other.batch, other.schedule = batch, layer.schedule
    expected_out, expected = other.autograd()
    _, context = layer.forward()
    other_out, other_context = other.forward()
    assert torch.equal(other_out, expected_out)
    assert_equal(layer.backward(context), layer.autograd()[1])
    assert_equal(other.backward(other_context), expected)


def test_schedules_survive_a_growing_workspace():
    layer = Layer()
    expected_out, expected = layer.autograd()
    _, context = layer.forward()
    layer.workspace.grow(1000)
    assert layer.workspace.num_local_tokens == 1000
    assert torch.equal(layer.forward()[0], expected_out)
    assert_equal(layer.backward(context), expected)


def test_schedule_info():
    topk_idx = torch.tensor([[0, 2], [2, -1], [2, 2]])

    def on_rank(member, rank):
        workspace = create_workspace(None, member, num_local_tokens=3, hidden_size=64, topk=2)
        local = 2 - rank
        routes = topk_idx[:2] if rank == 0 else topk_idx[2:]
        schedule = functional.build_schedule(workspace, None, routes, num_local_experts=local)
        return schedule.info, schedule.tokens_per_expert()

    (first, first_counts), (second, second_counts) = run_on_ranks(on_rank, 2)
    assert first_counts.tolist() == [1, 0] and second_counts.tolist() == [4]
    assert first_counts.dtype == torch.int64
    assert (first.num_tokens, second.num_tokens, second.num_tokens_total) == (2, 1, 3)
    assert (first.num_experts, first.first_expert, second.first_expert) == (3, 0, 2)
    assert (first.num_rows, second.num_rows, second.num_row_blocks) == (1, 4, 1)


@pytest.mark.parametrize("macrobatch", [None, 256])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_ring_is_a_function_of_the_inputs_whatever_its_memory_held(macrobatch, threads):
    """Rows without a route, in the last row block of each expert and behind all, are zero."""
    case = Case("ring", (700,), hidden=512, intermediate=512, experts=5, no_route_share=0.2)
    config = MoKConfig(macrobatch_size=macrobatch, minibatch_size=128, num_threads=threads)
    layer = Layer(case, config)
    rings, places = [], []
    for _ in range(3):
        _, context = layer.forward()
        rings.append([as_bits(tensor).clone() for tensor in context.ring])
        places.append([tensor.data_ptr() for tensor in context.ring])
        for tensor in context.ring:
            tensor.fill_(float("nan"))
        del tensor, context
    assert sorted(places[1]) == sorted(places[2]), "the memory is used again"
    assert all(map(torch.equal, rings[0], rings[1])) and all(map(torch.equal, rings[0], rings[2]))
    if macrobatch is None:
        used = torch.zeros(len(rings[0][0]), dtype=torch.bool)
        counts = layer.schedule.tokens_per_expert().tolist()
        begin = 0
        for count in counts:
            used[begin : begin + count] = True
            begin += -(-count // 128) * 128
        for tensor in rings[0][:3]:
            assert (tensor[~used] == 0).all() and (tensor[used] != 0).any(dim=1).all()
        assert 128 < (~used).sum() and begin < len(used)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"weight_grad_dtype": torch.float16}, TypeError, "weight_grad_dtype: expected"),
        ({"main_grads": MainGrads(torch.zeros(5, 40, 64))}, TypeError, "main_grads.routed_up"),
        (
            {"main_grads": MainGrads(*[torch.zeros(5, 40, 63)] * 3)},
            ValueError,
            "main_grads.routed_gate: expected shape",
        ),
        (
            {"main_grads": MainGrads(*[torch.zeros(5, 64, 40).mT] * 3)},
            ValueError,
            "main_grads.routed_gate: expected a contiguous",
        ),
        ({"shared_scale": torch.zeros(7)}, ValueError, "shared_scale: expected shape"),
        (
            {"main_grads": MainGrads(*[torch.zeros(5, 40, 64)] * 2, torch.zeros(5, 64, 40))},
            ValueError,
            "main_grads.routed_up: shares memory with main_grads.routed_gate",
        ),
        (
            {"main_grads": MainGrads(*[torch.zeros(5, 40, 64, device="meta")] * 3)},
            ValueError,
            "main_grads.routed_gate: expected device cpu, got meta",
        ),
        ({"main_grads": [None] * 6}, TypeError, "main_grads: expected a MainGrads or None"),
        ({"swiglu_limit": 7.0}, ValueError, "swiglu_limit: the forward .* had None, got 7.0"),
    ],
)
def test_wrong_backward_options(change, error, text):
    layer = Layer()
    _, context = layer.forward()
    with pytest.raises(error, match=text):
        layer.backward(context, **change)
    assert_equal(layer.backward(context), layer.autograd()[1])


def test_arguments_that_do_not_fit_the_schedule():
    layer = Layer()
    other = Layer(dataclasses.replace(CASE, tokens=(20,)), workspace=layer.workspace)
    _, context = layer.forward()
    with pytest.raises(ValueError, match=r"context.ring"):
        other.backward(context)
    other.schedule = layer.schedule
    with pytest.raises(ValueError, match="x: expected the schedule's 150 tokens, got 20"):
        other.forward()
    fewer = Layer(dataclasses.replace(CASE, experts=4), workspace=layer.workspace)
    fewer.schedule = layer.schedule
    with pytest.raises(ValueError, match="routed_gate_weights: expected the schedule's 5 experts"):
        fewer.forward()
    with pytest.raises(TypeError, match="schedule: expected a Schedule, got NoneType"):
        layer.schedule = None
        layer.forward()


WRONG_RINGS = {
    "list": (tuple, TypeError, "context.ring: expected a Ring, got tuple"),
    "none": (lambda ring: ring._replace(up=None), TypeError, "context.ring.up: expected a torch"),
    "dtype": (
        lambda ring: ring._replace(gate=ring.gate.to(torch.float8_e4m3fn)),
        TypeError,
        r"context.ring.gate: expected torch.bfloat16 \(the dtype of x\), got torch.float8",
    ),
    "device": (
        lambda ring: ring._replace(x=ring.x.to("meta")),
        ValueError,
        "context.ring.x: expected device cpu, got meta",
    ),
    "expanded": (
        lambda ring: ring._replace(shared_up=ring.shared_up[:1].expand(ring.shared_up.shape)),
        ValueError,
        "context.ring.shared_up: expected a contiguous",
    ),
    "short": (
        lambda ring: ring._replace(shared_gate=ring.shared_gate[1:]),
        ValueError,
        "context.ring.shared_gate: expected shape",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_RINGS)
def test_a_ring_that_the_engine_may_not_touch(wrong):
    change, error, text = WRONG_RINGS[wrong]
    layer = Layer(config=CONFIGS["small ring"])
    _, context = layer.forward()
    with pytest.raises(error, match=text):
        layer.backward(dataclasses.replace(context, ring=change(context.ring)))
    assert_equal(layer.backward(context), layer.autograd()[1])


def test_the_context_of_another_batch():
    """Of the same sizes: only what lies in the ring can tell."""
    layer = Layer()
    other = Layer(dataclasses.replace(CASE, seed=1), workspace=layer.workspace)
    (_, context), (_, wrong) = layer.forward(), other.forward()
    with pytest.raises(ValueError, match=r"context.ring.x: row \d+ is not token \d+ of x; is the"):
        layer.backward(wrong)
    assert_equal(layer.backward(context), layer.autograd()[1])


def test_wrong_members_of_a_context():
    layer = Layer()
    _, context = layer.forward()
    with pytest.raises(TypeError, match="context: expected a ForwardContext, got tuple"):
        layer.backward(tuple(context.ring))
    with pytest.raises(TypeError, match=r"context.kept_macrobatches: expected an int, got str"):
        layer.backward(dataclasses.replace(context, kept_macrobatches="1"))
    with pytest.raises(ValueError, match=r"context.kept_macrobatches: expected 0 to 1, got 2"):
        layer.backward(dataclasses.replace(context, kept_macrobatches=2))


def test_a_workspace_is_required_and_must_fit_the_schedule():
    layer = Layer()
    _, context = layer.forward()
    other = create_workspace(None, num_local_tokens=150, hidden_size=64, topk=CASE.topk + 1)
    layer.workspace = other
    for call in (layer.forward, layer.recompute, lambda: layer.backward(context)):
        with pytest.raises(ValueError, match="schedule: built for rank 0 of 1 with K = "):
            call()
    layer.workspace = None
    for call in (layer.forward, layer.recompute, lambda: layer.backward(context)):
        with pytest.raises(TypeError, match="workspace: expected a Workspace, got NoneType"):
            call()
    routes = layer.batch.topk_idx
    with pytest.raises(TypeError, match="workspace: expected a Workspace, got NoneType"):
        functional.build_schedule(None, None, routes, num_local_experts=5)


@pytest.mark.parametrize("count, error", [(-1, ValueError), (2**31, ValueError), (5.0, TypeError)])
def test_num_local_experts_is_checked_before_anything_is_allocated(count, error):
    layer = Layer()
    with pytest.raises(error, match="num_local_experts: expected"):
        functional.build_schedule(
            layer.workspace, None, layer.batch.topk_idx, num_local_experts=count
        )
