#include "mok_megakernel/cuda/cuda_workspace.h"

#include <atomic>
#include <cmath>

#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_megakernel/cuda/join_pass.h"
#include "mok_megakernel/cuda/stage_rows.h"
#include "mok_schedule/device/launch_schedule.h"

namespace mok {
namespace {

static_assert(MOK_CUDA_MAX_RANKS == kMaxExchangeRanks);
static_assert(MOK_CUDA_MAX_RANKS <= kMaxScheduleRanks);

Status CheckPart(int32_t part, int32_t lowest, int32_t highest) {
  const bool is_stage = part == MOK_CUDA_WHOLE || part == MOK_CUDA_STAGE;
  if (is_stage || (part >= lowest && part <= highest)) return OkStatus();
  return InvalidArgumentError("args.part: expected ", MOK_CUDA_WHOLE, ", ", MOK_CUDA_STAGE, " or ",
                              lowest, " to ", highest, ", got ", part);
}

Status CheckPointer(const char* name, const void* pointer) {
  if (pointer == nullptr) return InvalidArgumentError(name, ": expected a pointer, got null");
  if (reinterpret_cast<uintptr_t>(pointer) % MOK_CUDA_ALIGNMENT == 0) return OkStatus();
  return InvalidArgumentError(name, ": expected an address aligned to ",
                              static_cast<int>(MOK_CUDA_ALIGNMENT), " bytes, got ", pointer);
}

Status CheckWidth(const char* name, const MokWeights& weights, int32_t expected) {
  if (weights.intermediate == expected) return OkStatus();
  return InvalidArgumentError("args.layer.", name, ".intermediate: expected ", expected,
                              ", the layer's, got ", weights.intermediate);
}

const BFloat16* Rows(const void* pointer) { return static_cast<const BFloat16*>(pointer); }
BFloat16* Rows(void* pointer) { return static_cast<BFloat16*>(pointer); }

}  // namespace

CudaWorkspace::CudaWorkspace(const CudaWorkspaceShape& shape, void* const* heap_of_rank,
                             void* state, CudaRecords* records)
    : shape_(shape), heap_(shape), state_layout_(shape), state_(state), records_(records) {
  for (int32_t rank = 0; rank < shape.ep_size; ++rank) {
    heap_of_rank_[static_cast<size_t>(rank)] = heap_of_rank[rank];
  }
}

StatusOr<CudaWorkspace> CudaWorkspace::Create(const CudaWorkspaceShape& shape,
                                              void* const* heap_of_rank, void* state,
                                              CudaRecords* records) {
  for (int32_t rank = 0; rank < shape.ep_size; ++rank) {
    MOK_RETURN_IF_ERROR(
        CheckPointer(StrCat("heap_of_rank[", rank, "]").c_str(), heap_of_rank[rank]));
  }
  MOK_RETURN_IF_ERROR(CheckPointer("state", state));
  if (records == nullptr) return InvalidArgumentError("records: expected a pointer, got null");
  CudaWorkspace workspace(shape, heap_of_rank, state, records);
  std::array<std::byte*, MOK_CUDA_MAX_RANKS> regions = {};
  for (size_t rank = 0; rank < static_cast<size_t>(shape.ep_size); ++rank) {
    regions[rank] = workspace.heap_.At<std::byte>(heap_of_rank[rank], CudaHeapLayout::kSchedule);
  }
  MOK_RETURN_IF_ERROR(runtime::CopyToDevice(
      workspace.state_layout_.At<void>(state, CudaStateLayout::kScheduleRegions), regions.data(),
      static_cast<size_t>(shape.ep_size) * sizeof(std::byte*)));
  return workspace;
}

Status CudaWorkspace::CheckUsable() const {
  const DeviceWaitRecord& schedule = records_->schedule_wait;
  if (schedule.state == 2 && schedule.task_kind == static_cast<int32_t>(ScheduleWait::kRank)) {
    return DeadlineExceededError("rank ", schedule.rank, " waited ", schedule.waited_ns / 1000000,
                                 " ms for the expert ids of rank ", schedule.task, " in batch ",
                                 schedule.expected, ", which it last sent in batch ",
                                 schedule.observed);
  }
  MOK_RETURN_IF_ERROR(CheckDeviceWaitRecord(schedule, {nullptr, ScheduleWaitName}));
  return CheckForwardRecord(records_->pass_wait);
}

Status CudaWorkspace::Check() {
  MOK_RETURN_IF_ERROR(CheckUsable());
  ScheduleErrorRecord& record = records_->schedule_error;
  std::atomic_ref<uint32_t> state(record.state);
  if (state.load(std::memory_order_acquire) != 2) return OkStatus();
  const Status error = CheckScheduleErrorRecord(record);
  state.store(0, std::memory_order_release);  // the next one may be recorded
  return error;
}

StatusOr<ScheduleParams> CudaWorkspace::MakeScheduleParams(const CudaLayerPlan& plan,
                                                           const MokCudaLayer& layer,
                                                           const MokCudaScheduleArgs& args) const {
  MOK_RETURN_IF_ERROR(CheckPointer("args.schedule", args.schedule));
  MOK_RETURN_IF_ERROR(CheckPointer("args.scratch", args.scratch));
  if (args.topk_idx == nullptr && layer.num_tokens > 0) {
    return InvalidArgumentError("args.topk_idx: expected a pointer, got null");
  }
  ScheduleParams params = {};
  params.tokens = {args.topk_idx, layer.num_tokens, args.topk_idx_bytes};
  params.layer.rank = shape_.rank;
  params.layer.ep_size = shape_.ep_size;
  params.layer.topk = shape_.topk;
  params.layer.num_experts = layer.num_experts;
  params.layer.first_expert = layer.first_expert;
  params.exchange = {state_layout_.At<std::byte*>(state_, CudaStateLayout::kScheduleRegions),
                     heap_.schedule()};
  params.schedule = plan.schedule.At(args.schedule);
  params.scratch = plan.schedule_scratch.At(args.scratch);
  params.state = state_layout_.At<ScheduleState>(state_, CudaStateLayout::kScheduleState);
  params.error = &records_->schedule_error;
  params.wait = {&records_->schedule_wait,
                 state_layout_.At<uint32_t>(state_, CudaStateLayout::kScheduleAbort),
                 shape_.timeout_ns, shape_.rank};
  params.steps = args.part == MOK_CUDA_STAGE   ? ScheduleSteps::kStage
                 : args.part == MOK_CUDA_BUILD ? ScheduleSteps::kBuild
                                               : ScheduleSteps::kAll;
  return params;
}

Status CudaWorkspace::BuildSchedule(const MokCudaLayer& layer, const MokCudaScheduleArgs& args) {
  MOK_RETURN_IF_ERROR(CheckPart(args.part, MOK_CUDA_BUILD, MOK_CUDA_BUILD));
  MOK_RETURN_IF_ERROR(args.part == MOK_CUDA_BUILD ? CheckUsable() : Check());
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
  MOK_ASSIGN_OR_RETURN(const ScheduleParams params, MakeScheduleParams(plan, layer, args));
  return LaunchSchedule(GetScheduleKernel(), params,
                        {plan.schedule_grid_blocks, shape_.device, args.stream});
}

Status CudaWorkspace::ReportError(const MokCudaErrorArgs& args) {
  if (args.code <= MOK_OK || args.code > MOK_INTERNAL) {
    return InvalidArgumentError("args.code: expected an error of MokStatusCode, got ", args.code);
  }
  MOK_RETURN_IF_ERROR(CheckUsable());
  if (shape_.ep_size == 1) return OkStatus();
  const MokCudaLayer layer = CudaErrorLayer();
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
  MokCudaScheduleArgs schedule = {};
  schedule.topk_idx_bytes = sizeof(int64_t);
  schedule.schedule = args.scratch;
  schedule.scratch = static_cast<std::byte*>(args.scratch) +
                     RoundUp<int64_t>(plan.schedule.bytes(), MOK_CUDA_ALIGNMENT);
  MOK_ASSIGN_OR_RETURN(ScheduleParams params, MakeScheduleParams(plan, layer, schedule));
  params.layer.failure = static_cast<StatusCode>(args.code);
  MOK_RETURN_IF_ERROR(LaunchSchedule(GetScheduleKernel(), params,
                                     {plan.schedule_grid_blocks, shape_.device, args.stream}));
  if (args.joins_forward == 0) return OkStatus();
  JoinPassParams join = {};
  join.meeting.rank = shape_.rank;
  join.meeting.num_ranks = shape_.ep_size;
  for (int32_t rank = 0; rank < shape_.ep_size; ++rank) {
    join.meeting.flags_of_rank[rank] =
        heap_.At<uint64_t>(heap_of_rank_[static_cast<size_t>(rank)], CudaHeapLayout::kFlags);
  }
  join.state = plan.pass_memory.At(state_layout_.At<void>(state_, CudaStateLayout::kPasses)).state;
  return LaunchJoinPass(join, shape_.device, args.stream);
}

Status CudaWorkspace::StageX(const MokCudaForwardArgs& args, int64_t num_tokens) const {
  if (shape_.ep_size == 1) return OkStatus();
  void* staged = heap_.At<void>(own_heap(), CudaHeapLayout::kX);
  if (args.layer.x == staged) return OkStatus();
  const int64_t row_bytes = shape_.hidden * static_cast<int64_t>(sizeof(BFloat16));
  return LaunchStageRows({args.layer.x, staged, num_tokens * row_bytes}, shape_.num_sms,
                         shape_.device, args.stream);
}

ForwardArguments CudaWorkspace::Arguments(const CudaLayerPlan& plan, const MokCudaLayer& layer,
                                          const MokCudaForwardArgs& args) const {
  ForwardArguments to;
  to.tokens.num_tokens = layer.num_tokens;
  to.tokens.x = Rows(args.layer.x);
  to.tokens.topk_weight = args.layer.topk_weight;
  to.tokens.expert_ids = args.topk_idx;
  to.tokens.id_bytes = args.topk_idx_bytes;
  to.tokens.shared_scale = args.layer.shared_scale;
  to.tokens.out = Rows(args.out);
  to.weights = {Rows(args.layer.routed.gate), Rows(args.layer.routed.up),
                Rows(args.layer.routed.down), Rows(args.layer.shared.gate),
                Rows(args.layer.shared.up),   Rows(args.layer.shared.down)};
  to.context = {Rows(args.context.ring_x), Rows(args.context.ring_gate), Rows(args.context.ring_up),
                Rows(args.context.shared_gate), Rows(args.context.shared_up)};
  to.peers.rank = shape_.rank;
  for (int32_t rank = 0; rank < shape_.ep_size; ++rank) {
    void* heap = heap_of_rank_[static_cast<size_t>(rank)];
    const bool own = rank == shape_.rank;
    to.peers.x_of_rank[rank] = own ? to.tokens.x : heap_.At<BFloat16>(heap, CudaHeapLayout::kX);
    to.peers.routes_of_rank[rank] = heap_.At<BFloat16>(heap, CudaHeapLayout::kRoutes);
    to.peers.flags_of_rank[rank] = heap_.At<uint64_t>(heap, CudaHeapLayout::kFlags);
  }
  to.schedule = plan.schedule.At(const_cast<void*>(args.schedule));
  to.scratch = plan.forward_scratch.At(args.scratch);
  // What lives on between passes is the workspace's, at the same places for every layer.
  static_cast<PassMemory&>(to.scratch) =
      plan.pass_memory.At(state_layout_.At<void>(state_, CudaStateLayout::kPasses));
  if (!plan.may_have_rows) to.context.ring_x = to.scratch.y;  // its map needs memory
  to.record = &records_->pass_wait;
  to.timeout_ns = shape_.timeout_ns;
  to.swiglu_limit = args.layer.swiglu_limit > 0 ? args.layer.swiglu_limit : INFINITY;
  return to;
}

Status CudaWorkspace::CheckForward(const CudaLayerPlan& plan, const MokCudaLayer& layer,
                                   const MokCudaForwardArgs& args) const {
  MOK_RETURN_IF_ERROR(CheckPointer("args.schedule", args.schedule));
  MOK_RETURN_IF_ERROR(CheckPointer("args.scratch", args.scratch));
  if (plan.pass_memory.bytes() > state_layout_.pass_bytes()) {
    return InternalError("the workspace keeps ", state_layout_.pass_bytes(),
                         " bytes of counters, the layer needs ", plan.pass_memory.bytes());
  }
  if (args.context.ring_rows < plan.config.ring_rows() && plan.may_have_rows) {
    return InvalidArgumentError("args.context.ring_rows: expected at least ",
                                plan.config.ring_rows(), ", got ", args.context.ring_rows);
  }
  MOK_RETURN_IF_ERROR(CheckWidth("routed", args.layer.routed, layer.intermediate));
  return CheckWidth("shared", args.layer.shared, layer.shared_intermediate);
}

Status CudaWorkspace::Forward(const MokCudaLayer& layer, const MokCudaForwardArgs& args) {
  MOK_RETURN_IF_ERROR(CheckPart(args.part, MOK_CUDA_EXCHANGE, MOK_CUDA_REDUCE));
  MOK_RETURN_IF_ERROR(CheckUsable());
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
  MOK_RETURN_IF_ERROR(CheckForward(plan, layer, args));
  const ForwardKernelInfo kernel = ForwardKernelOf(plan.config.order);
  ForwardConfig config = plan.config;
  config.chunk_bytes = std::min(config.chunk_bytes, kernel.max_chunk_bytes);
  config.dedicated_chunk_bytes =
      std::min(config.dedicated_chunk_bytes, kernel.max_dedicated_chunk_bytes);
  MOK_ASSIGN_OR_RETURN(const ForwardParams params,
                       MakeForwardParams(plan.shape, config, kernel, Arguments(plan, layer, args)));
  if (args.part == MOK_CUDA_WHOLE || args.part == MOK_CUDA_STAGE) {
    MOK_RETURN_IF_ERROR(StageX(args, layer.num_tokens));
    if (args.part == MOK_CUDA_STAGE) return OkStatus();
  }
  const ForwardMode mode = args.part == MOK_CUDA_EXCHANGE ? ForwardMode::kExchangeAndCompute
                           : args.part == MOK_CUDA_REDUCE ? ForwardMode::kReduceOnly
                                                          : ForwardMode::kWhole;
  return LaunchForward(kernel, params, {mode, config.num_blocks, shape_.device, args.stream});
}

}  // namespace mok
