"""A rank whose host fails in a call on a GPU tells the others. Needs a CUDA build, no GPU."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

from mok_torch import _C, cuda_engine, explicit, explicit_cuda, functional, passes
from mok_torch import workspace as workspaces
from mok_torch.agreement import Request
from mok_torch.config import MoKConfig
from mok_torch.cuda_engine import CudaEngine
from mok_torch.cuda_test_support import CASE, HostEngine, let_host_be_gpu, make_space
from mok_torch.groups import InProcessMember
from mok_torch.main_grads import MainGrads
from mok_torch.self_test import run_on_ranks
from mok_torch.test_support import routed_batch


@pytest.fixture
def space(monkeypatch):
    """Of the first of two ranks; space.reported: the operations that the others were told of."""
    let_host_be_gpu(monkeypatch)
    made = make_space()
    made.reported = []
    made.ep_size = made.engine.ep_size = 2
    made.engine.owned_experts = lambda local, total: (0, total)
    made.engine.report_error = lambda operation, *others: made.reported.append(operation)
    return made


class Calls:
    """The calls of a layer of two ranks with CASE's tensors."""

    def __init__(self, space, config=None):
        batch = routed_batch(CASE, torch.bfloat16)
        self.common, self.topk_idx = (config or MoKConfig(), space), batch.topk_idx
        self.x, self.topk_weight = batch.x.detach(), batch.topk_weight.detach()
        self.weights = [weight.detach() for weight in batch.weights]
        self.shared = [tensor.detach() for tensor in batch.shared[:3]]

    def schedule(self):
        count = {"num_local_experts": CASE.experts, "num_experts": 2 * CASE.experts}
        config, space = self.common
        return functional.build_schedule(space, config, self.topk_idx, **count)

    def tensors(self):
        return self.x, self.topk_weight, *self.shared, *self.weights

    def forward(self):
        schedule = self.schedule()
        return schedule, *functional.forward(*self.common, schedule, *self.tensors())

    def backward(self, schedule, out, context, **options):
        common = (*self.common, schedule, context, torch.ones_like(out))
        return functional.backward(*common, *self.tensors(), **options)

    def moe(self):
        config, space = self.common
        return functional.moe(
            self.x.requires_grad_(),
            self.topk_idx,
            self.topk_weight,
            *self.weights,
            workspace=space,
            config=config,
            num_experts=2 * CASE.experts,
        )


