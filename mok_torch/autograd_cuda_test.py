"""Training on one GPU: autograd, checkpointing, accumulation, compilation, CUDA graphs."""

import contextlib
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mok_torch import MoELayer, functional
from mok_torch.functional import moe
from mok_torch.reference import relative_error
from mok_torch.self_test import Case
from mok_torch.test_support import assert_matches_reference, routed_batch

BF16 = torch.bfloat16
CASE = Case("training", (512,), hidden=256, intermediate=128, experts=8, topk=2, shared=64)


def leaves():
    """moe's arguments; leaves on the GPU."""
    batch = routed_batch(CASE, BF16)
    tensors = (batch.x, batch.topk_weight, *batch.weights, *batch.shared[:3])
    return batch.topk_idx.cuda(), [t.detach().cuda().requires_grad_() for t in tensors]


def call(idx, tensors, **options):
    x, weight, w_gate, w_up, w_down, *shared = tensors
    shared = functional.SharedExpert(*shared)
    return moe(x, idx, weight, w_gate, w_up, w_down, shared=shared, **options)


def gradients(out, tensors):
    generator = torch.Generator(device="cuda").manual_seed(0)
    d_out = torch.randn(out.shape, generator=generator, device="cuda").to(out.dtype)
    return torch.autograd.grad(out, tensors, d_out)


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for index, (own, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(own, other), index


@pytest.mark.parametrize("macrobatch", [None, 256])
def test_backwards_in_any_order_and_more_than_once(macrobatch):
    idx, tensors = leaves()
    config = functional.MoKConfig(macrobatch_size=macrobatch)
    expected = gradients(call(idx, tensors, config=config), tensors)
    outs = [call(idx, tensors, config=config) for _ in range(3)]
    d_out = torch.ones_like(outs[0])
    first = torch.autograd.grad(outs[2], tensors, d_out, retain_graph=True)
    assert_equal(torch.autograd.grad(outs[2], tensors, d_out), first)
    assert_equal(torch.autograd.grad(outs[0], tensors, d_out), first)
    assert_equal(gradients(outs[1], tensors), expected)


def test_gradients_that_nobody_wants():
    idx, tensors = leaves()
    expected = gradients(call(idx, tensors), tensors)
    for wanted in range(len(tensors)):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        (own,) = gradients(call(idx, inputs), [inputs[wanted]])
        assert torch.equal(own, expected[wanted]), wanted


@pytest.mark.parametrize("experts", [1, 3, 5, 6, 7])
@pytest.mark.parametrize("shared", [0, 40])
def test_numbers_of_experts(experts, shared):
    """Counters and schedules of numbers that are no multiple of anything."""
    case = Case("experts", (150,), experts=experts, topk=1, shared=shared, scaled_shared=True)
    assert_matches_reference(case, BF16, rounded=True, device="cuda")


def test_a_rank_without_experts():
    """Only the shared expert's output is left."""
    idx, tensors = leaves()
    idx.fill_(-1)
    scale = torch.rand(512, device="cuda").requires_grad_()
    tensors.append(scale)
    expected = gradients(call(idx, tensors), tensors)
    for position in (2, 3, 4):
        weight = tensors[position]
        tensors[position] = weight.detach()[:0].clone().requires_grad_()
    for _ in range(2):
        own = gradients(call(idx, tensors), tensors)
        for position, (gradient, other) in enumerate(zip(own, expected, strict=True)):
            if position in (2, 3, 4):
                assert gradient.shape[0] == 0 and (other == 0).all()
            else:
                assert torch.equal(gradient, other), position


def test_the_scale_of_the_shared_expert_has_a_gradient():
    """Also alone, and in either of its shapes."""
    case = Case("scale", (300,), shared=40, scaled_shared=True)
    expected = assert_matches_reference(case, BF16, device="cuda")["d_shared_scale"]
    batch = routed_batch(case, BF16)
    tensors = [t.detach().cuda() for t in (batch.x, batch.topk_weight, *batch.weights)]
    for shape in ((300,), (300, 1)):
        scale = batch.shared.scale.detach().cuda().view(shape).requires_grad_()
        weights = [t.detach().cuda() for t in batch.shared[:3]]
        for _ in range(2):
            out = call(batch.topk_idx.cuda(), [*tensors, *weights, scale])
            (gradient,) = torch.autograd.grad(out, [scale], batch.d_out.cuda())
            assert torch.equal(gradient.view(300).cpu(), expected)


@pytest.mark.parametrize("macrobatch", [None, 256])
def test_the_operator_and_the_function_agree(macrobatch):
    """A mode that looks at operators gets one, with the same bits."""
    idx, tensors = leaves()
    config = functional.MoKConfig(macrobatch_size=macrobatch)
    expected = gradients(call(idx, tensors, config=config), tensors)
    with CountOperators() as seen:
        out = call(idx, tensors, config=config)
        assert_equal(gradients(out, tensors), expected)
    assert {"mok::moe_forward", "mok::moe_backward"} <= seen.names
    with pytest.raises(NotImplementedError, match="no double backward"):
        out = call(idx, tensors, config=config)
        (d_x,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
        d_x.sum().backward()


@pytest.mark.parametrize("enter", [torch.device, torch.set_default_device])
def test_a_default_device_leaves_the_call_to_the_function(enter):
    """It is a mode, but one that looks at nothing."""
    idx, tensors = leaves()
    expected = gradients(call(idx, tensors), tensors)
    try:
        with contextlib.nullcontext() if (entered := enter("cuda")) is None else entered:
            out = call(idx, tensors)
            assert type(out.grad_fn).__name__ == "_MoeBackward"
            assert_equal(gradients(out, tensors), expected)
    finally:
        torch.set_default_device(None)


class CountOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_what_changes_between_calls_is_noticed():
    idx, tensors = leaves()
    expected = gradients(call(idx, tensors), tensors)
    call(idx, tensors)
    few = [t.detach()[:100].requires_grad_() for t in tensors[:2]] + tensors[2:]
    out = call(idx[:100], few)
    assert torch.equal(out, call(idx, tensors)[:100])
    tensors[2].data = tensors[2].data.transpose(1, 2).contiguous().transpose(1, 2)
    assert_equal(gradients(call(idx, tensors), tensors), expected)
    assert_equal(gradients(call(idx.int(), tensors), tensors), expected)
    with torch.no_grad():
        assert not call(idx, tensors).requires_grad
    with torch.autocast("cuda", dtype=BF16):
        wide = [t.detach().float().requires_grad_() for t in tensors]
        for own, other in zip(gradients(call(idx, wide), wide), expected, strict=True):
            assert torch.equal(own.to(other.dtype), other)
    tensors[4].data = tensors[4].data.float()
    with pytest.raises(TypeError, match=r"w_down: expected torch\.bfloat16"):
        call(idx, tensors)


def test_saved_tensors_may_be_offloaded():
    idx, tensors = leaves()
    expected = gradients(call(idx, tensors), tensors)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = call(idx, tensors)
    assert_equal(gradients(out, tensors), expected)


def test_a_schedule_and_a_context_may_be_used_on_other_streams():
    """Their memory is not handed out again while a kernel of another stream uses it."""
    idx, tensors = leaves()
    x, weight, w_gate, w_up, w_down, *shared = (t.detach() for t in tensors)
    arguments = (x, weight, *shared, w_gate, w_up, w_down)
    workspace = functional.create_workspace(
        device="cuda", num_local_tokens=512, hidden_size=256, topk=2
    )
    d_out, stream = torch.randn_like(x), torch.cuda.Stream()

    def run(side):
        torch.cuda._sleep(2_000_000)  # the host gets far ahead: only order keeps the kernels apart
        schedule = functional.build_schedule(workspace, None, idx, num_local_experts=8)
        _, context = functional.forward(None, workspace, schedule, *arguments)
        with torch.cuda.stream(side):
            results = functional.backward(None, workspace, schedule, context, d_out, *arguments)
        del schedule, context
        # What would overwrite them if they were free.
        for _ in range(50):
            torch.full((1 << 18,), float("nan"), device="cuda")
        torch.cuda.synchronize()
        return results

    expected = run(torch.cuda.current_stream())
    for _ in range(20):
        assert_equal(run(stream), expected)


def test_checkpointing():
    idx, tensors = leaves()
    expected = gradients(call(idx, tensors), tensors)
    out = checkpoint(lambda *given: call(idx, given), *tensors, use_reentrant=False)
    assert_equal(gradients(out, tensors), expected)


def test_compiled():
    idx, tensors = leaves()
    expected = gradients(call(idx, tensors), tensors)
    compiled = torch.compile(call, fullgraph=True)
    assert_equal(gradients(compiled(idx, tensors), tensors), expected)


def test_main_gradients_accumulate():
    idx, tensors = leaves()
    x, weight, w_gate, w_up, w_down, *shared = (t.detach() for t in tensors)
    workspace = functional.get_workspace(
        device="cuda", num_local_tokens=512, hidden_size=256, topk=2
    )
    schedule = functional.build_schedule(workspace, None, idx, num_local_experts=8)
    arguments = (x, weight, *shared, w_gate, w_up, w_down)
    d_out = torch.randn_like(x)

    def run(**options):
        _, context = functional.forward(None, workspace, schedule, *arguments)
        return functional.backward(None, workspace, schedule, context, d_out, *arguments, **options)

    written = run(weight_grad_dtype=torch.float32)
    buffers = [torch.full(g.shape, 0.25, device="cuda") for g in written[2:8]]
    added = run(main_grads=functional.MainGrads(*buffers))
    for buffer, gradient, result in zip(buffers, written[2:8], added[2:8], strict=True):
        assert result is buffer and torch.equal(buffer, gradient + 0.25)


def test_a_layer_trains_as_its_copy_on_the_cpu():
    torch.manual_seed(0)
    layer = MoELayer(128, 96, 8, 2, shared_intermediate_size=64, shared_gate=True, dtype=BF16)
    on_gpu = copy.deepcopy(layer).cuda()
    x = torch.randn(400, 128).to(BF16)
    d_out = torch.randn(400, 128).to(BF16)
    layer(x).backward(d_out)
    for _ in range(2):  # accumulates
        on_gpu(x.cuda()).backward(d_out.cuda())
    for (name, own), other in zip(on_gpu.named_parameters(), layer.parameters(), strict=True):
        assert relative_error(own.grad.cpu().float() / 2, other.grad.float()) < 2e-2, name


def test_a_graph_of_a_whole_step_equals_eager():
    idx, tensors = leaves()
    d_out = torch.randn(512, 256, device="cuda").to(BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(call(idx, tensors), tensors, d_out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(call(idx, tensors), tensors, d_out)
    for routing in (torch.randint(8, (512, 2)), torch.full((512, 2), 3), torch.full((512, 2), -1)):
        idx.copy_(routing)
        d_out.normal_()
        graph.replay()
        assert_equal(captured, torch.autograd.grad(call(idx, tensors), tensors, d_out))


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("buffer_dtype", [BF16, torch.float32])
def test_gradients_go_into_main_grad(weight_dtype, buffer_dtype):
    """Of two microbatches: the bits of the explicit calls; and again, captured into a graph."""
    idx, (x, weight, *read) = leaves()
    parameters = [torch.nn.Parameter(tensor.detach().to(weight_dtype)) for tensor in read]
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape, dtype=buffer_dtype, device="cuda")
        parameter.grad_added_to_main_grad = False
    buffers = [parameter.main_grad for parameter in parameters]
    d_out = torch.randn_like(x)

    def step():
        for _ in range(2):
            out = call(idx, (x, weight, *parameters), gradient_accumulation_fusion=True)
            torch.autograd.grad(out, x, d_out)

    step()
    workspace = functional.get_workspace(
        device="cuda", num_local_tokens=512, hidden_size=256, topk=2
    )
    schedule = functional.build_schedule(workspace, None, idx, num_local_experts=8)
    arguments = [tensor.detach() for tensor in (x, weight, *read[3:], *read[:3])]
    expected = functional.MainGrads(*map(torch.zeros_like, buffers))
    for _ in range(2):
        _, context = functional.forward(None, workspace, schedule, *arguments)
        common = (None, workspace, schedule, context, d_out, *arguments)
        functional.backward(*common, main_grads=expected)
    assert_equal(buffers, expected)
    assert all(parameter.grad_added_to_main_grad for parameter in parameters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for buffer in buffers:
        buffer.zero_()
    graph.replay()
    assert_equal(buffers, expected)
