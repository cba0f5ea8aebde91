"""What reaches the engine of a GPU, without one: sizes, addresses, errors. Needs a CUDA build."""

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from mok_torch import _C, cuda_engine, cuda_passes, passes
from mok_torch import workspace as workspaces
from mok_torch.agreement import Request
from mok_torch.config import MoKConfig
from mok_torch.cuda_passes import BackwardOperands
from mok_torch.cuda_test_support import CASE, HostEngine, layer_tensors, make_space
from mok_torch.errors import ResourceExhaustedError
from mok_torch.passes import LayerCall
from mok_torch.plan import make_plan, schedule_words
from mok_torch.test_support import routed_batch


@pytest.fixture
def space():
    return make_space()


def plan_of(**settings):
    return make_plan(MoKConfig(**settings), 1, 40, CASE.topk, CASE.experts, device_type="cuda")


def build(space, plan):
    routes = routed_batch(CASE, torch.bfloat16).topk_idx
    return cuda_passes.build_schedule(space, plan, routes, CASE.experts, 0)[0]


def make_call(space, schedule, plan):
    layer = layer_tensors(space)
    return LayerCall(space, plan, schedule, layer, passes.new_ring(layer, plan.ring_rows), 0.5)


def test_schedule(space):
    plan = plan_of(minibatch_size=128, fwd_num_comm_sms=3, num_sms=100)
    schedule = build(space, plan)
    ((name, layer, args),) = space.engine.calls
    assert name == "schedule" and space.engine.num_checks == 1
    sizes = (layer.num_local_experts, layer.first_expert, layer.num_experts, layer.num_tokens)
    assert sizes == (5, 0, 5, 40)
    assert layer.minibatch_rows == 128 and layer.macrobatch_rows == plan.ring_rows
    assert layer.num_sms == 100
    assert args.schedule == schedule.words.data_ptr() and args.topk_idx_bytes == 8
    assert schedule.words.numel() == plan.schedule_words


def test_a_schedule_keeps_its_ids(space):
    """What the caller does with the tensor of ids later is of no consequence."""
    routes = routed_batch(CASE, torch.bfloat16).topk_idx
    for dtype in (torch.int64, torch.int32):
        given = routes.to(dtype, copy=True)
        schedule, _ = cuda_passes.build_schedule(space, plan_of(), given, 5, 0)
        given.fill_(-1)
        assert torch.equal(schedule.routes, routes.int())
        assert schedule.routing == (schedule.routes.data_ptr(), 4, schedule.words.data_ptr())
        assert schedule.routes.data_ptr() % 16 == 0  # five experts: the words end elsewhere


def test_a_schedule_larger_than_planned_is_refused(space):
    space.engine.sizes.schedule_bytes = 1 << 30
    with pytest.raises(RuntimeError, match="the schedule takes 1073741824 bytes, planned"):
        build(space, plan_of())


def test_forward(space):
    plan = plan_of(fwd_num_comm_sms=3, bwd_num_comm_sms=4, num_sms=64)
    call = make_call(space, build(space, plan), plan)
    out = torch.empty_like(call.layer.x)
    passes._run_cuda_forward(call, out)
    name, layer, args = space.engine.calls[-1]
    assert name == "forward" and layer.num_comm_sms == 3 and layer.num_sms == 64
    assert (layer.intermediate, layer.shared_intermediate) == (40, 24)
    assert args.out == out.data_ptr() and args.schedule == call.schedule.words.data_ptr()
    given = args.layer
    routed = (given.routed.gate, given.routed.up, given.routed.down)
    shared = (given.shared.gate, given.shared.up, given.shared.down)
    addresses = [given.x, given.topk_weight, *routed, *shared, given.shared_scale]
    assert addresses == passes.addresses(call.layer.tensors())
    assert (given.routed.intermediate, given.shared.intermediate) == (40, 24)
    assert given.swiglu_limit == 0.5
    context = args.context
    ring = [context.ring_x, context.ring_gate, context.ring_up]
    ring += [context.shared_gate, context.shared_up]
    assert ring == passes.addresses(call.ring) and context.ring_rows == plan.ring_rows


