"""Ranks as processes, each on its own GPU, over PyTorch's symmetric memory.

Needs two GPUs of compute capability 9.0 that are linked: with fewer everything fails. With more it
runs on 3, 4 and 8 as well.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist

from mok_torch import MoELayer, RankTimeoutError, cuda_engine
from mok_torch.functional import MoKConfig, build_schedule, forward, moe
from mok_torch.process_test_support import (
    BF16,
    CASES,
    CONFIG,
    RANK_COUNTS,
    RANKS,
    make_workspace,
    over_ranks,
    rank_inputs,
    run_processes,
)
from mok_torch.self_test import run_layer
from mok_torch.test_support import assert_matches_reference, routed_batch


def save_outputs(rank, folder):
    """Every case with several settings, repeats and poisoned memory; saves out."""
    for index, two in enumerate(CASES):
        case = over_ranks(two, dist.get_world_size())
        workspace = make_workspace(case)
        arguments, shared = rank_inputs(case, rank)
        outs = []
        for settings in ({}, {"fwd_num_comm_sms": 4}, {"macrobatch_size": 128}):
            options = {"shared": shared, "swiglu_limit": case.swiglu_limit}
            options |= {"workspace": workspace, "config": MoKConfig(**settings)}
            for _ in range(5):
                outs.append(moe(*arguments, num_experts=case.experts, **options))
            outs.append(moe(*arguments, **options))  # the ranks count their experts
        workspace.check()
        dist.barrier()
        workspace.poison()
        dist.barrier()
        outs.append(moe(*arguments, **options))
        if case.tokens[rank] and case.swiglu_limit is None:
            buffer = workspace.input_buffer(case.tokens[rank])
            buffer.copy_(arguments[0])
            outs.append(moe(buffer, *arguments[1:], **options))
        elif case.swiglu_limit is None:
            outs.append(moe(*arguments, **options))
        workspace.check()
        assert all(torch.equal(out, outs[0]) for out in outs), case.name
        torch.save(outs[0].cpu(), f"{folder}/out.{index}.{rank}")


@pytest.mark.parametrize(
    "backend, ranks", [("gloo", RANKS)] + [("nccl", count) for count in RANK_COUNTS]
)
def test_several_gpus_give_the_bits_of_one(tmp_path, backend, ranks):
    run_processes(save_outputs, tmp_path, backend, ranks)
    for index, case in enumerate(CASES):
        parts = [torch.load(tmp_path / f"out.{index}.{rank}") for rank in range(ranks)]
        batch = routed_batch(case, BF16)
        assert torch.equal(torch.cat(parts), run_layer(case, batch, "cuda")["out"]), case.name
        assert_matches_reference(case, BF16, rounded=True, device="cuda")


def use_layers_and_graphs(rank, folder):
    """A layer with a group against one without; a graph with other routings; the explicit calls."""
    del folder
    options = {"shared_intermediate_size": 64, "dtype": BF16, "device": "cuda"}
    torch.manual_seed(3)
    whole = MoELayer(256, 128, 10, 4, **options).eval()
    torch.manual_seed(3)
    layer = MoELayer(256, 128, 10, 4, group=dist.group.WORLD, config=CONFIG, **options).eval()
    layer.load_full_state_dict(whole.state_dict())
    torch.manual_seed(4)
    x = torch.randn(300, 256, device="cuda").to(BF16)
    own = slice(0, 200) if rank == 0 else slice(200, 300)
    with torch.no_grad():
        layer.reserve(200)
        assert torch.equal(layer(x[own]), whole(x)[own])
        static = x[own].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(static)
        for seed in range(5):
            torch.manual_seed(seed)
            x = torch.randn(300, 256, device="cuda").to(BF16) * (seed + 1)
            static.copy_(x[own])
            for _ in range(20):
                graph.replay()
            assert torch.equal(out, whole(x)[own])
        compiled = torch.compile(moe, fullgraph=True)
        case = CASES[0]
        workspace = make_workspace(case)
        arguments, shared = rank_inputs(case, rank)
        options = {"shared": shared, "workspace": workspace, "num_experts": case.experts}
        expected = moe(*arguments, **options)
        assert torch.equal(compiled(*arguments, **options), expected)
    x, idx, weight, *weights = arguments
    schedule = build_schedule(workspace, None, idx, num_local_experts=4, num_experts=8)
    explicit, _ = forward(
        None, workspace, schedule, x, weight, *shared[:3], *weights, shared_scale=shared.scale
    )
    assert torch.equal(explicit, expected)
    assert schedule.info.first_expert == 4 * rank and schedule.info.num_tokens_total == 300


def test_layers_graphs_and_explicit_calls(tmp_path):
    run_processes(use_layers_and_graphs, tmp_path, "nccl")


def hear_of_errors(rank, folder):
    """An invalid id on one rank; ranks that disagree; a rank that does not come."""
    case = CASES[0]
    workspace = make_workspace(case, MoKConfig(timeout_seconds=3))
    arguments, _ = rank_inputs(case, rank)
    expected = moe(*arguments, workspace=workspace)
    wrong = list(arguments)
    wrong[1] = arguments[1].clone()
    if rank == 1:
        wrong[1][7, 0] = 8
    moe(*wrong, workspace=workspace)
    with pytest.raises(ValueError, match="rank 1, token 7, k 0: expected -1 to 7, got 8"):
        workspace.check()
    assert torch.equal(moe(*arguments, workspace=workspace), expected)
    # What one rank refuses, the other one hears of; it need not wait, in the backward neither.
    begin = time.monotonic()
    x = arguments[0].clone().requires_grad_()
    if rank == 0:
        with pytest.raises(TypeError, match=r"topk_weight: expected torch\.float32"):
            moe(
                x,
                arguments[1],
                arguments[2].double(),
                *arguments[3:],
                workspace=workspace,
                num_experts=8,
            )
    else:
        moe(x, *arguments[1:], workspace=workspace, num_experts=8).sum().backward()
        with pytest.raises(TypeError, match="rank 0 could not take part in the call"):
            workspace.check()
    workspace.check()
    assert time.monotonic() - begin < 2
    assert torch.equal(moe(*arguments, workspace=workspace, num_experts=8), expected)
    with pytest.raises(ValueError, match="num_experts: 11 experts split evenly over 2 ranks are"):
        moe(*arguments, workspace=workspace, num_experts=11)
    workspace.check()
    dist.barrier()
    if rank == 1:
        # Gone: but its process stays, so that gloo does not complain.
        time.sleep(7)
        return
    begin = time.monotonic()
    moe(*arguments, workspace=workspace, num_experts=8)
    with pytest.raises(RankTimeoutError, match=r"rank 0 waited .* rank 1"):
        workspace.check()
    assert 2.9 < time.monotonic() - begin < 10
    with pytest.raises(RankTimeoutError, match="rank 1"):
        moe(*arguments, workspace=workspace, num_experts=8)


def test_errors_reach_both_ranks(tmp_path):
    run_processes(hear_of_errors, tmp_path)


def run_out_of_memory(rank, folder):
    """One rank's GPU is full while a workspace is made, and while it grows."""
    del folder
    case, variable = CASES[0], "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before, allocate = os.environ.get(variable), cuda_engine._allocate
    arguments, _ = rank_inputs(case, rank)

    def allocate_in_vain(*given):
        own = allocate(*given)
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own

    def assert_every_rank_raises(call):
        begin = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_engine, "_allocate", allocate_in_vain)
            text = r"^(rank 1: OutOfMemoryError: )?CUDA out of memory$"
            with pytest.raises(RuntimeError, match=text):
                call()
        assert time.monotonic() - begin < 10

    assert_every_rank_raises(lambda: make_workspace(case))
    workspace = make_workspace(case)
    options = {"workspace": workspace, "num_experts": case.experts}
    expected = moe(*arguments, **options)
    assert_every_rank_raises(lambda: workspace.grow(1000))
    assert torch.equal(moe(*arguments, **options), expected)
    workspace.grow(1000)
    assert torch.equal(moe(*arguments, **options), expected)
    workspace.check()
    # Multicast is off for this memory alone.
    assert workspace.engine._heap[1].multicast_ptr == 0
    assert os.environ.get(variable) == before


