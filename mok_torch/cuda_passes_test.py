"""What reaches the engine of a GPU, without one: sizes, addresses, errors. Needs a CUDA build."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

from mok_torch import _C, cuda_engine, cuda_passes, passes
from mok_torch.checks import check_layer
from mok_torch.config import MoKConfig
from mok_torch.plan import make_plan, schedule_words
from mok_torch.self_test import Case
from mok_torch.test_support import routed_batch

CASE = Case("host", (40,), hidden=64, intermediate=40, experts=5, topk=3, shared=24)


class RecordingEngine:
    """Takes calls on the host's memory, and keeps what it was given."""

    device = torch.device("cpu")

    def __init__(self):
        self.calls = []
        self.memory = SimpleNamespace(
            schedule_bytes=400,
            schedule_scratch_bytes=50,
            forward_scratch_bytes=60,
            backward_scratch_bytes=70,
            result_offset=128,
            expert_rows_offset=256,
        )

    def check(self):
        self.calls.append(("check",))

    def owned_experts(self, num_local_experts, num_experts):
        return 0, num_experts or num_local_experts

    def layer_memory(self, layer):
        return self.memory

    def scratch(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def build_schedule(self, layer, args):
        self.calls.append(("schedule", layer, args))

    def forward(self, layer, args):
        self.calls.append(("forward", layer, args))

    def backward(self, layer, args):
        self.calls.append(("backward", layer, args))


class FakeWorkspace:
    hidden_size, topk, dtype = CASE.hidden, CASE.topk, torch.bfloat16
    device = torch.device("cpu")
    ep_size = 1
    num_local_tokens = 64

    def __init__(self):
        self.engine = RecordingEngine()
        self.reported = []

    def reporting_errors(self, operation, whole_call):
        self.reported.append((operation, whole_call))
        return torch.no_grad()  # any context will do


@pytest.fixture
def space():
    return FakeWorkspace()


def plan_of(**settings):
    return make_plan(MoKConfig(**settings), 1, 40, CASE.topk, CASE.experts, device_type="cuda")


def build(space, plan, whole_call=True):
    routes = routed_batch(CASE, torch.bfloat16).topk_idx
    return cuda_passes.build_schedule(space, plan, routes, CASE.experts, 0, whole_call)


def make_call(space, schedule, plan):
    batch = routed_batch(CASE, torch.bfloat16)
    weights = [weight.detach() for weight in batch.weights]
    shared = [tensor.detach() for tensor in batch.shared[:3]]
    layer = check_layer(
        batch.x.detach(), batch.topk_weight.detach(), weights, (*shared, None), space
    )
    ring = passes.new_ring(layer, plan.ring_rows)
    return passes.LayerCall(space, plan, schedule, layer, ring, 0.5)


def test_schedule(space):
    plan = plan_of(minibatch_size=128, fwd_num_comm_sms=3)
    schedule = build(space, plan)
    (_, (name, layer, args)) = space.engine.calls
    assert name == "schedule" and space.engine.calls[0] == ("check",)
    assert space.reported == [(_C.OP_SCHEDULE, True)]
    sizes = (layer.num_local_experts, layer.first_expert, layer.num_experts, layer.num_tokens)
    assert sizes == (5, 0, 5, 40)
    assert layer.minibatch_rows == 128 and layer.macrobatch_rows == plan.ring_rows
    assert args.schedule == schedule.words.data_ptr()
    assert args.topk_idx == schedule.routes.data_ptr() and args.topk_idx_bytes == 8
    assert schedule.words.numel() == plan.schedule_words


def test_a_schedule_larger_than_planned_is_refused(space):
    space.engine.memory.schedule_bytes = 1 << 30
    with pytest.raises(RuntimeError, match="the schedule takes 1073741824 bytes, planned"):
        build(space, plan_of())


def test_forward(space):
    plan = plan_of(fwd_num_comm_sms=3, bwd_num_comm_sms=4)
    call = make_call(space, build(space, plan), plan)
    out = torch.empty_like(call.layer.x)
    cuda_passes.run_forward(call, call.fill, out)
    name, layer, args = space.engine.calls[-1]
    assert name == "forward" and layer.num_comm_sms == 3
    assert (layer.intermediate, layer.shared_intermediate) == (40, 24)
    assert args.out == out.data_ptr() and args.schedule == call.schedule.words.data_ptr()
    assert args.layer.x == call.layer.x.data_ptr()
    assert args.layer.routed.down == call.layer.down.data_ptr()
    assert args.layer.swiglu_limit == 0.5
    assert args.context.ring_rows == plan.ring_rows
    assert args.context.ring_up == call.ring.up.data_ptr()


def test_backward_of_saved_words(space):
    plan = plan_of(bwd_num_comm_sms=4)
    words = build(space, plan).words
    call = make_call(space, None, plan)
    schedule = cuda_passes.load_schedule(words, call.layer, plan, space)
    assert torch.equal(schedule.routes, routed_batch(CASE, torch.bfloat16).topk_idx.int())
    assert schedule.routes.data_ptr() % 16 == 0  # with five experts, where the words end elsewhere
    call = call._replace(schedule=schedule)
    args = _C.CudaBackwardArgs()
    call.fill(args)
    cuda_passes.run_backward(call, args)
    name, layer, args = space.engine.calls[-1]
    assert name == "backward" and layer.num_comm_sms == 4
    assert args.topk_idx == schedule.routes.data_ptr() and args.topk_idx_bytes == 4
    assert args.layer.shared.gate == call.layer.shared.gate.data_ptr()


def test_words_of_another_size_are_refused(space):
    plan = plan_of()
    words = build(space, plan).words
    layer = make_call(space, None, plan).layer
    with pytest.raises(ValueError, match=f"schedule_words: expected {len(words)} words"):
        cuda_passes.load_schedule(words[1:], layer, plan, space)
    with pytest.raises(ValueError, match="a workspace of several ranks may not grow"):
        grown = FakeWorkspace()
        grown.ep_size = 2
        cuda_passes.load_schedule(words, layer, plan, grown)


def test_a_schedule_from_before_the_workspace_grew_is_refused(space):
    plan = plan_of()
    schedule = dataclasses.replace(build(space, plan), max_tokens=32)
    call = make_call(space, schedule, plan)
    cuda_passes.run_forward(call, call.fill, call.layer.x)  # one rank: its own tokens count
    space.ep_size = 2
    with pytest.raises(ValueError, match="built for at most 32 tokens of a rank, but by now"):
        cuda_passes.run_forward(call, call.fill, call.layer.x)
    with pytest.raises(ValueError, match="build it again"):
        cuda_passes.run_backward(call, _C.CudaBackwardArgs())


def test_what_the_kernels_wrote(space):
    schedule = build(space, plan_of())
    schedule.words[32:36] = torch.tensor([3, 40], dtype=torch.int64).view(torch.int32)
    schedule.words[64:69] = torch.tensor([100, 0, 7, 129, 4])
    assert schedule.tokens_per_expert().tolist() == [100, 0, 7, 129, 4]
    info = schedule.info()
    assert (info.num_row_blocks, info.num_tokens_total, info.num_rows) == (3, 40, 240)
    assert (info.num_tokens, info.num_experts, info.first_expert) == (40, 5, 0)


def test_words_on_both_kinds_of_device():
    assert schedule_words("cpu", 0, 3, 0) == _C.SCHEDULE_HEADER_WORDS
    assert schedule_words("cuda", 0, 3, 0) == _C.CUDA_SCHEDULE_HEADER_WORDS + 3
    assert schedule_words("cuda", 40, 3, 5) > schedule_words("cuda", 40, 3, 4)


class FakeStream:
    """Logs what is queued on it."""

    def __init__(self, name, log):
        self.cuda_stream, self.log = name, log

    def record_event(self):
        return self.cuda_stream

    def wait_event(self, event):
        self.log.append((self.cuda_stream, "after", event))


@pytest.fixture
def engine(monkeypatch):
    """A CudaEngine of one of two ranks with GPUs of their own; `current` is the current stream."""
    log = []
    streams = [FakeStream(1, log), FakeStream(2, log)]
    memory = SimpleNamespace(record_stream=lambda stream: None)
    made = object.__new__(cuda_engine.CudaEngine)
    made.current, made.log = streams, log
    made.device, made.memory = torch.device("cpu"), SimpleNamespace(error_scratch_bytes=8)
    made.was_captured = made._poisoned = False
    made._group = SimpleNamespace(shares_device=False)
    made._heap, made._state, made._stream = [memory], memory, streams[0]
    made._lock = threading.Lock()
    made._engine = SimpleNamespace(
        report_error=lambda args: log.append((args.stream, "error")),
        forward=lambda layer, args: log.append((args.stream, "forward")),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_a_report_follows_the_last_call_on_another_stream(engine):
    engine.report_error(_C.OP_SCHEDULE, 1, "text")
    assert engine.log == [(2, "after", 1), (2, "error")]
    engine.current.reverse()
    engine.forward(None, _C.CudaForwardArgs())
    assert engine.log[2:] == [(1, "after", 2), (1, "forward")]


def test_calls_of_two_threads_are_queued_one_after_the_other(engine):
    second = threading.Thread(target=engine.report_error, args=(_C.OP_SCHEDULE, 1, "text"))

    def forward(layer, args):
        second.start()
        second.join(0.05)  # it has to wait
        engine.log.append((args.stream, "forward"))

    engine._engine.forward = forward
    engine.forward(None, _C.CudaForwardArgs())
    second.join()
    assert [what for _, what, *_ in engine.log] == ["after", "forward", "error"]


class _CallsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, engine):
        ctx.engine = engine
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.engine.backward(None, _C.CudaBackwardArgs())
        return grad, None


def test_ranks_in_one_thread_of_autograd_do_not_wait_for_each_other(engine):
    engine._group = SimpleNamespace(shares_device=True, exchange=lambda value, timeout: [value])
    engine._timeout_seconds = 1
    engine._engine.backward = lambda layer, args: engine.log.append(args.part)
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="set_multithreading_enabled") as raised:
        _CallsBackward.apply(x, engine).sum().backward()
    assert raised.value.is_shared
    del engine.log[:]
    with torch.autograd.set_multithreading_enabled(False):
        _CallsBackward.apply(x, engine).sum().backward()
    assert [part for part in engine.log if isinstance(part, int)] == list(cuda_engine.PASS_PARTS)
