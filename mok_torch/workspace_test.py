"""MoKConfig, workspaces, in-process groups, and the sizes of a plan."""

import concurrent.futures
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mok_torch import _C, InProcessGroup, RankTimeoutError, functional, plan
from mok_torch.functional import MoKConfig, create_workspace, get_workspace, moe
from mok_torch.groups import SingleRank, as_group
from mok_torch.self_test import Case, run_on_ranks
from mok_torch.test_support import routed_batch

SHAPES = {"num_local_tokens": 16, "hidden_size": 24, "topk": 2}


def test_config_is_immutable_printable_and_hashable():
    config = MoKConfig(4, 8, 256, 1024)
    assert config.fwd_num_comm_sms == 4 and config.bwd_num_comm_sms == 8
    assert config.minibatch_size == 256 and config.macrobatch_size == 1024
    assert "minibatch_size=256" in repr(config)
    assert hash(config) == hash(MoKConfig(4, 8, 256, 1024))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.minibatch_size = 1


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"fwd_num_comm_sms": -1}, ValueError, "fwd_num_comm_sms: expected 0 to"),
        ({"bwd_num_comm_sms": 1.5}, TypeError, "bwd_num_comm_sms: expected an int, got float"),
        ({"minibatch_size": 0}, ValueError, "minibatch_size: expected 1 to"),
        ({"minibatch_size": True}, TypeError, "minibatch_size: expected an int or None, got bool"),
        ({"macrobatch_size": -2}, ValueError, "macrobatch_size: expected -1 to"),
        ({"num_sms": 0}, ValueError, "num_sms: expected 1 to"),
        ({"num_sms": 8, "bwd_num_comm_sms": 8}, ValueError, "expected fewer than num_sms = 8"),
        ({"num_threads": 0}, ValueError, "num_threads: expected 1 to"),
        ({"isa": "sse"}, ValueError, "isa: expected None or one of"),
        ({"isa": 2}, TypeError, "isa: expected None or one of .*, got int: 2"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds: expected a number > 0"),
        ({"timeout_seconds": float("inf")}, ValueError, "timeout_seconds: .* finite .*, got inf"),
        ({"timeout_seconds": 1e10}, ValueError, "timeout_seconds: .* <= 1e[+]09, got 1000000"),
        ({"timeout_seconds": "1"}, TypeError, "timeout_seconds: expected a number, got str"),
    ],
)
def test_config_validates_itself(options, error, text):
    with pytest.raises(error, match=text):
        MoKConfig(**options)


@pytest.mark.parametrize("isa", _C.ISA_NAMES)
def test_every_isa(isa):
    case = Case("isa", (9,), hidden=24, intermediate=16, experts=3)
    batch = routed_batch(case, torch.float32)
    arguments = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights)
    config = MoKConfig(isa=isa)
    if _C.isa_supported(_C.ISA_NAMES.index(isa)):
        torch.testing.assert_close(moe(*arguments, config=config), moe(*arguments))
    else:
        with pytest.raises(RuntimeError, match="isa"):
            moe(*arguments, config=config)


def test_cached_and_new_workspaces():
    shapes = SHAPES | {"hidden_size": 1000}  # of this test alone
    cached = get_workspace(None, None, device="cpu", **shapes)
    assert get_workspace(MoKConfig(4), None, **shapes) is cached
    assert get_workspace(None, None, **(shapes | {"topk": 1})) is not cached
    assert get_workspace(None, None, **shapes, dtype=torch.float32) is not cached
    assert create_workspace(None, None, **shapes) is not cached
    assert "hidden_size=1000" in repr(cached)

    assert get_workspace(None, None, **(shapes | {"num_local_tokens": 40})) is cached
    assert cached.num_local_tokens == 40
    assert get_workspace(None, None, **shapes).num_local_tokens == 40


def test_workspaces_are_released():
    workspace = create_workspace(None, None, **SHAPES)
    reference = weakref.ref(workspace)
    del workspace
    gc.collect()
    assert reference() is None

    group = InProcessGroup(1)
    reference = weakref.ref(get_workspace(None, group.member(0), **SHAPES))
    gc.collect()
    assert reference() is not None
    del group
    gc.collect()
    assert reference() is None


