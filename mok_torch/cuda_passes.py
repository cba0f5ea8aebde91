"""Queues the passes of a GPU on checked tensors: sizes, memory and the C API's structs.

What calls of equal shapes have in common (ScheduleCall, PassCall) is worked out once and serves
any number of them; what is left to do for each is to allocate, to take addresses and to launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_torch import _C
from mok_torch.checks import LayerTensors
from mok_torch.cuda_engine import CudaEngine
from mok_torch.plan import (
    ROUTES_ALIGNMENT_WORDS,
    ROW_BLOCK,
    Plan,
    schedule_words,
    tokens_in_plan,
)
from mok_torch.ring import RingLayout, ring_shapes
from mok_torch.workspace import Workspace

_WORDS_ALIGNMENT = 256  # bytes: MOK_CUDA_ALIGNMENT
# Of an explicit schedule, which any layer may use: the same on all ranks.
UNKNOWN_WIDTHS = (8, 0)


class ScheduleSizes(NamedTuple):
    """What the host knows of a schedule; equal for all of the same call.

    Attributes:
      num_tokens, topk: T and K of the expert ids that it was built from.
      num_local_experts, first_expert, num_experts: of this rank, and E.
      max_tokens: of the workspace that built it.
      num_words, first_route: int32 words of it, and at which of them the expert ids begin.
    """

    num_tokens: int
    topk: int
    num_local_experts: int
    first_expert: int
    num_experts: int
    ring_rows: int
    minibatch_rows: int
    max_tokens: int
    num_words: int
    first_route: int
    result_offset: int
    expert_rows_offset: int


class CudaSchedule(NamedTuple):
    """A schedule in device memory.

    Attributes:
      words: int32, the schedule; at their end the expert ids [T, K] as int32, if they were kept.
      stream: the cudaStream_t that the words were allocated on.
      routing: the address of the expert ids that passes read, the bytes of one, and the address of
        the words.
    """

    words: Tensor
    stream: int
    sizes: ScheduleSizes
    routing: tuple[int, int, int]

    @property
    def num_tokens(self) -> int:
        return self.sizes.num_tokens

    @property
    def num_local_experts(self) -> int:
        return self.sizes.num_local_experts

    @property
    def routes(self) -> Tensor:
        """int32 [T, K], the expert ids that it was built from, if they were kept."""
        sizes = self.sizes
        shape = (sizes.num_tokens, sizes.topk)
        return torch.as_strided(self.words, shape, (sizes.topk, 1), sizes.first_route)

    def tokens_per_expert(self) -> Tensor:
        """int64 [El] on the GPU; nothing waits."""
        begin = self.sizes.expert_rows_offset // 4
        return self.words[begin : begin + self.sizes.num_local_experts].to(torch.int64)

    def info(self) -> ScheduleInfo:
        """All of MokScheduleInfo. Waits for the schedule kernel."""
        sizes = self.sizes
        begin = sizes.result_offset // 4
        blocks, tokens = self.words[begin : begin + 4].view(torch.int64).tolist()
        rows_of_ring = max(sizes.ring_rows, ROW_BLOCK)
        return ScheduleInfo(
            num_tokens=sizes.num_tokens,
            num_tokens_total=tokens,
            num_experts=sizes.num_experts,
            num_local_experts=sizes.num_local_experts,
            first_expert=sizes.first_expert,
            num_macrobatches=-(-blocks * ROW_BLOCK // rows_of_ring),
            num_rows=int(self.tokens_per_expert().sum()),
            num_row_blocks=blocks,
            minibatch_rows=sizes.minibatch_rows,
            ring_rows=sizes.ring_rows,
        )


class ScheduleInfo(NamedTuple):
    """See MokScheduleInfo in mok.h."""

    num_tokens: int
    num_tokens_total: int
    num_experts: int
    num_local_experts: int
    first_expert: int
    num_macrobatches: int
    num_rows: int
    num_row_blocks: int
    minibatch_rows: int
    ring_rows: int


class ScheduleCall(NamedTuple):
    """What builds of schedules of equal shapes have in common."""

    struct: _C.CudaLayer
    scratch_bytes: int
    sizes: ScheduleSizes


class PassCall(NamedTuple):
    """What passes of equal shapes have in common.

    Attributes:
      layout: of a ring in one buffer.
      swiglu_limit: 0 for none.
    """

    struct: _C.CudaPass
    scratch_bytes: int
    layout: RingLayout
    swiglu_limit: float


def _layer_struct(
    plan: Plan, num_tokens: int, experts: tuple[int, int, int], widths: tuple[int, int]
) -> _C.CudaLayer:
    """experts: El, first expert, E. widths: I and Is."""
    layer = _C.CudaLayer()
    layer.num_local_experts, layer.first_expert, layer.num_experts = experts
    layer.num_tokens = num_tokens
    layer.minibatch_rows = plan.minibatch_rows
    layer.macrobatch_rows = max(plan.ring_rows, ROW_BLOCK)
    layer.num_sms = plan.num_sms
    layer.intermediate, layer.shared_intermediate = widths
    return layer


def schedule_call(
    engine: CudaEngine,
    plan: Plan,
    num_tokens: int,
    num_local_experts: int,
    num_experts: int,
    widths: tuple[int, int] = UNKNOWN_WIDTHS,
) -> ScheduleCall:
    """Sizes of a schedule. With several ranks and num_experts = 0 the ranks meet on the host.

    widths: I and Is, which the kernel compares on all ranks; nothing else depends on them.
    """
    first_expert, num_experts = engine.owned_experts(num_local_experts, num_experts)
    experts = (num_local_experts, first_expert, num_experts)
    layer = _layer_struct(plan, num_tokens, experts, widths)
    memory = engine.layer_memory(layer)
    sizes = ScheduleSizes(
        num_tokens,
        engine.topk,
        *experts,
        ring_rows=plan.ring_rows,
        minibatch_rows=plan.minibatch_rows,
        max_tokens=engine.max_tokens,
        num_words=plan.schedule_words,
        first_route=_first_saved_route(plan.schedule_words, num_tokens * engine.topk),
        result_offset=memory.result_offset,
        expert_rows_offset=memory.expert_rows_offset,
    )
    planned = 4 * sizes.first_route
    if memory.schedule_bytes > planned:
        raise RuntimeError(f"the schedule takes {memory.schedule_bytes} bytes, planned {planned}")
    return ScheduleCall(layer, memory.schedule_scratch_bytes, sizes)


def pass_call(
    engine: CudaEngine,
    plan: Plan,
    sizes: ScheduleSizes,
    layer: LayerTensors,
    swiglu_limit: float,
    is_backward: bool = False,
) -> PassCall:
    """Sizes of a pass. swiglu_limit: 0 for none.

    Refuses in the forward already what only the backward would find wrong: a rank that fails in a
    backward leaves the others alone there.
    """
    _check_age(sizes, engine)
    widths = (layer.intermediate, layer.shared_intermediate)
    layer_struct = _layer_struct(plan, layer.num_tokens, sizes[2:5], widths)
    num_comm = (plan.fwd_num_comm, plan.bwd_num_comm)
    if num_comm[not is_backward] != num_comm[is_backward]:
        layer_struct.num_comm_sms = num_comm[not is_backward]
        engine.layer_memory(layer_struct)
    layer_struct.num_comm_sms = num_comm[is_backward]
    memory = engine.layer_memory(layer_struct)
    scratch = memory.backward_scratch_bytes if is_backward else memory.forward_scratch_bytes
    shapes = ring_shapes(layer.x.shape[1], sizes.ring_rows, layer.num_tokens, *widths)
    layout = RingLayout.of_shapes(shapes)
    struct = _C.CudaPass(layer_struct, swiglu_limit)
    struct.set_ring(layout.rows, layout.begin_bytes)
    return PassCall(struct, scratch, layout, swiglu_limit)


def schedule_of_words(words: Tensor, stream: int, sizes: ScheduleSizes) -> CudaSchedule:
    """A schedule that keeps its expert ids, in memory of the stream."""
    address = words.data_ptr()
    return CudaSchedule(words, stream, sizes, (address + 4 * sizes.first_route, 4, address))


def queue_schedule(
    engine: CudaEngine, stream: int, call: ScheduleCall, routes: Tensor, keeps_ids: bool = True
) -> CudaSchedule:
    """Queues the schedule of int64 or int32 routes [..., K], contiguous. Collective.

    keeps_ids: for passes that do not see the caller's tensor, or see it changed.
    """
    words = engine.new_words(call.sizes.num_words)
    routing = (routes.data_ptr(), routes.element_size(), words.data_ptr())
    engine.build_schedule(stream, call, routing)
    if not keeps_ids:
        return CudaSchedule(words, stream, call.sizes, routing)
    kept = torch.as_strided(words, routes.shape, routes.stride(), call.sizes.first_route)
    kept.copy_(routes)
    return schedule_of_words(words, stream, call.sizes)


def build_schedule(
    workspace: Workspace,
    plan: Plan,
    routes: Tensor,
    num_local_experts: int,
    num_experts: int,
    widths: tuple[int, int] = UNKNOWN_WIDTHS,
) -> tuple[CudaSchedule, ScheduleCall]:
    """Queues the schedule of int64 or int32 routes [T, K]. Collective.

    num_experts: E, which the kernel compares on all ranks; 0: what the ranks' experts add up to.
    widths: see schedule_call.
    """
    engine = workspace.engine
    with workspace.reporting_errors(_C.OP_SCHEDULE):
        experts = (num_local_experts, num_experts)
        call = schedule_call(engine, plan, routes.shape[0], *experts, widths)
        schedule = queue_schedule(engine, engine.current_stream(), call, routes)
    return schedule, call


def _check_age(sizes: ScheduleSizes, engine: CudaEngine):
    """Where a schedule's tables lie depends on the most tokens that there can be."""
    if engine.ep_size > 1 and sizes.max_tokens != engine.max_tokens:
        raise ValueError(
            f"schedule: built for at most {sizes.max_tokens} tokens of a rank, but by now the "
            f"workspace has room for {engine.max_tokens}: build it again"
        )