def test_backward_of_saved_words(space):
    plan = plan_of(bwd_num_comm_sms=4)
    words = build(space, plan).words
    call = make_call(space, None, plan)
    schedule = cuda_passes.load_schedule(words, call.layer, plan, space)
    assert torch.equal(schedule.routes, routed_batch(CASE, torch.bfloat16).topk_idx.int())
    operands = BackwardOperands(
        1, 0, (2, 3, 4), ((5, 6, 7), _C.FP32, True), ((8, 0, 9), _C.BF16, False)
    )
    passes._run_cuda_backward(call._replace(schedule=schedule), operands)
    name, layer, args = space.engine.calls[-1]
    assert name == "backward" and layer.num_comm_sms == 4
    assert args.topk_idx == schedule.routes.data_ptr() and args.topk_idx_bytes == 4
    assert args.layer.shared.gate == call.layer.shared.gate.data_ptr()
    assert (args.d_out, args.kept_macrobatches) == (1, 0)
    assert (args.d_x, args.d_topk_weight, args.d_shared_scale) == (2, 3, 4)
    for grads, expected in ((args.d_routed, operands.routed), (args.d_shared, operands.shared)):
        assert ((grads.gate, grads.up, grads.down), grads.dtype, grads.accumulate) == expected


def test_words_that_kernels_cannot_read_where_they_are(space):
    plan = plan_of()
    words = build(space, plan).words
    moved = torch.empty(len(words) + 64, dtype=torch.int32)
    begin = next(i for i in range(64) if moved[i:].data_ptr() % 256 == 16)
    moved[begin : begin + len(words)] = words
    layer = make_call(space, None, plan).layer
    loaded = cuda_passes.load_schedule(moved[begin : begin + len(words)], layer, plan, space)
    assert loaded.words.data_ptr() != moved[begin:].data_ptr()
    assert torch.equal(loaded.words, words)


def test_words_of_another_size_are_refused(space):
    plan = plan_of()
    words = build(space, plan).words
    layer = make_call(space, None, plan).layer
    with pytest.raises(ValueError, match=f"schedule_words: expected {len(words)} words"):
        cuda_passes.load_schedule(words[1:], layer, plan, space)
    with pytest.raises(ValueError, match="a workspace of several ranks may not grow"):
        grown = make_space()
        grown.ep_size = 2
        cuda_passes.load_schedule(words, layer, plan, grown)


def test_a_schedule_from_before_the_workspace_grew_is_refused(space):
    plan = plan_of()
    schedule = build(space, plan)
    schedule = schedule._replace(sizes=schedule.sizes._replace(max_tokens=32))
    call = make_call(space, schedule, plan)
    passes._run_cuda_forward(call, call.layer.x)  # one rank: its own tokens count
    space.engine.ep_size = 2
    with pytest.raises(ValueError, match="built for at most 32 tokens of a rank, but by now"):
        passes._run_cuda_forward(call, call.layer.x)
    with pytest.raises(ValueError, match="build it again"):
        call.cuda_pass(space.engine, is_backward=True)


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
        self.name, self.log = name, log

    def record_event(self):
        return self.name

    def wait_event(self, event):
        self.log.append((self.name, "after", event))


@pytest.fixture
def engine():
    """An engine of one of two ranks with GPUs of their own; the last call was on stream 1."""
    made = HostEngine()
    made.log, made.stream = [], 2
    made._stream_object = lambda stream: FakeStream(stream, made.log)
    made._heap = [SimpleNamespace(record_stream=lambda stream: None)]
    made._state = made._heap[0]
    made._engine.report_error = lambda args: made.log.append((args.stream, "error"))
    made._engine.forward = lambda struct, queue: made.log.append((queue[1], "forward"))
    made._scratch = SimpleNamespace(
        numel=lambda: 1 << 20, data_ptr=lambda: 256, record_stream=lambda stream: None
    )
    return made


def call_of(scratch_bytes):
    return SimpleNamespace(struct=None, scratch_bytes=scratch_bytes)


def forward(engine, scratch_bytes=8):
    engine.forward(engine.stream, call_of(scratch_bytes))


def test_a_report_follows_the_last_call_on_another_stream(engine):
    engine.report_error(_C.OP_SCHEDULE, 1, "text")
    assert engine.log == [(2, "after", 1), (2, "error")]
    engine.stream = 1
    forward(engine)
    assert engine.log[2:] == [(1, "after", 2), (1, "forward")]


@pytest.fixture
def found(engine):
    """What the engine's kernels have found; raised once, as the C API does."""
    errors = []

    def check(stream):
        engine.log.append((stream, "check"))
        if errors:
            raise errors.pop()

    engine._engine.check = check
    engine._engine.build_schedule = lambda struct, queue: engine.log.append(queue[1:])
    return errors


def build_next(engine):
    engine.build_schedule(engine.stream, call_of(8))


