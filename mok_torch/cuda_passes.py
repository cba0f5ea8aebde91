"""Runs the passes of a GPU on checked tensors: outputs, scratch and the C API's structs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mok_torch import _C
from mok_torch.checks import LayerTensors
from mok_torch.plan import (
    ROUTES_ALIGNMENT_WORDS,
    ROW_BLOCK,
    Plan,
    schedule_words,
    tokens_in_plan,
)
from mok_torch.workspace import Workspace


@dataclasses.dataclass(frozen=True)
class CudaSchedule:
    """A schedule in device memory, and what the host knows of it.

    Attributes:
      words: int32, the schedule.
      routes: [T, K] the expert ids that it was built from.
      first_expert, num_experts: of this rank, and E.
    """

    words: Tensor
    routes: Tensor  # of forwards as given, of backwards int32 inside words
    num_local_experts: int
    first_expert: int
    num_experts: int
    ring_rows: int
    minibatch_rows: int
    max_tokens: int  # of the workspace that built it
    result_offset: int
    expert_rows_offset: int

    @property
    def num_tokens(self) -> int:
        return self.routes.shape[0]

    def tokens_per_expert(self) -> Tensor:
        """int64 [El] on the GPU; nothing waits."""
        begin = self.expert_rows_offset // 4
        return self.words[begin : begin + self.num_local_experts].to(torch.int64)

    def info(self) -> ScheduleInfo:
        """All of MokScheduleInfo. Waits for the schedule kernel."""
        begin = self.result_offset // 4
        blocks, tokens = self.words[begin : begin + 4].view(torch.int64).tolist()
        rows_of_ring = max(self.ring_rows, ROW_BLOCK)
        return ScheduleInfo(
            num_tokens=self.num_tokens,
            num_tokens_total=tokens,
            num_experts=self.num_experts,
            num_local_experts=self.num_local_experts,
            first_expert=self.first_expert,
            num_macrobatches=-(-blocks * ROW_BLOCK // rows_of_ring),
            num_rows=int(self.tokens_per_expert().sum()),
            num_row_blocks=blocks,
            minibatch_rows=self.minibatch_rows,
            ring_rows=self.ring_rows,
        )


@dataclasses.dataclass(frozen=True)
class ScheduleInfo:
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


def _layer_struct(plan: Plan, num_tokens: int, experts: tuple[int, int, int]) -> _C.CudaLayer:
    """experts: El, first expert, E."""
    layer = _C.CudaLayer()
    layer.num_local_experts, layer.first_expert, layer.num_experts = experts
    layer.num_tokens = num_tokens
    layer.minibatch_rows = plan.minibatch_rows
    layer.macrobatch_rows = max(plan.ring_rows, ROW_BLOCK)
    # Of no consequence to a schedule.
    layer.intermediate = 8
    return layer


def build_schedule(
    workspace: Workspace,
    plan: Plan,
    routes: Tensor,
    num_local_experts: int,
    num_experts: int,
    whole_call: bool,
) -> CudaSchedule:
    """Queues the schedule of int64 or int32 routes [T, K]. Collective.

    num_experts: E, which the kernel compares on all ranks; 0: what the ranks' experts add up to.
    whole_call: see Workspace.reporting_errors.
    """
    engine = workspace.engine
    # What earlier kernels found is raised before anything of this call is queued. A rank that
    # raises is replaced in this call, so that the ranks stay in step wherever each of them raises.
    with workspace.reporting_errors(_C.OP_SCHEDULE, whole_call):
        engine.check()
        first_expert, num_experts = engine.owned_experts(num_local_experts, num_experts)
        layer = _layer_struct(plan, routes.shape[0], (num_local_experts, first_expert, num_experts))
        memory = engine.layer_memory(layer)
        planned = 4 * _first_saved_route(plan.schedule_words, routes.numel())
        if memory.schedule_bytes > planned:
            raise RuntimeError(
                f"the schedule takes {memory.schedule_bytes} bytes, planned {planned}"
            )
        words = torch.empty(plan.schedule_words, dtype=torch.int32, device=engine.device)
        scratch = engine.scratch(memory.schedule_scratch_bytes)
    args = _C.CudaScheduleArgs()
    args.topk_idx, args.topk_idx_bytes = routes.data_ptr(), routes.element_size()
    args.schedule, args.scratch = words.data_ptr(), scratch.data_ptr()
    engine.build_schedule(layer, args)
    if whole_call:
        # For the operator of the backward, which gets no other tensor of the routing.
        _saved_routes(words, routes.shape).copy_(routes)
    return CudaSchedule(
        words=words,
        routes=routes,
        num_local_experts=num_local_experts,
        first_expert=first_expert,
        num_experts=num_experts,
        ring_rows=plan.ring_rows,
        minibatch_rows=plan.minibatch_rows,
        max_tokens=workspace.num_local_tokens,
        result_offset=memory.result_offset,
        expert_rows_offset=memory.expert_rows_offset,
    )


def _check_age(schedule: CudaSchedule, workspace: Workspace):
    """Where a schedule's tables lie depends on the most tokens that there can be."""
    if workspace.ep_size > 1 and schedule.max_tokens != workspace.num_local_tokens:
        raise ValueError(
            f"schedule: built for at most {schedule.max_tokens} tokens of a rank, but by now the "
            f"workspace has room for {workspace.num_local_tokens}: build it again"
        )