def test_memory_that_runs_out_on_one_rank(tmp_path):
    run_processes(run_out_of_memory, tmp_path)


def run_ahead_of_an_error(rank, folder):
    """Of four layers the second has an invalid id; one rank hears of it after that one.

    The other's host is ahead of its GPU by then: it has queued all layers and their backwards.
    """
    del folder
    case = CASES[0]
    workspace = make_workspace(case, MoKConfig(timeout_seconds=30))
    arguments, _ = rank_inputs(case, rank)
    options = {"workspace": workspace, "num_experts": case.experts}
    expected = moe(*arguments, **options)
    wrong = arguments[1].clone()
    if rank == 1:
        wrong[7, 0] = case.experts
    text = f"rank 1, token 7, k 0: expected -1 to {case.experts - 1}, got {case.experts}"

    def layer(idx):
        x = arguments[0].clone().requires_grad_()
        return moe(x, idx, *arguments[2:], **options)

    # CUDA loads a kernel when it is first launched, and waits for those that run.
    layer(arguments[1]).sum().backward()
    for first_to_hear in range(RANKS):
        dist.barrier()
        begin = time.monotonic()
        if rank == first_to_hear:
            layer(arguments[1])
            layer(wrong)
            torch.cuda.synchronize()
            with pytest.raises(ValueError, match=text):
                layer(arguments[1])
        else:
            torch.cuda._sleep(1 << 32)  # two seconds
            routings = (arguments[1], wrong, arguments[1], arguments[1])
            outs = [layer(idx) for idx in routings]
            for out in reversed(outs):
                out.sum().backward()
            with pytest.raises(ValueError, match=text):
                workspace.check()
        workspace.check()
        assert torch.equal(moe(*arguments, **options), expected)
        assert time.monotonic() - begin < 10
    # A backward of a forward from before the error: nobody waits, and both ranks hear of it.
    out = layer(arguments[1])
    moe(arguments[0], wrong, *arguments[2:], **options)
    with pytest.raises(ValueError, match=text):
        workspace.check()
    out.sum().backward()
    moe(*arguments, **options)
    with pytest.raises(RuntimeError, match="ran a forward or backward of a schedule that an earl"):
        workspace.check()
    assert torch.equal(moe(*arguments, **options), expected)
    workspace.check()


def test_nobody_waits_for_a_rank_that_has_heard_of_an_error(tmp_path):
    run_processes(run_ahead_of_an_error, tmp_path)


def share_a_gpu(rank, folder):
    del rank, folder
    torch.cuda.set_device(0)
    with pytest.raises(ValueError, match="device: expected a GPU for each rank"):
        make_workspace(CASES[0])


def test_two_ranks_on_one_gpu_are_refused(tmp_path):
    run_processes(share_a_gpu, tmp_path)