def test_a_group_grows_when_one_rank_asks():
    def on_rank(member, rank):
        first = get_workspace(None, member, **(SHAPES | {"num_local_tokens": 5 + rank}))
        assert first.num_local_tokens == 7
        again = get_workspace(None, member, **(SHAPES | {"num_local_tokens": 5 - rank}))
        assert again is first and again.num_local_tokens == 7
        # Only rank 2 needs more.
        grown = get_workspace(
            None, member, **(SHAPES | {"num_local_tokens": 8 if rank == 2 else 1})
        )
        assert grown is first and grown.num_local_tokens == 8
        grown.grow(100 * rank)
        assert grown.num_local_tokens == 200
        return grown

    workspaces = run_on_ranks(on_rank, 3)
    assert len({workspace.handle for workspace in workspaces}) == 3


def test_workspace_memory_is_reported():
    workspace = create_workspace(None, None, **SHAPES)
    info = workspace.info()
    assert info["heap_bytes"] > 0 and info["scratch_bytes"] >= 0
    workspace.check()
    assert workspace.is_usable()


def test_a_workspace_serves_concurrent_threads():
    """Calls of a one-rank workspace from several threads run one after the other."""
    workspace = create_workspace(None, None, **SHAPES)
    case = Case("threads", (16,), hidden=24, intermediate=16, experts=3)
    batches = [routed_batch(dataclasses.replace(case, seed=s), torch.bfloat16) for s in range(4)]

    def run(batch, count):
        arguments = (batch.x.detach(), batch.topk_idx, batch.topk_weight.detach())
        weights = [w.detach() for w in batch.weights]
        return [moe(*arguments, *weights, workspace=workspace) for _ in range(count)]

    expected = [run(batch, 1)[0] for batch in batches]
    results = {}

    def work(index):
        results[index] = run(batches[index], 20)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, outputs in results.items():
        assert all(torch.equal(out, expected[index]) for out in outputs)


def test_groups_of_one_rank():
    case = Case("one", (16,), hidden=24, intermediate=16, experts=3)
    batch = routed_batch(case, torch.bfloat16)
    arguments = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights)
    workspace = create_workspace(None, InProcessGroup(1).member(0), **SHAPES)
    assert torch.equal(moe(*arguments, workspace=workspace), moe(*arguments))


def test_wrong_groups():
    with pytest.raises(TypeError, match="pass InProcessGroup"):
        as_group(InProcessGroup(2))
    with pytest.raises(TypeError, match=r"group: expected None, a torch.distributed"):
        as_group(3)
    for size in (0, 1025):
        with pytest.raises(ValueError, match=f"size: expected 1 to 1024, got {size}"):
            InProcessGroup(size)
    _C.InProcessGroup(InProcessGroup(1024).size)  # which the engine takes as well
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        InProcessGroup(2).member(2)
    with pytest.raises(ValueError, match="group: this process is not a member of the process gr"):
        as_group(dist.GroupMember.NON_GROUP_MEMBER)
    assert isinstance(as_group(None), SingleRank)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"device": "cuda"}, ValueError, "device: expected cpu"),
        ({"hidden_size": 12}, ValueError, "hidden_size: expected a multiple of 8, got 12"),
        ({"hidden_size": 8.0}, TypeError, "hidden_size: expected an int, got float"),
        ({"topk": 0}, ValueError, "topk: expected 1 to"),
        ({"num_local_tokens": -1}, ValueError, "num_local_tokens: expected 0 to"),
        ({"dtype": torch.float16}, TypeError, "dtype: expected torch.bfloat16 or torch.float32"),
    ],
)
@pytest.mark.parametrize("create", [create_workspace, get_workspace])
def test_wrong_workspace_arguments(create, options, error, text):
    with pytest.raises(error, match=text):
        create(None, None, **(SHAPES | options))
    with pytest.raises(TypeError, match="config: expected a MoKConfig or None, got dict"):
        create({}, None, **SHAPES)


@given(st.integers(0, 2000), st.integers(1, 10), st.integers(0, 300))
def test_capacity_is_that_of_the_engine(tokens, topk, experts):
    assert plan.capacity_rows(tokens, topk, experts) == _C.capacity_rows(tokens, topk, experts)