def _first_saved_route(num_words: int, num_routes: int) -> int:
    return (num_words - num_routes) // ROUTES_ALIGNMENT_WORDS * ROUTES_ALIGNMENT_WORDS


def is_aligned(words: Tensor) -> bool:
    """Whether kernels can read a schedule from there."""
    return words.data_ptr() % _WORDS_ALIGNMENT == 0


def load_schedule(
    words: Tensor, layer: LayerTensors, plan: Plan, workspace: Workspace
) -> CudaSchedule:
    """A schedule that build_schedule made, for a backward of this layer."""
    tokens = tokens_in_plan(workspace, layer.num_tokens)
    planned = schedule_words("cuda", tokens, workspace.topk, layer.num_local_experts)
    if not words.numel() == planned == plan.schedule_words:
        raise ValueError(
            f"schedule_words: expected {planned} words for up to {tokens} tokens of all ranks, got "
            f"{words.numel()} (a workspace of several ranks may not grow between a forward and its "
            "backward)"
        )
    if not is_aligned(words):  # a part of another tensor, from an offloading hook
        words = words.clone()
    sizes = ScheduleSizes(
        num_tokens=layer.num_tokens,
        topk=workspace.topk,
        num_local_experts=layer.num_local_experts,
        # Of no consequence once the schedule is built.
        first_expert=0,
        num_experts=layer.num_local_experts,
        ring_rows=plan.ring_rows,
        minibatch_rows=plan.minibatch_rows,
        max_tokens=workspace.num_local_tokens,
        num_words=words.numel(),
        first_route=_first_saved_route(words.numel(), layer.num_tokens * workspace.topk),
        result_offset=0,
        expert_rows_offset=0,
    )
    return schedule_of_words(words, workspace.engine.current_stream(), sizes)


class BackwardOperands(NamedTuple):
    """What a backward has beside a forward's tensors; addresses, 0 for none.

    Attributes:
      outputs: of d_x, d_topk_weight and d_shared_scale.
      routed, shared: of the gradients of gate, up and down; the code of their dtype; whether they
        are added to.
    """

    d_out: int
    kept_macrobatches: int
    outputs: Sequence[int]
    routed: tuple[Sequence[int], int, bool]
    shared: tuple[Sequence[int], int, bool]
