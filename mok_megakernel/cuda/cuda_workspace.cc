#include "mok_megakernel/cuda/cuda_workspace.h"

#include <atomic>
#include <string>

#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_megakernel/cuda/call_checks.h"
#include "mok_megakernel/cuda/leave_passes.h"
#include "mok_schedule/device/launch_schedule.h"

namespace mok {

static_assert(MOK_CUDA_MAX_RANKS == kMaxExchangeRanks);
static_assert(MOK_CUDA_MAX_RANKS <= kMaxScheduleRanks);

namespace {

// Of a record that a kernel may be writing: whether it is complete, and what it holds may be read.
bool IsWritten(uint32_t& state) {
  return std::atomic_ref<uint32_t>(state).load(std::memory_order_acquire) == 2;
}

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
        CheckMemory(StrCat("heap_of_rank[", rank, "]").c_str(), heap_of_rank[rank]));
  }
  MOK_RETURN_IF_ERROR(CheckMemory("state", state));
  MOK_RETURN_IF_ERROR(CheckAligned("records", records, alignof(CudaRecords)));
  CudaWorkspace workspace(shape, heap_of_rank, state, records);
  MOK_RETURN_IF_ERROR(workspace.CheckHeaps());
  std::array<std::byte*, MOK_CUDA_MAX_RANKS> regions = {};
  for (size_t rank = 0; rank < static_cast<size_t>(shape.ep_size); ++rank) {
    regions[rank] = workspace.heap_.At<std::byte>(heap_of_rank[rank], CudaHeapLayout::kSchedule);
  }
  MOK_RETURN_IF_ERROR(runtime::CopyToDevice(
      workspace.state_layout_.At<void>(state, CudaStateLayout::kScheduleRegions), regions.data(),
      static_cast<size_t>(shape.ep_size) * sizeof(std::byte*)));
  return workspace;
}

Status CudaWorkspace::CheckHeaps() const {
  CallMemory memory = OwnMemory();
  std::array<std::string, MOK_CUDA_MAX_RANKS> names;
  for (int32_t rank = 0; rank < shape_.ep_size; ++rank) {
    const auto index = static_cast<size_t>(rank);
    if (rank == shape_.rank) continue;
    names[index] = StrCat("heap_of_rank[", rank, "]");
    // How large it is depends on the other rank's options, which may disagree.
    memory.Writes(names[index].c_str(), heap_of_rank_[index], BytesOf(1));
  }
  return memory.Check();
}

CallMemory CudaWorkspace::OwnMemory() const {
  CallMemory memory;
  memory.Writes("the workspace's heap", own_heap(), BytesOf(static_cast<int64_t>(heap_.bytes())));
  memory.Writes("the workspace's state", state_,
                BytesOf(static_cast<int64_t>(state_layout_.bytes())));
  return memory;
}

Status CudaWorkspace::CheckUsable() const {
  MOK_RETURN_IF_ERROR(CheckWaits());
  if (!has_left_) return OkStatus();
  return FailedPreconditionError("rank ", shape_.rank,
                                 " has left this workspace because of an error in a forward or "
                                 "backward that other ranks took part in: make a new workspace");
}

Status CudaWorkspace::CheckScheduleWait() const {
  const DeviceWaitRecord& schedule = records_->schedule_wait;
  if (!IsWritten(records_->schedule_wait.state)) return OkStatus();
  if (schedule.task_kind == static_cast<int32_t>(ScheduleWait::kRank)) {
    return DeadlineExceededError("rank ", schedule.rank, " waited ", schedule.waited_ns / 1000000,
                                 " ms for the expert ids of rank ", schedule.task, " in batch ",
                                 schedule.expected, ", which it last sent in batch ",
                                 schedule.observed);
  }
  return CheckDeviceWaitRecord(schedule, {nullptr, ScheduleWaitName});
}

Status CudaWorkspace::CheckWaits() const {
  MOK_RETURN_IF_ERROR(CheckScheduleWait());
  return IsWritten(records_->pass_wait.state) ? CheckPassRecord(records_->pass_wait) : OkStatus();
}