def test_what_kernels_found_is_raised_where_the_next_call_would_run(engine, found):
    """Every rank hears of it from its own kernels, so that nobody is told."""
    found.append(ValueError("expert id"))
    with pytest.raises(ValueError, match="expert id") as raised:
        build_next(engine)
    assert raised.value.is_shared
    build_next(engine)
    queued = [(2, "check"), (2, _C.CUDA_WHOLE)]
    assert engine.log == [(2, "after", 1), (2, "check"), *queued]
    found.append(ValueError("expert id"))
    engine.stream = 1
    with pytest.raises(ValueError, match="expert id"):
        engine.check()
    assert engine.log[4:] == [(1, "after", 2), (1, "check")]


def test_what_makes_a_workspace_unusable_is_told(engine, found):
    """That this rank has left, for one: no kernel of the others has found it."""
    engine._engine.check_usable = lambda: (_ for _ in ()).throw(RuntimeError("rank 0 has left"))
    with pytest.raises(RuntimeError, match="has left") as raised:
        build_next(engine)
    assert not hasattr(raised.value, "is_shared")


def test_a_capture_leaves_what_was_found_to_a_later_call(engine, found):
    found.append(ValueError("expert id"))
    engine.capturing = True
    build_next(engine)
    engine.check()
    assert found
    engine.capturing = False
    with pytest.raises(ValueError, match="expert id"):
        build_next(engine)


def test_ranks_that_share_a_gpu_hear_in_the_same_call(engine, found):
    engine.shares_device = True
    engine._group = SimpleNamespace(exchange=lambda _, value, __: [value])
    engine._timeout_seconds = 1
    engine.synchronize = lambda: engine.log.append("synchronize")
    build_next(engine)
    assert engine.log[1:3] == ["synchronize", (2, "check")]


def test_a_rank_that_hears_does_not_come_to_count_experts(engine, found):
    sent = []
    group = {"rank": 0, "size": 2}
    engine._group = SimpleNamespace(
        exchange=lambda _, value, __: sent.append(value) or [2, 3], **group
    )
    engine._timeout_seconds = 1
    found.append(MemoryError("expert id"))
    with pytest.raises(MemoryError, match="expert id"):
        engine.owned_experts(2, 0)
    assert isinstance(sent[0], ResourceExhaustedError)  # as another process can read it
    assert engine.owned_experts(2, 0) == (0, 5) and sent[1] == 2


def test_the_place_of_an_error(engine):
    """A rank that fails in a pass has promised its rows; one that fails before has not."""
    reports = []
    engine._engine.report_error = lambda args: reports.append((args.place, args.code))
    engine.report_error(_C.OP_SCHEDULE, 3, "text")
    engine.report_error(_C.OP_FORWARD, 3, "text")
    engine.report_error(_C.OP_BACKWARD, 3, "text")
    places = [_C.CUDA_IN_SCHEDULE, _C.CUDA_IN_PASS, _C.CUDA_IN_PASS]
    assert reports == [(place, 3) for place in places]


def request(tokens):
    return Request(CASE.hidden, CASE.topk, torch.bfloat16, tokens, 1.0, "cuda")


def test_growth_raises_what_the_old_engine_found(space, monkeypatch):
    """On every rank, and before anything is replaced."""
    old, error = space.engine, ValueError("expert id of rank 0")
    monkeypatch.setattr(workspaces, "CudaEngine", lambda *given: HostEngine(128))
    old.finish = lambda: (_ for _ in ()).throw(error)
    for answers, text in (
        (lambda _, own, __: [own], "^expert id of rank 0"),
        (lambda _, own, __: [own, TypeError("dtype")], "^expert id of rank 0"),
    ):
        space._group = SimpleNamespace(exchange=answers, size=1)
        with pytest.raises(ValueError, match=text) as raised:
            space._grow(request(128))
        assert raised.value.is_shared and space.engine is old
    old.finish = lambda: None
    space._group = SimpleNamespace(exchange=lambda _, own, __: [own, TypeError("dtype")], size=2)
    with pytest.raises(TypeError, match="rank 1: dtype"):
        space._grow(request(128))
    space._group = SimpleNamespace(exchange=lambda _, own, __: [own, own], size=2)
    space._grow(request(128))
    assert space.engine is not old and space.num_local_tokens == 128


def test_graphs_keep_what_they_were_captured_with(space, monkeypatch):
    """Through growth, and where an unusable workspace is replaced."""
    monkeypatch.setattr(workspaces, "CudaEngine", lambda *given: HostEngine(128))
    captured = space.engine
    captured.was_captured, captured.finish = True, lambda: None
    space._group = SimpleNamespace(exchange=lambda _, own, __: [own], size=1)
    space._grow(request(128))
    space.engine.was_captured = True
    other = make_space()
    other.keep_graphs_of(space)
    assert other._captured_engines == [captured, space.engine]


