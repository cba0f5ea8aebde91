"""Ranks as processes: torch.distributed (gloo) to agree, POSIX shared memory for the rest."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from mok_torch import RankTimeoutError, ResourceExhaustedError, groups
from mok_torch.functional import MoKConfig, create_workspace, get_workspace, moe
from mok_torch.host_process_test_support import raised_by, run_processes
from mok_torch.layer import expert_range
from mok_torch.self_test import Case, run_layer
from mok_torch.test_support import assert_same_bits, routed_batch

# Long enough for a loaded machine.
CONFIG = MoKConfig(timeout_seconds=60, num_threads=1)
CASE = Case("processes", (20, 0, 33), hidden=64, intermediate=40, experts=5, config=CONFIG)
SHAPES = {"num_local_tokens": 33, "hidden_size": 64, "topk": 2}


def run_rank(case, batch, rank, workspace):
    """out and gradients of this rank's part of a batch."""
    begin = sum(case.tokens[:rank])
    own = slice(begin, begin + case.tokens[rank])
    held = slice(*expert_range(case.experts, len(case.tokens), rank))
    x = batch.x.detach()[own].clone().requires_grad_()
    weight = batch.topk_weight.detach()[own].clone().requires_grad_()
    weights = [w.detach()[held].clone().requires_grad_() for w in batch.weights]
    out = moe(x, batch.topk_idx[own], weight, *weights, workspace=workspace, config=case.config)
    out.backward(batch.d_out[own])
    names = ("d_x", "d_topk_weight", "d_w_gate", "d_w_up", "d_w_down")
    leaves = (x, weight, *weights)
    return {"out": out.detach()} | {n: t.grad for n, t in zip(names, leaves, strict=True)}


def check_results(rank, size, folder, expected_path):
    """Three processes give the bits of three threads; calls may have other token counts."""
    expected = torch.load(expected_path)
    workspace = create_workspace(CONFIG, dist.group.WORLD, **SHAPES)
    batch = routed_batch(CASE, torch.bfloat16)
    for _ in range(2):
        actual = run_rank(CASE, batch, rank, workspace)
        own = {}
        for name, whole in expected.items():
            ends = (
                expert_range(CASE.experts, size, rank)
                if name.startswith("d_w_")
                else (sum(CASE.tokens[:rank]), sum(CASE.tokens[: rank + 1]))
            )
            own[name] = whole[slice(*ends)]
        assert_same_bits(actual, own)
        other = Case("other", (3, 8, 1), hidden=64, intermediate=16, experts=3, config=CONFIG)
        run_rank(other, routed_batch(other, torch.bfloat16), rank, workspace)

    check_workspaces(rank)
    check_errors(rank, workspace, batch)


def check_workspaces(rank):
    cached = get_workspace(CONFIG, dist.group.WORLD, **(SHAPES | {"num_local_tokens": 5 + rank}))
    assert cached.num_local_tokens == 7
    grown = get_workspace(CONFIG, dist.group.WORLD, **(SHAPES | {"num_local_tokens": 9 - rank}))
    assert grown is cached and cached.num_local_tokens == 9

    # A part of the processes: every process takes part in new_group, as PyTorch wants it.
    part = dist.new_group([0, 2])
    if rank != 1:
        workspace = create_workspace(CONFIG, part, **SHAPES)
        assert (workspace.rank, workspace.ep_size) == (rank // 2, 2)
        case = Case("part", (4, 7), hidden=64, intermediate=16, experts=3, config=CONFIG)
        run_rank(case, routed_batch(case, torch.bfloat16), rank // 2, workspace)


def check_errors(rank, workspace, batch):
    expected = run_rank(CASE, batch, rank, workspace)

    # Wrong on one rank, in another way on each, then right again.
    weights = [w.detach()[:2] for w in batch.weights]
    x, routes, weight = torch.zeros(4, 64).bfloat16(), batch.topk_idx[:4], torch.ones(4, 2)
    wrong = {
        0: (x.float(), routes, weight, *weights),
        1: (x, routes + 7 * (rank == 1), weight, *weights),
        2: (x, routes, weight, *(w[:, :16] for w in weights[:2]), weights[2][..., :16]),
    }
    texts = {0: "x: expected torch.bfloat16", 1: "topk_idx: rank 1", 2: "intermediate size"}
    for wrong_rank, text in texts.items():
        right = (x, routes, weight, *weights)
        arguments = wrong[wrong_rank] if rank == wrong_rank else right
        error = raised_by(moe, *arguments, workspace=workspace)
        assert isinstance(error, TypeError if wrong_rank == 0 else ValueError), repr(error)
        assert text in str(error) and (wrong_rank == rank or f"rank {wrong_rank}" in str(error))
        assert_same_bits(run_rank(CASE, batch, rank, workspace), expected)

    # Ranks that disagree about a workspace.
    disagreeing = SHAPES | ({"hidden_size": 72} if rank == 1 else {})
    error = raised_by(create_workspace, CONFIG, dist.group.WORLD, **disagreeing)
    assert "hidden_size: ranks disagree: 64 on ranks 0, 2; 72 on rank 1" in str(error), error

    # More shared memory than there is.
    huge = SHAPES | {"num_local_tokens": 2**28, "hidden_size": 8192}
    error = raised_by(create_workspace, CONFIG, dist.group.WORLD, **huge)
    assert isinstance(error, ResourceExhaustedError) and isinstance(error, MemoryError)
    assert "/dev/shm" in str(error) and "bytes" in str(error), error
    dist.barrier()

    # Ranks that do not share memory.
    identity = groups._shared_memory_identity
    groups._shared_memory_identity = lambda: f"machine {rank // 2}"
    error = raised_by(create_workspace, CONFIG, dist.group.WORLD, **SHAPES)
    assert isinstance(error, ValueError), repr(error)
    assert "rank 0 is on machine 0 and rank 2 on machine 1" in str(error)
    groups._shared_memory_identity = identity
    create_workspace(CONFIG, dist.group.WORLD, **SHAPES)


def test_processes(tmp_path):
    torch.save(run_layer(CASE, routed_batch(CASE, torch.bfloat16)), tmp_path / "expected.pt")
    run_processes(check_results, 3, tmp_path, str(tmp_path / "expected.pt"))


def die_in_the_middle(rank, size, folder):
    """Rank 1 is killed at some point of a loop over forwards and backwards."""
    config = MoKConfig(timeout_seconds=1.5, num_threads=1)
    workspace = create_workspace(config, dist.group.WORLD, **SHAPES)
    batch = routed_batch(CASE, torch.bfloat16)
    run_rank(CASE, batch, rank, workspace)
    if rank == 1:
        (folder / f"done.{rank}").touch()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            run_rank(CASE, batch, rank, workspace)
    while True:
        begin = time.monotonic()
        try:
            run_rank(CASE, batch, rank, workspace)
        except RankTimeoutError as error:
            # At least the timeout, and not much more.
            assert 1 < time.monotonic() - begin < 30
            assert "1" in str(error).replace(f"rank {rank}", ""), error
            assert isinstance(error, TimeoutError) and isinstance(error, RuntimeError)
            break
    begin = time.monotonic()
    assert isinstance(raised_by(run_rank, CASE, batch, rank, workspace), RankTimeoutError)
    assert time.monotonic() - begin < 1, "a broken workspace does not wait again"


def test_a_killed_rank_is_named_by_the_others(tmp_path):
    run_processes(die_in_the_middle, 3, tmp_path, killed=(1,))
