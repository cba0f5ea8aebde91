// The backward of a CUDA workspace.
#include "mok_megakernel/api_error.h"
#include "mok_megakernel/cuda/call_checks.h"
#include "mok_megakernel/cuda/cuda_workspace.h"
#include "mok_megakernel/cuda/stage_rows.h"
#include "mok_megakernel/sm90/backward_launch.h"

namespace mok {
namespace {

// MokDType has values that Grads cannot express.
Status CheckGradDType(const char* name, const MokWeightGrads& grads) {
  if (grads.dtype == MOK_BF16 || grads.dtype == MOK_FP32) return OkStatus();
  return TypeMismatchError(name, ".dtype: expected bf16 (0) or fp32 (1), got ", grads.dtype);
}

BackwardArguments::WeightGrads Grads(const MokWeightGrads& from) {
  BackwardArguments::WeightGrads to;
  to.gate = from.gate;
  to.up = from.up;
  to.down = from.down;
  to.dtype = from.dtype == MOK_FP32 ? DType::kFp32 : DType::kBf16;
  to.accumulate = from.accumulate != 0;
  return to;
}

}  // namespace

Status CudaWorkspace::CheckXOfBackward(const void* x, int64_t num_tokens) const {
  if (!IsInHeap(x, num_tokens) || holds_callers_x_) return OkStatus();
  return FailedPreconditionError(
      "x: lies where the workspace keeps x for the other ranks, and another forward or backward, "
      "with its x elsewhere, has put its own there: expected no such call between a forward that "
      "finds its x there and its backward, or a copy of x for the backward");
}

Status CudaWorkspace::StageBackward(const BackwardParams& pass, const MokCudaBackwardArgs& args,
                                    int32_t num_sms) const {
  if (shape_.ep_size == 1) return OkStatus();
  const int64_t num_tokens = pass.shape.num_tokens;
  const int64_t row_bytes = shape_.hidden * static_cast<int64_t>(sizeof(BFloat16));
  const ProgramShape& program = pass.shape.program;
  StageRowsParams params = {};
  params.asks = args.part == MOK_CUDA_WHOLE;  // else the ranks cannot meet
  params.kept_row_blocks = program.kept_macrobatches * program.ring.macrobatch_blocks;
  params.schedule = pass.schedule.result;
  params.state = pass.signals.state;
  params.meeting = pass.exchange.meeting;
  params.wait = pass.signals.meeting_wait;
  const auto stage = [&](const void* source, CudaHeapLayout::Part part, int64_t bytes) {
    void* staged = heap_.At<void>(own_heap(), part);
    if (source == staged || bytes == 0) return false;
    params.copies[params.num_copies++] = {source, staged, bytes};
    return true;
  };
  stage(args.d_out, CudaHeapLayout::kDOut, num_tokens * row_bytes);
  stage(args.layer.topk_weight, CudaHeapLayout::kTopkWeight,
        num_tokens * shape_.topk * static_cast<int64_t>(sizeof(float)));
  // Only rows that are computed again need x.
  params.last_is_optional = stage(args.layer.x, CudaHeapLayout::kX, num_tokens * row_bytes);
  return LaunchStageRows(StageRowsKernelAddress(), params, num_sms, shape_.device, args.stream);
}

BackwardArguments CudaWorkspace::ArgumentsOfBackward(const CudaLayerPlan& plan,
                                                     const MokCudaLayer& layer,
                                                     const MokCudaBackwardArgs& args) const {
  BackwardArguments to;
  FillFromCall(layer, args, to);
  to.tokens.d_out = static_cast<const BFloat16*>(args.d_out);
  to.tokens.d_x = static_cast<BFloat16*>(args.d_x);
  to.tokens.d_topk_weight = args.d_topk_weight;
  to.tokens.d_shared_scale = args.d_shared_scale;
  to.kept_macrobatches = args.kept_macrobatches;
  to.d_routed = Grads(args.d_routed);
  to.d_shared = Grads(args.d_shared);
  to.scratch = plan.backward_scratch.At(args.scratch);
  FillFromWorkspace(plan, args.schedule, to);
  BackwardArguments::Peers& peers = to.peers;
  for (int32_t rank = 0; rank < shape_.ep_size; ++rank) {
    void* heap = heap_of_rank_[static_cast<size_t>(rank)];
    const bool own = rank == shape_.rank;
    peers.d_out_of_rank[rank] =
        own ? to.tokens.d_out : heap_.At<BFloat16>(heap, CudaHeapLayout::kDOut);
    peers.topk_weight_of_rank[rank] =
        own ? args.layer.topk_weight : heap_.At<float>(heap, CudaHeapLayout::kTopkWeight);
    peers.d_router_of_rank[rank] = heap_.At<float>(heap, CudaHeapLayout::kDRouter);
  }
  if (!plan.may_have_rows) PlaceEmptyRing(to.scratch.d_out, to.scratch.weighted_h, to.context);
  return to;
}

Status CudaWorkspace::Backward(const MokCudaLayer& layer, const MokCudaBackwardArgs& args) {
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanPass(layer, args));
  MOK_RETURN_IF_ERROR(CheckXOfBackward(args.layer.x, layer.num_tokens));
  MOK_RETURN_IF_ERROR(CheckReserved("MokCudaBackwardArgs", args.reserved));
  MOK_RETURN_IF_ERROR(CheckGradDType("d_routed", args.d_routed));
  MOK_RETURN_IF_ERROR(CheckGradDType("d_shared", args.d_shared));
  MOK_RETURN_IF_ERROR(CheckWeightGrads(args.layer, args.d_routed, args.d_shared));
  const PassKernelInfo kernel = BackwardKernelOf(plan.config.order);
  const ForwardConfig config = FitToKernel(plan.config, kernel);
  MOK_ASSIGN_OR_RETURN(
      const BackwardParams params,
      MakeBackwardParams(plan.shape, config, kernel, ArgumentsOfBackward(plan, layer, args)));
  const LayerSizes sizes = SizesOf(layer);
  CallMemory memory = MemoryOf(sizes, plan, args);
  AddStaged("d_out", args.d_out, sizes.rows(), CudaHeapLayout::kDOut, memory);
  AddGradients(sizes, args, memory);
  memory.Writes("scratch", args.scratch, BytesOf(plan.backward_scratch.bytes()));
  MOK_RETURN_IF_ERROR(memory.Check());
  if (args.part == MOK_CUDA_WHOLE || args.part == MOK_CUDA_STAGE) {
    NoteX(args.layer.x, layer.num_tokens);
    MOK_RETURN_IF_ERROR(StageBackward(params, args, config.num_blocks));
    if (args.part == MOK_CUDA_STAGE) return OkStatus();
  }
  return LaunchBackward(kernel, params,
                        {ModeOf(args.part), config.num_blocks, shape_.device, args.stream});
}

}  // namespace mok