def out_of_memory(*given, **named):
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("recognised", [False, True])
def test_no_memory_for_gradients(space, monkeypatch, recognised):
    calls = Calls(space)
    state = calls.forward()
    if recognised:
        calls.backward(*state)
    monkeypatch.setattr(explicit, "_new_grads", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        calls.backward(*state)
    assert space.reported == [_C.OP_BACKWARD]


@pytest.mark.parametrize("recognised", [False, True])
def test_no_memory_for_moes_gradients(space, monkeypatch, recognised):
    calls = Calls(space)
    if recognised:
        calls.moe().sum().backward()
    out = calls.moe()
    monkeypatch.setattr(passes, "new_needed_grads", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        out.sum().backward()
    assert space.reported == [_C.OP_BACKWARD]


def test_a_hook_of_a_saved_tensor_fails(space):
    calls = Calls(space)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, out_of_memory):
        out = calls.moe()
    with pytest.raises(torch.OutOfMemoryError):
        out.sum().backward()
    assert space.reported == [_C.OP_BACKWARD]


def test_the_forward_refuses_what_the_backward_would(space):
    """A rank that failed in its backward would leave the others alone there."""
    planned = space.engine.layer_memory

    def layer_memory(layer):
        if layer.num_comm_sms >= 132:
            raise ValueError("num_comm_sms: expected less than 132")
        return planned(layer)

    space.engine.layer_memory = layer_memory
    calls = Calls(space, MoKConfig(bwd_num_comm_sms=132))
    schedule = calls.schedule()
    with pytest.raises(ValueError, match="num_comm_sms"):
        functional.forward(*calls.common, schedule, *calls.tensors())
    with pytest.raises(ValueError, match="num_comm_sms"):
        calls.moe()
    assert space.reported == [_C.OP_FORWARD, _C.OP_SCHEDULE]


def test_a_pass_has_its_own_number_of_exchange_sms(space):
    calls = Calls(space, MoKConfig(fwd_num_comm_sms=3, bwd_num_comm_sms=5))
    calls.backward(*calls.forward())
    numbers = {name: layer.num_comm_sms for name, layer, _ in space.engine.calls}
    assert numbers["forward"] == 3 and numbers["backward"] == 5


def test_ranks_are_asked_before_what_the_wait_for_them_may_change(space):
    """The question may wait for a pass that runs into its timeout."""
    timed_out = []

    def check_usable():
        if timed_out:
            raise RuntimeError("timeout")

    space.engine._engine.check_ranks = lambda: timed_out.append(True)
    space.engine._engine.check_usable = check_usable
    assert not space.is_usable()


def test_a_failure_to_grow_leaves_room_to_tell_it(monkeypatch):
    engine, sizes = HostEngine(), []
    engine.memory.error_scratch_bytes = 48
    allocate = cuda_engine.aligned_bytes

    def limited(num_bytes, device):
        sizes.append(num_bytes)
        return out_of_memory() if num_bytes > 1 << 20 else allocate(num_bytes, device)

    monkeypatch.setattr(cuda_engine, "aligned_bytes", limited)
    with pytest.raises(torch.OutOfMemoryError):
        engine.forward(engine.stream, SimpleNamespace(struct=None, scratch_bytes=1 << 21))
    assert engine._scratch.numel() == 48 and sizes == [0, 1 << 21, 48]
    told = []
    engine._engine.report_error = lambda args: told.append(args.scratch)
    engine.report_error(_C.OP_FORWARD, 1, "no memory")
    assert told == [engine._scratch.data_ptr()] and len(sizes) == 3


@pytest.fixture
def made(monkeypatch):
    """What CudaWorkspaces were made of, by engines of ranks whose GPU is the host."""
    made = []

    def allocate(group, request, device):
        heap, *others = (torch.zeros(8, dtype=torch.uint8) for _ in range(4))
        return cuda_engine._OwnMemory(None, SimpleNamespace(heap_bytes=8), heap, *others)

    monkeypatch.setattr(cuda_engine, "_allocate", allocate)
    monkeypatch.setattr(cuda_engine, "stream_address", lambda device: 0)
    monkeypatch.setattr(_C, "CudaWorkspace", lambda *given: made.append(given))
    return made


REQUEST = Request(CASE.hidden, CASE.topk, torch.bfloat16, 64, 60.0, "cuda")


def test_an_engine_is_made_of_all_ranks_heaps(made):
    engines = run_on_ranks(lambda member, _: CudaEngine(member, REQUEST, torch.device("cpu")), 2)
    heaps = [engine._heap[0].data_ptr() for engine in engines]
    assert len(set(heaps)) == 2 and [given[1] for given in made] == [heaps] * 2
    assert {given[2] for given in made} == {engine._state.data_ptr() for engine in engines}


@pytest.mark.parametrize("failing", ["_allocate", "CudaWorkspace"])
def test_an_engine_that_cannot_be_made_on_one_rank(made, monkeypatch, failing):
    """No rank then goes on to wait for it where PyTorch maps memory, or in a call."""
    owner = cuda_engine if failing == "_allocate" else _C
    succeed, share = getattr(owner, failing), InProcessMember.share_heap
    without_memory, mapped = [], []

    def may_fail(*given):
        return out_of_memory() if threading.get_ident() in without_memory else succeed(*given)

    def share_heap(member, *given):
        mapped.append(member.rank)
        return share(member, *given)

    monkeypatch.setattr(owner, failing, may_fail)
    monkeypatch.setattr(InProcessMember, "share_heap", share_heap)

    def on_rank(member, rank):
        if rank == 1:
            without_memory.append(threading.get_ident())
        with pytest.raises(RuntimeError, match=r"^(rank 1: OutOfMemoryError: )?no memory$"):
            CudaEngine(member, REQUEST, torch.device("cpu"))

    run_on_ranks(on_rank, 2)
    assert sorted(mapped) == ([] if failing == "_allocate" else [0, 1])


def test_a_workspace_that_cannot_grow_stays_as_it_is(space, monkeypatch):
    engine = space.engine
    engine.finish = lambda: None
    space._group = SimpleNamespace(exchange=lambda _, own, __: [own], size=1, era=0)
    monkeypatch.setattr(workspaces, "CudaEngine", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        space._grow(dataclasses.replace(REQUEST, num_local_tokens=128))
    assert space.engine is engine and space.num_local_tokens == 64


def test_buffers_without_a_key_are_not_remembered(space):
    calls = Calls(space)
    state = calls.forward()
    strided = torch.zeros(CASE.experts, CASE.intermediate, 2 * CASE.hidden)[..., : CASE.hidden]
    buffers = MainGrads(strided)
    key = explicit_cuda.key_of_buffers(buffers, space.device)
    space.engine.accepted.add((key,), "a call")
    assert space.engine.accepted.find((key,)) is None
    before = len(space.engine.accepted)
    with pytest.raises(ValueError, match="main_grads"):
        calls.backward(*state, main_grads=buffers)
    assert len(space.engine.accepted) == before


def test_the_ring_of_a_gpu_does_not_fit_a_host(space):
    calls = Calls(space)
    _, out, context = calls.forward()
    other = functional.create_workspace(
        None, None, num_local_tokens=40, hidden_size=CASE.hidden, topk=CASE.topk
    )
    on_host = functional.build_schedule(other, None, calls.topk_idx, num_local_experts=CASE.experts)
    common = (None, other, on_host, context, torch.ones_like(out))
    with pytest.raises(TypeError, match=r"context\.ring"):
        functional.backward(*common, *calls.tensors())


def test_a_trace_of_recognised_calls_is_refused(space):
    """The sizes of a traced tensor are tensors: keys with them equal no other."""
    calls = Calls(space)
    schedule, out, context = calls.forward()
    calls.backward(schedule, out, context)
    common, (x, *others) = (*calls.common, schedule), calls.tensors()

    def build_schedule(topk_idx):
        calls.topk_idx = topk_idx
        calls.schedule()

    traced = {
        "build_schedule": (build_schedule, calls.topk_idx),
        "forward": (lambda x: functional.forward(*common, x, *others)[0], x),
        "backward": (lambda d_out: calls.backward(schedule, d_out, context)[0], out),
    }
    for name, (function, argument) in traced.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: torch.jit.trace"):
            torch.jit.trace(function, (argument,))
    assert space.reported == [_C.OP_SCHEDULE, _C.OP_FORWARD, _C.OP_BACKWARD]
