"""Ranks as processes, each on its own GPU, for tests."""

from __future__ import annotations

import dataclasses
import os
import traceback

import torch
import torch.distributed as dist

from mok_torch.functional import MoKConfig, create_workspace
from mok_torch.layer import expert_range
from mok_torch.self_test import Case
from mok_torch.test_support import routed_batch

BF16 = torch.bfloat16
RANKS = 2
# ... and more where there are as many GPUs.
RANK_COUNTS = [RANKS] + [count for count in (3, 4, 8) if count <= torch.cuda.device_count()]
CONFIG = MoKConfig(timeout_seconds=30)
CASES = (
    Case("even", (150, 150), experts=8, topk=2, shared=40, scaled_shared=True),
    Case("uneven", (400, 133), hidden=1032, intermediate=520, experts=7, topk=3, shared=64),
    Case("a rank without tokens", (0, 300), experts=8, topk=4, no_route_share=0.2),
    Case("clamped", (70, 9), hidden=2880, intermediate=2880, experts=3, swiglu_limit=0.5),
)


def over_ranks(case: Case, ranks: int) -> Case:
    """The same tokens on `ranks` ranks: of more than the case has, every third has none."""
    if ranks == len(case.tokens):
        return case
    weights = [(rank + 1) % 3 for rank in range(ranks)]
    tokens = [sum(case.tokens) * weight // sum(weights) for weight in weights]
    tokens[0] += sum(case.tokens) - sum(tokens)
    return dataclasses.replace(case, tokens=tuple(tokens))


def _enter(rank: int, worker, backend: str, folder: str, ranks: int):
    """Runs worker(rank, folder) as a rank of the default group; a traceback goes to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(rank)
    try:
        dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=ranks)
        worker(rank, folder)
    except BaseException:
        with open(f"{folder}/error.{rank}", "w", encoding="utf-8") as file:
            file.write(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def run_processes(worker, folder, backend: str = "gloo", ranks: int = RANKS):
    """worker(rank, folder) in a process a rank; raises their errors."""
    assert torch.cuda.device_count() >= ranks, f"this test needs {ranks} GPUs"
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_enter, args=(rank, worker, backend, str(folder), ranks), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error.*")))
    assert not errors, errors
    assert [process.exitcode for process in processes] == [0] * ranks


def rank_inputs(case: Case, rank: int):
    """moe's arguments of a rank's tokens and experts."""
    batch = routed_batch(case, BF16)
    begin = sum(case.tokens[:rank])
    own = slice(begin, begin + case.tokens[rank])
    held = slice(*expert_range(case.experts, len(case.tokens), rank))
    tensors = [batch.x[own], batch.topk_idx[own], batch.topk_weight[own]]
    tensors += [weight[held] for weight in batch.weights]
    shared = batch.shared
    if shared is not None:
        scale = None if shared.scale is None else shared.scale[own].detach().cuda()
        shared = shared._replace(
            **{
                name: getattr(shared, name).detach().cuda() for name in ("w_gate", "w_up", "w_down")
            },
            scale=scale,
        )
    return [tensor.detach().cuda() for tensor in tensors], shared


def make_workspace(case: Case, config: MoKConfig = CONFIG):
    return create_workspace(
        config,
        dist.group.WORLD,
        device="cuda",
        num_local_tokens=max(case.tokens),
        hidden_size=case.hidden,
        topk=case.topk,
    )
