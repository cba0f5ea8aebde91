"""Buffer sizes and engine settings of a pass, from what the host knows before it runs.

The sizes depend on shapes only, never on the routing, so that the CPU waits for no token count and
torch.compile can trace them (tokens may be a SymInt). A plan travels through operators as a list
of integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mok_torch import _C
from mok_torch.config import MoKConfig

ROW_BLOCK = 128  # rows of a row block: mok_schedule's kRowBlock
# Expert ids at the end of a GPU's schedule begin at a multiple of 16 bytes, as kernels want them.
ROUTES_ALIGNMENT_WORDS = 4


class Plan(NamedTuple):
    """The integers that an operator takes along with its tensors.

    Attributes:
      ring_rows: rows of the ring, which is also the macrobatch.
      schedule_words: int32 words that hold the schedule.
      minibatch_rows: 0: the engine's heuristic.
      fwd_num_comm, bwd_num_comm: communication threads.
      num_sms: SMs of a pass on a GPU; 0: all.
      num_threads: 0: torch.get_num_threads(), shared by the ranks of the process.
      num_experts: E as the caller states it; 0: not stated.
      isa: index into _C.ISA_NAMES, -1: the best.
      differentiated: 1: autograd will run the backward of this call, on every rank; else 0.
    """

    ring_rows: int
    schedule_words: int
    minibatch_rows: int
    fwd_num_comm: int
    bwd_num_comm: int
    num_sms: int
    num_threads: int
    num_experts: int
    isa: int
    differentiated: int


def capacity_rows(num_tokens_total: int, topk: int, num_local_experts: int) -> int:
    """Rows of the routing table in the worst case: every route leads to this rank.

    Padding is worst when as many experts as possible have one row in their last row block.
    """
    if num_local_experts == 0:
        return 0
    routes = num_tokens_total * topk
    experts = _minimum(routes, num_local_experts)
    return ROW_BLOCK * (experts + (routes - experts) // ROW_BLOCK)


def ring_rows(
    config: MoKConfig, ep_size: int, num_tokens_total: int, topk: int, num_local_experts: int
) -> int:
    """Rows whose activations the forward keeps.

    By default the rows of a balanced load with 25 % to spare and one row block of padding for each
    expert, so that an ordinary step recomputes nothing; at most the capacity, which one rank has.
    """
    capacity = capacity_rows(num_tokens_total, topk, num_local_experts)
    wanted = config.macrobatch_size
    if wanted == -1 or (wanted is None and ep_size == 1):
        return capacity
    if wanted is None:
        balanced = -(-num_tokens_total * topk // ep_size)
        wanted = balanced + balanced // 4 + ROW_BLOCK * num_local_experts
    return _minimum(capacity, _round_up(wanted, ROW_BLOCK))


def make_plan(
    config: MoKConfig,
    ep_size: int,
    num_tokens_total: int,
    topk: int,
    num_local_experts: int,
    num_experts: int | None = None,
    device_type: str = "cpu",
    differentiated: bool = False,
) -> Plan:
    """The plan of a layer call; num_tokens_total is an upper bound over all ranks."""
    rows = ring_rows(config, ep_size, num_tokens_total, topk, num_local_experts)
    words = schedule_words(device_type, num_tokens_total, topk, num_local_experts)
    return Plan(
        ring_rows=rows,
        schedule_words=words,
        minibatch_rows=config.minibatch_size or 0,
        fwd_num_comm=config.fwd_num_comm_sms,
        bwd_num_comm=config.bwd_num_comm_sms,
        num_sms=config.num_sms or 0,
        num_threads=config.num_threads or 0,
        num_experts=0 if num_experts is None else num_experts,
        isa=-1 if config.isa is None else _C.ISA_NAMES.index(config.isa),
        differentiated=int(differentiated),
    )


def tokens_in_plan(workspace, num_tokens: int) -> int:
    """The most tokens of all ranks in a call with num_tokens tokens of this rank."""
    if workspace.ep_size == 1:
        return num_tokens
    return workspace.num_local_tokens * workspace.ep_size


def schedule_words(
    device_type: str, num_tokens_total: int, topk: int, num_local_experts: int
) -> int:
    """int32 words that hold any schedule of such a layer; see mok.h and mok_cuda.h."""
    capacity = capacity_rows(num_tokens_total, topk, num_local_experts)
    words = 2 * capacity + num_tokens_total * topk
    if device_type != "cuda":
        return _C.SCHEDULE_HEADER_WORDS + 2 * num_local_experts + words
    # 1: in a build without CUDA no schedule is ever made.
    header = _C.CUDA_SCHEDULE_HEADER_WORDS if _C.CUDA_BUILT else 1
    header += ROUTES_ALIGNMENT_WORDS - 1 + num_tokens_total  # first rows of tokens
    return header + 3 * num_local_experts + 4 * (capacity // ROW_BLOCK) + words


def engine_config(plan: Plan, ranks_in_process: int, num_comm: int) -> _C.EngineConfig:
    """The C API's configuration of one pass."""
    config = _C.EngineConfig()
    config.num_threads = plan.num_threads or max(1, torch.get_num_threads() // ranks_in_process)
    config.num_comm_threads = num_comm
    config.minibatch_rows = plan.minibatch_rows
    config.macrobatch_rows = max(plan.ring_rows, ROW_BLOCK)
    config.isa = plan.isa
    return config


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _minimum(left: int, right: int) -> int:
    """min, which for a SymInt must not depend on its present value.

    Dynamo follows the first branch for symbols too, and traces min as sym_min; before PyTorch 2.12
    it refuses sym_min of two ordinary integers.
    """
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    return torch.sym_min(left, right)
