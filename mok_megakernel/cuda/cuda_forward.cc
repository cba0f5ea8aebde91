// The forward of a CUDA workspace.
#include "mok_megakernel/cuda/call_checks.h"
#include "mok_megakernel/cuda/cuda_workspace.h"
#include "mok_megakernel/cuda/stage_rows.h"

namespace mok {

Status CudaWorkspace::StageX(const MokCudaForwardArgs& args, int64_t num_tokens,
                             int32_t num_sms) const {
  if (shape_.ep_size == 1 || IsInHeap(args.layer.x, num_tokens)) return OkStatus();
  const int64_t row_bytes = shape_.hidden * static_cast<int64_t>(sizeof(BFloat16));
  StageRowsParams params = {};
  params.num_copies = num_tokens > 0 ? 1 : 0;
  params.copies[0] = {args.layer.x, heap_.At<void>(own_heap(), CudaHeapLayout::kX),
                      num_tokens * row_bytes};
  return LaunchStageRows(StageRowsKernelAddress(), params, num_sms, shape_.device, args.stream);
}

ForwardArguments CudaWorkspace::Arguments(const CudaLayerPlan& plan, const MokCudaLayer& layer,
                                          const MokCudaForwardArgs& args) const {
  ForwardArguments to;
  FillFromCall(layer, args, to);
  to.tokens.topk_weight = args.layer.topk_weight;
  to.tokens.out = static_cast<BFloat16*>(args.out);
  to.scratch = plan.forward_scratch.At(args.scratch);
  FillFromWorkspace(plan, args.schedule, to);
  if (!plan.may_have_rows) PlaceEmptyRing(to.scratch.y, to.scratch.h, to.context);
  return to;
}

Status CudaWorkspace::Forward(const MokCudaLayer& layer, const MokCudaForwardArgs& args) {
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanPass(layer, args));
  const ForwardKernelInfo kernel = ForwardKernelOf(plan.config.order);
  const ForwardConfig config = FitToKernel(plan.config, kernel);
  MOK_ASSIGN_OR_RETURN(const ForwardParams params,
                       MakeForwardParams(plan.shape, config, kernel, Arguments(plan, layer, args)));
  const LayerSizes sizes = SizesOf(layer);
  CallMemory memory = MemoryOf(sizes, plan, args);
  memory.Writes("out", args.out, sizes.rows());
  memory.Writes("scratch", args.scratch, BytesOf(plan.forward_scratch.bytes()));
  MOK_RETURN_IF_ERROR(memory.Check());
  if (args.part == MOK_CUDA_WHOLE || args.part == MOK_CUDA_STAGE) {
    NoteX(args.layer.x, layer.num_tokens);
    MOK_RETURN_IF_ERROR(StageX(args, layer.num_tokens, config.num_blocks));
    if (args.part == MOK_CUDA_STAGE) return OkStatus();
  }
  return LaunchForward(kernel, params,
                       {ModeOf(args.part), config.num_blocks, shape_.device, args.stream});
}

}  // namespace mok