@given(st.data())
def test_plans_hold_the_schedule(data):
    """A plan's ring and schedule words are enough for what the engine makes of the same numbers."""
    tokens = data.draw(st.integers(0, 40))
    experts = data.draw(st.integers(1, 20))
    config = MoKConfig(
        minibatch_size=data.draw(st.sampled_from([None, 1, 300])),
        macrobatch_size=data.draw(st.sampled_from([None, -1, 1, 129, 1000])),
    )
    workspace = get_workspace(None, None, **SHAPES)
    routes = torch.randint(-1, experts, (tokens, 2))
    schedule = functional.build_schedule(workspace, config, routes, num_local_experts=experts)
    made = plan.make_plan(config, 1, tokens, 2, experts)
    assert schedule.info.ring_rows <= made.ring_rows
    words = torch.empty(made.schedule_words, dtype=torch.int32)
    schedule.engine.save(words.data_ptr(), made.schedule_words)
    loaded = _C.Schedule.load(words.data_ptr(), made.schedule_words)
    assert loaded.tokens_per_expert() == schedule.engine.tokens_per_expert()


def test_words_of_no_schedule():
    words = torch.zeros(1000, dtype=torch.int32)
    with pytest.raises(ValueError, match="mok_schedule_save"):
        _C.Schedule.load(words.data_ptr(), 1000)


def test_threads_that_grow_a_workspace_leave_the_largest(monkeypatch):
    workspace = create_workspace(**SHAPES)
    create, larger_asked = workspace._create_engine, threading.Event()

    def create_slowly(request):
        if request.num_local_tokens == 100:
            larger.start()
            larger_asked.wait()
            larger.join(0.05)  # it has to wait
        create(request)

    def grow_larger():
        larger_asked.set()
        workspace.grow(1000)

    monkeypatch.setattr(workspace, "_create_engine", create_slowly)
    larger = threading.Thread(target=grow_larger)
    workspace.grow(100)
    larger.join()
    assert workspace.num_local_tokens == 1000


def test_a_rank_of_an_in_process_group_that_comes_too_late_is_told():
    group = InProcessGroup(2)
    with pytest.raises(RankTimeoutError, match=r"rank 0: ranks \[1\] .* did not come"):
        group.member(0).exchange("call", "early", 0.01)
    with pytest.raises(RankTimeoutError, match=r"rank 1 came too late: ranks \[1\] of the in-p"):
        group.member(1).exchange("call", "late", 0.01)
    # Then the ranks are in step again.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        met = pool.map(lambda rank: group.member(rank).exchange("call", rank, 60), range(2))
        assert list(met) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("was_with_the_others", [False, True])
def test_a_member_that_has_been_with_the_others_is_not_late(was_with_the_others):
    group = InProcessGroup(2)
    first, late = group.member(0), group.member(1)

    def meet():
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            met = pool.map(lambda one: one.exchange("call", one.rank, 60), (first, late))
            assert list(met) == [[0, 1]] * 2

    late.enter_engine("a forward")  # in vain, say: counted no more after the next meeting
    meet()
    with pytest.raises(RankTimeoutError):
        first.exchange("a call", None, 0.01)
    if was_with_the_others:
        late.enter_engine("a forward")
    else:
        with pytest.raises(RankTimeoutError, match=r"rank 1.* came too late: ranks \[1\]"):
            late.exchange("call", None, 60)
    meet()


@pytest.mark.parametrize("resumes", [False, True])
def test_members_that_give_up_in_the_engine_are_in_step_with_the_others(resumes):
    group = InProcessGroup(2)
    first, late = group.member(0), group.member(1)
    first.give_up("a workspace", "gone")
    if not resumes:
        with pytest.raises(RankTimeoutError, match=r"^rank 1: ranks \[0\] .* to a call: gone$"):
            late.exchange("a call", None, 60)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        met = pool.map(lambda one: one.exchange("call", one.rank, 60, resumes=True), (first, late))
        assert list(met) == [[0, 1]] * 2
    first.give_up("another", "gone")
    assert late.find_notice("another") == "gone" and late.era == first.era == 2