def test_what_makes_a_workspace_unusable(space):
    engine = space.engine
    engine._engine.check_usable = engine._engine.check_ranks = lambda: None
    assert space.is_usable()
    for name in ("check_usable", "check_ranks"):
        # Of the class of the error of the rank that has left.
        setattr(engine._engine, name, lambda: (_ for _ in ()).throw(MemoryError("rank 1 has left")))
        assert not space.is_usable()
        setattr(engine._engine, name, lambda: None)


def test_the_default_stream_is_not_asked_whether_it_is_captured(engine):
    """It cannot be; others are asked in every call."""
    asked = []
    engine.is_capturing = lambda: bool(asked.append(engine.stream))
    for stream in (0, 2, 0, 2):
        engine.stream = stream
        forward(engine)
    assert asked == [2, 2]
    assert [entry for entry in engine.log if "after" in entry] == [
        (0, "after", 1),
        (2, "after", 0),
        (0, "after", 2),
        (2, "after", 0),
    ]


def test_calls_of_two_threads_are_queued_one_after_the_other(engine):
    second = threading.Thread(target=engine.report_error, args=(_C.OP_SCHEDULE, 1, "text"))

    def launch(struct, queue):
        second.start()
        second.join(0.05)  # it has to wait
        engine.log.append((queue[1], "forward"))

    engine._engine.forward = launch
    forward(engine)
    second.join()
    assert [what for _, what, *_ in engine.log] == ["after", "forward", "error"]


def test_streams_are_the_ones_that_were_meant(monkeypatch):
    """The default stream is 0, which torch.cuda.ExternalStream takes for "a new one"."""
    device, recorded = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device))
    memory = SimpleNamespace(record_stream=recorded.append)
    for stream, allocated_on in ((0, 5), (5, 0), (5, 5), (0, 0)):
        cuda_engine.keep_for_stream(stream, device, allocated_on, memory)
    assert recorded == [("default", device), (5, device)]
    assert cuda_engine.stream_object(0, device) == ("default", device)


def test_scratch_is_kept_and_grows(engine):
    """Calls share it; what a graph was captured with outlives growth."""
    engine._scratch = torch.empty(100, dtype=torch.uint8)
    used = []
    engine._engine.forward = lambda struct, queue: used.append(queue[0])
    engine._stream = engine.stream
    first = engine._scratch.data_ptr()
    forward(engine, 100)
    forward(engine, 7)
    assert used == [first, first]
    forward(engine, 1000)
    grown = engine._scratch
    assert grown.numel() == 1000 and used[-1] == grown.data_ptr() and not engine._kept_scratch
    engine.capturing = True
    forward(engine, 1000)  # the graph holds the address now
    assert used[-1] == grown.data_ptr() and engine.was_captured
    forward(engine, 5000)  # belongs to the graph
    assert engine._scratch is grown
    engine.capturing = False
    forward(engine, 1001)
    assert engine._kept_scratch == [grown] and engine._scratch.numel() == 2000
    assert engine.info()["scratch_bytes"] >= 2000


def test_scratch_that_grows_is_not_there_twice(engine, monkeypatch):
    engine._scratch = torch.empty(1000, dtype=torch.uint8)
    first, allocate, alive = weakref.ref(engine._scratch), cuda_engine.aligned_bytes, []

    def watch(num_bytes, device):
        if num_bytes:
            alive.append(first() is not None)
        return allocate(num_bytes, device)

    monkeypatch.setattr(cuda_engine, "aligned_bytes", watch)
    engine.stream = engine._stream
    forward(engine, 5000)
    assert engine._scratch.numel() == 5000 and alive == [False]


class _CallsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, engine):
        ctx.engine = engine
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.engine.backward(ctx.engine.stream, call_of(8))
        return grad, None


def test_ranks_in_one_thread_of_autograd_do_not_wait_for_each_other(engine):
    engine.shares_device = True
    engine._group = SimpleNamespace(exchange=lambda _, value, __: [value])
    engine._timeout_seconds = 1
    engine._engine.backward = lambda struct, queue: engine.log.append(queue[2])
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="set_multithreading_enabled") as raised:
        _CallsBackward.apply(x, engine).sum().backward()
    assert raised.value.is_shared
    del engine.log[:]
    with torch.autograd.set_multithreading_enabled(False):
        _CallsBackward.apply(x, engine).sum().backward()
    assert [part for part in engine.log if isinstance(part, int)] == list(cuda_engine.PASS_PARTS)