Status CudaWorkspace::Check(void* stream) {
  MOK_RETURN_IF_ERROR(CheckUsable());
  ScheduleErrorRecord& record = records_->schedule_error;
  if (!IsWritten(record.state)) return OkStatus();
  const Status error = CheckScheduleErrorRecord(record);
  MOK_RETURN_IF_ERROR(Resume(stream));
  // The next one may be recorded.
  std::atomic_ref<uint32_t>(record.state).store(0, std::memory_order_release);
  return error;
}

Status CudaWorkspace::CheckRanks() const {
  if (shape_.ep_size == 1) return OkStatus();
  std::array<uint64_t, kNumMeetings * MOK_CUDA_MAX_RANKS> flags = {};
  MOK_RETURN_IF_ERROR(runtime::CopyToHost(flags.data(),
                                          heap_.At<void>(own_heap(), CudaHeapLayout::kFlags),
                                          RankMeeting::FlagBytes(shape_.ep_size)));
  for (int32_t rank = 0; rank < shape_.ep_size; ++rank) {
    const uint64_t flag = flags[static_cast<size_t>(rank)];  // of the entry
    if (flag < kLeftFlag || rank == shape_.rank) continue;
    return Status(static_cast<StatusCode>(flag - kLeftFlag),
                  StrCat("rank ", rank,
                         " has left this workspace because of an error in a forward "
                         "or backward: see its error, and make a new workspace"));
  }
  return OkStatus();
}

ScheduleParams CudaWorkspace::CommonScheduleParams(const CudaLayerPlan& plan,
                                                   const MokCudaLayer& layer) const {
  ScheduleParams params = {};
  params.tokens.id_bytes = sizeof(int64_t);
  params.layer.rank = shape_.rank;
  params.layer.ep_size = shape_.ep_size;
  params.layer.topk = shape_.topk;
  params.layer.hidden = shape_.hidden;
  params.layer.intermediate = layer.intermediate;
  params.layer.shared_intermediate = layer.shared_intermediate;
  params.layer.num_experts = layer.num_experts;
  params.layer.first_expert = layer.first_expert;
  params.exchange = {state_layout_.At<std::byte*>(state_, CudaStateLayout::kScheduleRegions),
                     heap_.schedule()};
  params.schedule = plan.schedule.At(nullptr);
  params.state = state_layout_.At<ScheduleState>(state_, CudaStateLayout::kScheduleState);
  params.refusals = &SharedPassMemory(plan).state->refusals;
  params.error = &records_->schedule_error;
  params.wait = {&records_->schedule_wait,
                 state_layout_.At<uint32_t>(state_, CudaStateLayout::kScheduleAbort),
                 shape_.timeout_ns, shape_.rank};
  return params;
}

Status CudaWorkspace::Resume(void* stream) const {
  if (shape_.ep_size == 1) return OkStatus();
  const MokCudaLayer layer = CudaErrorLayer();
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
  ScheduleParams params = CommonScheduleParams(plan, layer);
  params.steps = ScheduleSteps::kResume;
  return LaunchSchedule(GetScheduleKernel(), params,
                        {plan.schedule_grid_blocks, shape_.device, stream});
}

StatusOr<ScheduleParams> CudaWorkspace::MakeScheduleParams(const CudaLayerPlan& plan,
                                                           const MokCudaLayer& layer,
                                                           const MokCudaScheduleArgs& args) const {
  MOK_RETURN_IF_ERROR(CheckMemory("schedule", args.schedule));
  MOK_RETURN_IF_ERROR(CheckMemory("scratch", args.scratch));
  MOK_RETURN_IF_ERROR(CheckIdBytes(args.topk_idx_bytes));
  if (layer.num_tokens > 0) MOK_RETURN_IF_ERROR(CheckTensor("topk_idx", args.topk_idx));
  CallMemory memory = OwnMemory();
  memory.Reads("topk_idx", args.topk_idx, {layer.num_tokens, shape_.topk, args.topk_idx_bytes});
  memory.Writes("schedule", args.schedule, BytesOf(plan.schedule.bytes()));
  memory.Writes("scratch", args.scratch, BytesOf(plan.schedule_scratch.bytes()));
  MOK_RETURN_IF_ERROR(memory.Check());
  ScheduleParams params = CommonScheduleParams(plan, layer);
  params.tokens = {args.topk_idx, layer.num_tokens, args.topk_idx_bytes};
  params.schedule = plan.schedule.At(args.schedule);
  params.scratch = plan.schedule_scratch.At(args.scratch);
  params.steps = args.part == MOK_CUDA_STAGE   ? ScheduleSteps::kStage
                 : args.part == MOK_CUDA_BUILD ? ScheduleSteps::kBuild
                                               : ScheduleSteps::kAll;
  return params;
}