def _saved_routes(words: Tensor, shape: torch.Size) -> Tensor:
    """The int32 expert ids at the end of a schedule's words."""
    begin = _first_saved_route(words.numel(), shape.numel())
    return words[begin : begin + shape.numel()].view(shape)


def _first_saved_route(num_words: int, num_routes: int) -> int:
    return (num_words - num_routes) // ROUTES_ALIGNMENT_WORDS * ROUTES_ALIGNMENT_WORDS


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
    return CudaSchedule(
        words=words,
        routes=_saved_routes(words, layer.topk_weight.shape),
        num_local_experts=layer.num_local_experts,
        # Of no consequence once the schedule is built.
        first_expert=0,
        num_experts=max(layer.num_local_experts, 1),
        ring_rows=plan.ring_rows,
        minibatch_rows=plan.minibatch_rows,
        max_tokens=workspace.num_local_tokens,
        result_offset=0,
        expert_rows_offset=0,
    )


def run_backward(call, args: _C.CudaBackwardArgs):
    """Queues the backward of a passes.LayerCall, all of whose tensors args hold. Collective."""
    engine, schedule = call.workspace.engine, call.schedule
    _check_age(schedule, call.workspace)
    layer = _layer_of(call.plan, schedule, call.layer, call.plan.bwd_num_comm)
    args.topk_idx = schedule.routes.data_ptr()
    args.topk_idx_bytes = schedule.routes.element_size()
    args.schedule = schedule.words.data_ptr()
    scratch = engine.scratch(engine.layer_memory(layer).backward_scratch_bytes)
    args.scratch = scratch.data_ptr()
    engine.backward(layer, args)


def run_forward(call, set_tensors, out: Tensor):
    """Queues the forward of a passes.LayerCall, which writes the ring and out [T, H]. Collective.

    set_tensors(args): sets args.layer and args.context.
    """
    engine, schedule, tensors = call.workspace.engine, call.schedule, call.layer
    _check_age(schedule, call.workspace)
    layer = _layer_of(call.plan, schedule, tensors, call.plan.fwd_num_comm)
    args = _C.CudaForwardArgs()
    set_tensors(args)
    args.topk_idx = schedule.routes.data_ptr()
    args.topk_idx_bytes = schedule.routes.element_size()
    args.schedule = schedule.words.data_ptr()
    args.out = out.data_ptr()
    scratch = engine.scratch(engine.layer_memory(layer).forward_scratch_bytes)
    args.scratch = scratch.data_ptr()
    engine.forward(layer, args)


def _layer_of(
    plan: Plan, schedule: CudaSchedule, tensors: LayerTensors, num_comm: int
) -> _C.CudaLayer:
    experts = (schedule.num_local_experts, schedule.first_expert, schedule.num_experts)
    layer = _layer_struct(plan, tensors.num_tokens, experts)
    layer.intermediate = tensors.intermediate
    layer.shared_intermediate = tensors.shared_intermediate
    layer.num_comm_sms = num_comm
    return layer
