// The forward of a CUDA workspace.
#include <cmath>

#include "mok_megakernel/cuda/call_checks.h"
#include "mok_megakernel/cuda/cuda_workspace.h"
#include "mok_megakernel/cuda/stage_rows.h"

namespace mok {

Status CudaWorkspace::StageX(const MokCudaForwardArgs& args, int64_t num_tokens,
                             int32_t num_sms) const {
  if (shape_.ep_size == 1) return OkStatus();
  void* staged = heap_.At<void>(own_heap(), CudaHeapLayout::kX);
  if (args.layer.x == staged) return OkStatus();
  const int64_t row_bytes = shape_.hidden * static_cast<int64_t>(sizeof(BFloat16));
  StageRowsParams params = {};
  params.num_copies = num_tokens > 0 ? 1 : 0;
  params.copies[0] = {args.layer.x, staged, num_tokens * row_bytes};
  return LaunchStageRows(StageRowsKernelAddress(), params, num_sms, shape_.device, args.stream);
}

ForwardArguments CudaWorkspace::Arguments(const CudaLayerPlan& plan, const MokCudaLayer& layer,
                                          const MokCudaForwardArgs& args) const {
  ForwardArguments to;
  to.tokens.num_tokens = layer.num_tokens;
  to.tokens.x = static_cast<const BFloat16*>(args.layer.x);
  to.tokens.topk_weight = args.layer.topk_weight;
  to.tokens.expert_ids = args.topk_idx;
  to.tokens.id_bytes = args.topk_idx_bytes;
  to.tokens.shared_scale = args.layer.shared_scale;
  to.tokens.out = static_cast<BFloat16*>(args.out);
  to.weights = WeightsOf(args.layer);
  to.context = ContextOf(args.context);
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

Status CudaWorkspace::Forward(const MokCudaLayer& layer, const MokCudaForwardArgs& args) {
  MOK_RETURN_IF_ERROR(CheckPart(args.part, MOK_CUDA_EXCHANGE, MOK_CUDA_REDUCE));
  MOK_RETURN_IF_ERROR(CheckUsable());
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
  MOK_RETURN_IF_ERROR(CheckPass(plan, layer, args));
  const ForwardKernelInfo kernel = ForwardKernelOf(plan.config.order);
  const ForwardConfig config = FitToKernel(plan.config, kernel);
  MOK_ASSIGN_OR_RETURN(const ForwardParams params,
                       MakeForwardParams(plan.shape, config, kernel, Arguments(plan, layer, args)));
  if (args.part == MOK_CUDA_WHOLE || args.part == MOK_CUDA_STAGE) {
    MOK_RETURN_IF_ERROR(StageX(args, layer.num_tokens, config.num_blocks));
    if (args.part == MOK_CUDA_STAGE) return OkStatus();
  }
  return LaunchForward(kernel, params,
                       {ModeOf(args.part), config.num_blocks, shape_.device, args.stream});
}

}  // namespace mok
