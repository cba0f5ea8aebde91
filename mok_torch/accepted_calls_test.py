"""Calls that are recognised are launched unchecked; whatever a check looks at is noticed.

On the host's memory, through a workspace whose engine only records. Needs a CUDA build.
"""

import pytest
import torch

from mok_torch import _C, functional
from mok_torch.cuda_test_support import CASE, let_host_be_gpu, make_space
from mok_torch.functional import MainGrads, MoKConfig, SharedExpert
from mok_torch.ring import DeviceRing
from mok_torch.test_support import routed_batch

BF16 = torch.bfloat16


@pytest.fixture
def space(monkeypatch):
    """Its GPU is the host."""
    let_host_be_gpu(monkeypatch)
    return make_space()


class Inputs:
    """moe's and the explicit calls' arguments; attributes may be replaced between calls."""

    def __init__(self, space, requires_grad=False):
        batch = routed_batch(CASE, BF16)
        own = [t.detach().clone() for t in (batch.x, batch.topk_weight, *batch.weights)]
        self.x, self.topk_weight, self.gate, self.up, self.down = own
        self.shared = [tensor.detach().clone() for tensor in batch.shared[:3]]
        self.scale = torch.ones(CASE.tokens[0])
        self.topk_idx = batch.topk_idx
        self.space, self.config, self.limit, self.num_experts = space, None, None, None
        if requires_grad:
            for tensor in self.leaves():
                tensor.requires_grad_()

    def leaves(self):
        return [
            *(self.x, self.topk_weight, self.gate, self.up, self.down),
            *(*self.shared, self.scale),
        ]

    def schedule(self, **options):
        options = {"num_local_experts": CASE.experts, "num_experts": self.num_experts} | options
        return functional.build_schedule(self.space, self.config, self.topk_idx, **options)

    def explicit(self):
        routed = (self.gate, self.up, self.down)
        return (self.x, self.topk_weight, *self.shared, *routed, self.limit)

    def forward(self, schedule):
        common = (self.config, self.space, schedule)
        return functional.forward(*common, *self.explicit(), shared_scale=self.scale)

    def backward(self, schedule, context, d_out, **options):
        common = (self.config, self.space, schedule, context, d_out)
        return functional.backward(*common, *self.explicit(), shared_scale=self.scale, **options)

    def moe(self):
        return functional.moe(
            self.x,
            self.topk_idx,
            self.topk_weight,
            *(self.gate, self.up, self.down),
            shared=SharedExpert(*self.shared, self.scale),
            workspace=self.space,
            config=self.config,
            swiglu_limit=self.limit,
            num_experts=self.num_experts,
        )


def fresh_plans(space, function) -> int:
    """Plans that a call made: 0 if it was recognised."""
    before = space.engine.num_plans
    function()
    return space.engine.num_plans - before


def test_equal_calls_are_planned_once(space):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    out, context = inputs.forward(schedule)
    d_out = torch.randn_like(out)
    inputs.backward(schedule, context, d_out)
    assert fresh_plans(space, inputs.moe) == 2
    for _ in range(2):  # other data, in other memory
        inputs.x, inputs.gate = inputs.x.clone(), inputs.gate.clone()
        assert fresh_plans(space, inputs.schedule) == 0
        assert fresh_plans(space, lambda: inputs.forward(schedule)) == 0
        assert fresh_plans(space, lambda: inputs.backward(schedule, context, d_out)) == 0
        assert fresh_plans(space, inputs.moe) == 0
        _, _, args = space.engine.calls[-1]
        assert args.layer.x == inputs.x.data_ptr()
        assert args.layer.routed.gate == inputs.gate.data_ptr()
    other = inputs.schedule()  # of another batch of the same size
    assert fresh_plans(space, lambda: inputs.forward(other)) == 0