Status CudaWorkspace::BuildSchedule(const MokCudaLayer& layer, const MokCudaScheduleArgs& args) {
  MOK_RETURN_IF_ERROR(CheckPart(args.part, MOK_CUDA_BUILD, MOK_CUDA_BUILD));
  MOK_RETURN_IF_ERROR(CheckUsable());
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
  MOK_ASSIGN_OR_RETURN(const ScheduleParams params, MakeScheduleParams(plan, layer, args));
  return LaunchSchedule(GetScheduleKernel(), params,
                        {plan.schedule_grid_blocks, shape_.device, args.stream});
}

Status CudaWorkspace::ReportInSchedule(const MokCudaErrorArgs& args, int32_t part) const {
  const MokCudaLayer layer = CudaErrorLayer();
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
  MokCudaScheduleArgs schedule = {};
  schedule.topk_idx_bytes = sizeof(int64_t);
  schedule.part = part;
  schedule.schedule = args.scratch;
  schedule.scratch = static_cast<std::byte*>(args.scratch) +
                     RoundUp<int64_t>(plan.schedule.bytes(), MOK_CUDA_ALIGNMENT);
  MOK_ASSIGN_OR_RETURN(ScheduleParams params, MakeScheduleParams(plan, layer, schedule));
  params.layer.failure = static_cast<StatusCode>(args.code);
  return LaunchSchedule(GetScheduleKernel(), params,
                        {plan.schedule_grid_blocks, shape_.device, args.stream});
}

Status CudaWorkspace::Leave(int32_t code, void* stream) const {
  LeavePassesParams leave = {};
  leave.meeting.rank = shape_.rank;
  leave.meeting.num_ranks = shape_.ep_size;
  for (int32_t rank = 0; rank < shape_.ep_size; ++rank) {
    leave.meeting.flags_of_rank[rank] =
        heap_.At<uint64_t>(heap_of_rank_[static_cast<size_t>(rank)], CudaHeapLayout::kFlags);
  }
  leave.code = code;
  return LaunchLeavePasses(leave, shape_.device, stream);
}

Status CudaWorkspace::ReportError(const MokCudaErrorArgs& args) {
  if (args.code <= MOK_OK || args.code > MOK_INTERNAL) {
    return InvalidArgumentError("code: expected an error of MokStatusCode, got ", args.code);
  }
  MOK_RETURN_IF_ERROR(CheckRange("place", args.place, MOK_CUDA_IN_SCHEDULE, MOK_CUDA_IN_PASS));
  MOK_RETURN_IF_ERROR(CheckWaits());
  if (shape_.ep_size == 1) return OkStatus();
  MOK_RETURN_IF_ERROR(CheckMemory("scratch", args.scratch));
  MOK_ASSIGN_OR_RETURN(const int64_t scratch_bytes, CudaErrorScratchBytes(shape_));
  CallMemory memory = OwnMemory();
  memory.Writes("scratch", args.scratch, BytesOf(scratch_bytes));
  MOK_RETURN_IF_ERROR(memory.Check());
  if (args.place == MOK_CUDA_IN_PASS) {
    if (has_left_) return OkStatus();  // nobody waits in a pass for a rank that has left
    has_left_ = reported_ahead_ = true;
    MOK_RETURN_IF_ERROR(Leave(args.code, args.stream));
    MOK_RETURN_IF_ERROR(Resume(args.stream));
    // The others meet this rank next in a schedule, whether or not its caller calls again: its word
    // lies ready, and no kernel of this rank waits for theirs.
    return ReportInSchedule(args, MOK_CUDA_STAGE);
  }
  MOK_RETURN_IF_ERROR(ReportInSchedule(args, reported_ahead_ ? MOK_CUDA_BUILD : MOK_CUDA_WHOLE));
  reported_ahead_ = false;
  return OkStatus();
}

}  // namespace mok