def struct_of(space) -> dict:
    """What the last call told the C API, but for addresses of memory that is new in every call."""
    name, layer, args = space.engine.calls[-1]
    taken = {"name": name, "tokens": layer.num_tokens, "comm": layer.num_comm_sms}
    for part in ("routed", "shared"):
        weights = getattr(args.layer, part)
        for field in ("gate", "up", "down", "intermediate"):
            taken[f"{part}.{field}"] = getattr(weights, field)
    for field in ("x", "topk_weight", "shared_scale", "swiglu_limit"):
        taken[field] = getattr(args.layer, field)
    taken["ring_rows"], taken["bytes"] = args.context.ring_rows, args.topk_idx_bytes
    if name == "backward":
        for part in ("d_routed", "d_shared"):
            grads = getattr(args, part)
            taken[part] = (grads.dtype, grads.accumulate)
        taken["kept"] = args.kept_macrobatches
    return taken


@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_recognised_call_tells_the_engine_the_same(space, limit):
    inputs = Inputs(space)
    inputs.limit, inputs.config = limit, MoKConfig(fwd_num_comm_sms=3, bwd_num_comm_sms=4)
    schedule = inputs.schedule()

    def backward():
        _, context = inputs.forward(schedule)
        inputs.backward(schedule, context, inputs.x.clone(), weight_grad_dtype=torch.float32)

    for call in (lambda: inputs.forward(schedule), backward, inputs.moe):
        call()
        first = struct_of(space)
        assert fresh_plans(space, call) == 0
        assert struct_of(space) == first


def resized(inputs):
    inputs.x = inputs.x[:39]


def as_double(inputs):
    inputs.topk_weight.data = inputs.topk_weight.data.double()  # the same object


def other_width(inputs):
    inputs.up.data = inputs.up.data[:, :32].clone()


def other_device(inputs):
    inputs.gate = torch.empty(inputs.gate.shape, dtype=BF16, device="meta")


def no_tensor(inputs):
    inputs.down = inputs.down.tolist()


def sparse(inputs):
    inputs.x = inputs.x.to_sparse()


def missing(inputs):
    inputs.shared[1] = None


def boolean_limit(inputs):
    inputs.limit = True  # equals the 1.0 that was accepted


def wrong_config(inputs):
    inputs.config = [1]  # not hashable


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (resized, ValueError, "topk_weight|top_experts|router_weights|topk_idx|x: expected"),
        (as_double, TypeError, "expected torch.float32, got torch.float64"),
        (other_width, ValueError, r"expected shape \[El, I, H\] = \[5, 40, 64\]"),
        (other_device, ValueError, "expected device cpu"),
        (no_tensor, TypeError, "expected a torch.Tensor, got list"),
        (sparse, TypeError, "expected layout torch.strided"),
        (missing, TypeError, "expected a torch.Tensor, got NoneType"),
        (boolean_limit, TypeError, "swiglu_limit: expected a number or None, got bool"),
        (wrong_config, TypeError, "config: expected a MoKConfig or None, got list"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("kind", ["moe", "forward", "backward"])
def test_what_changes_is_checked(space, kind, change, error, text):
    inputs = Inputs(space)
    inputs.limit = 1.0
    schedule = inputs.schedule()
    _, context = inputs.forward(schedule)
    d_out = torch.randn_like(inputs.x)
    call = {
        "moe": inputs.moe,
        "forward": lambda: inputs.forward(schedule),
        "backward": lambda: inputs.backward(schedule, context, d_out),
    }[kind]
    call()
    assert fresh_plans(space, call) == 0
    change(inputs)
    count = len(space.engine.calls)
    with pytest.raises(error, match=text):
        call()
    assert len(space.engine.calls) == count  # nothing was queued


def test_what_is_not_contiguous_is_copied_every_time(space):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    inputs.forward(schedule)
    inputs.gate = inputs.gate.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        for call in (lambda: inputs.forward(schedule), inputs.moe):
            assert fresh_plans(space, call) > 0
            assert space.engine.calls[-1][2].layer.routed.gate != inputs.gate.data_ptr()


def test_a_context_that_does_not_fit_is_refused(space):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    out, context = inputs.forward(schedule)
    d_out = torch.randn_like(out)
    inputs.backward(schedule, context, d_out)
    ring = context.ring
    wrong = [
        ("ring", ring._replace(buffer=ring.buffer[:-1]), ValueError, "context.ring.buffer"),
        ("ring", ring._replace(buffer=ring.buffer.float()), TypeError, "context.ring.buffer"),
        ("layout", context.layout._replace(size=1), ValueError, "context.layout: expected"),
        ("layout", None, ValueError, "context.layout: expected"),
        ("ring", None, TypeError, "context.ring: expected a Ring, got NoneType"),
        ("kept_macrobatches", 2, ValueError, "context.kept_macrobatches: expected 0 to 1"),
        ("kept_macrobatches", True, TypeError, "context.kept_macrobatches: expected an int"),
        ("swiglu_limit", 3.0, ValueError, "the forward of this context had 3.0, got None"),
    ]
    for field, value, error, text in wrong:
        kept = getattr(context, field)
        setattr(context, field, value)
        with pytest.raises(error, match=text):
            inputs.backward(schedule, context, d_out)
        setattr(context, field, kept)
    assert fresh_plans(space, lambda: inputs.backward(schedule, context, d_out)) == 0


def test_main_gradients_are_known_by_their_addresses(space):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    out, context = inputs.forward(schedule)
    d_out = torch.randn_like(out)
    weights = [inputs.gate, inputs.up, inputs.down, *inputs.shared]
    buffers = [torch.zeros(weight.shape) for weight in weights]

    def call(*given):
        return inputs.backward(schedule, context, d_out, main_grads=MainGrads(*given))

    call(*buffers)
    assert fresh_plans(space, lambda: call(*buffers)) == 0
    results = call(*buffers)
    assert all(own is buffer for own, buffer in zip(results[2:8], buffers, strict=True))
    grads = space.engine.calls[-1][2].d_shared
    assert (grads.down, grads.accumulate) == (buffers[5].data_ptr(), 1)
    with pytest.raises(ValueError, match=r"shares memory with main_grads\.routed_gate"):
        call(buffers[0], buffers[0].view_as(buffers[1]), *buffers[2:])
    with pytest.raises(TypeError, match=r"main_grads\.shared_up: expected torch\.float32"):
        call(*buffers[:4], buffers[4].double(), buffers[5])
    own = [weight.clone() for weight in weights]
    call(*own)
    inputs.gate = own[0]  # which the key does not see
    with pytest.raises(ValueError, match="routed_gate: shares memory with a tensor that the back"):
        call(*own)
    results = inputs.backward(schedule, context, d_out)
    assert results[2].dtype == BF16 and space.engine.calls[-1][2].d_routed.accumulate == 0


def test_transforms_are_refused(space):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    inputs.forward(schedule)
    x = inputs.x

    def forward_of(given):
        inputs.x = given
        return inputs.forward(schedule)[0]

    with pytest.raises(NotImplementedError):
        torch.func.vmap(lambda _: forward_of(x))(torch.zeros(2))
    with pytest.raises(NotImplementedError):
        torch.func.functionalize(forward_of)(x)
    inputs.x = x
    assert fresh_plans(space, lambda: inputs.forward(schedule)) == 0


def test_a_schedule_of_other_sizes_is_not_mistaken(space):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    inputs.forward(schedule)
    assert fresh_plans(space, lambda: inputs.schedule(num_local_experts=6)) > 0
    fewer = inputs.schedule(num_local_experts=4)
    with pytest.raises(ValueError, match="routed_gate_weights: expected the schedule's 4 experts"):
        inputs.forward(fewer)
    with pytest.raises(TypeError, match="num_local_experts: expected an int"):
        inputs.schedule(num_local_experts=5.0)
    schedule.place = "rank 1 of 2"
    with pytest.raises(ValueError, match="schedule: built for rank 1 of 2"):
        inputs.forward(schedule)


def test_gradients_of_moe(space):
    """The same as the explicit calls'; recognised from the second time on."""
    inputs = Inputs(space, requires_grad=True)
    d_out = torch.randn_like(inputs.x)
    kept = []
    for repeat in range(3):
        out = inputs.moe()
        assert out.requires_grad
        plans = fresh_plans(space, lambda out=out: torch.autograd.grad(out, inputs.leaves(), d_out))
        assert plans == (1 if repeat == 0 else 0)
        name, layer, args = space.engine.calls[-1]
        kept.append(args.kept_macrobatches)
        assert name == "backward" and layer.num_tokens == 40
        assert args.layer.x == inputs.x.data_ptr() and args.d_out == d_out.data_ptr()
        assert args.d_shared_scale and args.d_routed.gate and args.d_shared.down
    assert kept == [1, 1, 1]  # each has a forward of its own
    with torch.no_grad():
        assert not inputs.moe().requires_grad


def test_gradients_that_nobody_wants_have_no_memory(space):
    inputs = Inputs(space)
    inputs.up.requires_grad_()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(inputs.moe().sum(), [inputs.up])
        assert gradient.shape == inputs.up.shape
        args = space.engine.calls[-1][2]
        assert args.d_routed.up and not args.d_routed.gate and not args.d_shared.gate
    inputs.up.requires_grad_(False)  # the same tensors and addresses
    assert not inputs.moe().requires_grad


@pytest.mark.parametrize("macrobatch", [None, 128])
def test_a_second_backward_recomputes_what_the_first_overwrote(space, macrobatch):
    """And so no copy of the ring is made."""
    inputs = Inputs(space, requires_grad=True)
    inputs.config = MoKConfig(macrobatch_size=macrobatch)
    out = inputs.moe()
    rings, kept = [], []
    for _ in range(2):
        torch.autograd.grad(out, inputs.leaves(), torch.ones_like(out), retain_graph=True)
        args = space.engine.calls[-1][2]
        rings.append(args.context.ring_x)
        kept.append(args.kept_macrobatches)
    assert rings[0] == rings[1]
    assert kept == [1, 0]


def test_a_leading_dimension(space):
    inputs = Inputs(space, requires_grad=True)
    shape = (5, 8)
    inputs.x = inputs.x.detach().view(*shape, -1).requires_grad_()
    inputs.topk_weight = inputs.topk_weight.detach().view(*shape, -1).requires_grad_()
    inputs.scale = inputs.scale.detach().view(*shape, 1).requires_grad_()
    inputs.topk_idx = inputs.topk_idx.view(*shape, -1)
    for _ in range(2):
        out = inputs.moe()
        gradients = torch.autograd.grad(out, inputs.leaves(), torch.ones_like(out))
        for gradient, leaf in zip(gradients, inputs.leaves(), strict=True):
            assert gradient.shape == leaf.shape


def test_saved_tensors_that_hooks_have_moved(space):
    """Offloading may bring them back at any address."""
    inputs = Inputs(space, requires_grad=True)

    def unpack(tensor):
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        return memory[1:].copy_(tensor.flatten()).view(tensor.shape)

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
            out = inputs.moe()
        torch.autograd.grad(out, inputs.leaves(), torch.ones_like(out))
        name, _, args = space.engine.calls[-1]
        assert name == "backward" and args.schedule % 64 == 0


@pytest.mark.parametrize("macrobatch", [None, 128])
def test_no_double_backward(space, macrobatch):
    """The first one is right all the same, also after another one has overwritten the ring."""
    inputs = Inputs(space, requires_grad=True)
    inputs.config = MoKConfig(macrobatch_size=macrobatch)
    out = inputs.moe()
    torch.autograd.grad(out.sum(), inputs.leaves(), retain_graph=True)
    gradients = torch.autograd.grad(out.sum(), inputs.leaves(), create_graph=True)
    name, _, args = space.engine.calls[-1]
    assert name == "backward" and args.kept_macrobatches == 0
    assert args.d_x == gradients[0].data_ptr()
    for gradient in gradients:
        assert gradient.requires_grad
        with pytest.raises(NotImplementedError, match="mok_torch: the MoE layer has no double"):
            gradient.sum().backward(retain_graph=True)


def test_errors_are_reported_where_the_others_are(space):
    """At the operation in whose place the rank fails."""
    reported = []
    space.ep_size, space.engine.ep_size = 2, 2
    space.engine.owned_experts = lambda local, total: (0, 10)
    space.engine.report_error = lambda operation, *others: reported.append(operation)
    inputs = Inputs(space, requires_grad=True)
    inputs.num_experts = 10
    schedule = inputs.schedule()
    out, context = inputs.forward(schedule)
    result = inputs.moe()
    leaves, d_out = inputs.leaves(), torch.ones_like(out)
    calls = (
        (_C.OP_SCHEDULE, inputs.schedule),
        (_C.OP_SCHEDULE, inputs.moe),
        (_C.OP_FORWARD, lambda: inputs.forward(schedule)),
        (_C.OP_BACKWARD, lambda: inputs.backward(schedule, context, d_out)),
        (
            _C.OP_BACKWARD,
            lambda: torch.autograd.grad(result, leaves, d_out, retain_graph=True),
        ),
    )
    for operation, call in calls:
        for _ in range(2):  # checked, recognised
            space.engine.failure = MemoryError("no memory")
            with pytest.raises(MemoryError, match="no memory"):
                call()
            assert reported == [operation]
            del reported[:]
            call()


def test_a_call_in_another_stream_keeps_its_memory(space, monkeypatch):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    _, context = inputs.forward(schedule)
    kept = []
    monkeypatch.setattr(
        "mok_torch.explicit_cuda.keep_for_stream",
        lambda stream, device, allocated_on, memory: kept.append(
            (stream, allocated_on, memory.data_ptr())
        ),
    )
    space.engine._follow_last_call = lambda stream, capturing: None
    space.engine.stream = 7
    inputs.backward(schedule, context, torch.ones_like(inputs.x))
    words, buffer = schedule.engine.words, context.ring.buffer
    assert kept == [(7, 1, words.data_ptr()), (7, 1, buffer.data_ptr())]


def test_the_ring_is_views_of_one_buffer(space):
    inputs = Inputs(space)
    schedule = inputs.schedule()
    _, context = inputs.forward(schedule)
    rows, buffer = schedule.plan.ring_rows, context.ring.buffer
    (only,) = context.ring  # as tensors that autograd can save
    assert only is buffer and type(context.ring)(only) == DeviceRing(buffer)
    views = context.layout.views(buffer)
    shapes = [(rows, 64), (rows, 40), (rows, 40), (40, 24), (40, 24)]
    assert [tuple(view.shape) for view in views] == shapes
    args = space.engine.calls[-1][2].context
    addresses = [args.ring_x, args.ring_gate, args.ring_up, args.shared_gate, args.shared_up]
    assert addresses == [view.data_ptr() for view in views]
    assert views.gate.data_ptr() == args.ring_gate
    for number, view in enumerate(views):
        view.fill_(number)
    assert [view.unique().tolist() for view in views] == [[0], [1], [2], [3], [4]]


def test_outputs_are_contiguous_whatever_the_inputs_are(space):
    inputs = Inputs(space, requires_grad=True)
    for _ in range(2):  # checked, recognised
        schedule = inputs.schedule()
        out, context = inputs.forward(schedule)
        grads = inputs.backward(schedule, context, out)
        for made, like in zip((out, *grads), (inputs.x, *inputs.leaves()), strict=True):
            assert type(made) is torch.Tensor and not made.requires_grad
            assert made.shape == like.shape and made.dtype == like.dtype
            assert made.stride() == torch.empty(like.shape).stride()
        # Contiguous as PyTorch sees it, with a stride of its own where the size is 1.
        inputs.x = torch.as_strided(inputs.x.detach(), (1, 40, 64), (7, 64, 1))
        inputs.topk_weight = inputs.topk_weight.detach().view(1, 40, 3)
        inputs.scale = inputs.scale.detach().view(1, 40)
