#include "mok_megakernel/cuda/layer_plan.h"

#include <algorithm>

#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_core/dtype.h"
#include "mok_megakernel/call_memory.h"
#include "mok_schedule/device/launch_schedule.h"
#include "mok_schedule/routing_table.h"

namespace mok {
namespace {

Status CheckLayer(const CudaWorkspaceShape& workspace, const MokCudaLayer& layer) {
  MOK_RETURN_IF_ERROR(CheckRange("layer.num_tokens", layer.num_tokens, 0, workspace.max_tokens));
  MOK_RETURN_IF_ERROR(CheckRange("layer.num_experts", layer.num_experts, 0, INT32_MAX));
  MOK_RETURN_IF_ERROR(CheckRange("layer.num_local_experts", layer.num_local_experts, 0,
                                 std::min(layer.num_experts, kMaxScheduleExperts)));
  MOK_RETURN_IF_ERROR(CheckRange("layer.first_expert", layer.first_expert, 0,
                                 layer.num_experts - layer.num_local_experts));
  MOK_RETURN_IF_ERROR(CheckMultiple("layer.intermediate", layer.intermediate, 8, 8));
  MOK_RETURN_IF_ERROR(CheckMultiple("layer.shared_intermediate", layer.shared_intermediate, 0, 8));
  MOK_RETURN_IF_ERROR(CheckRange("layer.num_sms", layer.num_sms, 0, workspace.num_sms));
  const int32_t num_sms = layer.num_sms > 0 ? layer.num_sms : workspace.num_sms;
  MOK_RETURN_IF_ERROR(CheckRange("layer.num_comm_sms", layer.num_comm_sms, 0, num_sms - 1));
  MOK_RETURN_IF_ERROR(CheckRange("layer.minibatch_rows", layer.minibatch_rows, 0, INT32_MAX));
  return CheckRange("layer.macrobatch_rows", layer.macrobatch_rows, -1, INT32_MAX);
}

// The largest tensors of a layer, so that no size that follows from them overflows.
Status CheckSizes(const CudaWorkspaceShape& workspace, const MokCudaLayer& layer,
                  int64_t ring_rows) {
  const int64_t hidden = workspace.hidden;
  const int64_t experts = std::max(layer.num_local_experts, 1);
  constexpr int64_t kElement = sizeof(BFloat16), kFloat = sizeof(float);
  MOK_RETURN_IF_ERROR(CheckTensorSize("layer.num_local_experts * intermediate, hidden",
                                      {experts * layer.intermediate, hidden, kElement}));
  MOK_RETURN_IF_ERROR(CheckTensorSize("layer.shared_intermediate, hidden",
                                      {layer.shared_intermediate, hidden, kElement}));
  MOK_RETURN_IF_ERROR(CheckTensorSize("rows of the ring, hidden", {ring_rows, hidden, kFloat}));
  MOK_RETURN_IF_ERROR(CheckTensorSize("rows of the ring, layer.intermediate",
                                      {ring_rows, layer.intermediate, kFloat}));
  return CheckTensorSize("options.max_tokens, layer.shared_intermediate",
                         {workspace.max_tokens, layer.shared_intermediate, kFloat});
}

}  // namespace

StatusOr<CudaLayerPlan> PlanCudaLayer(const CudaWorkspaceShape& workspace,
                                      const MokCudaLayer& layer) {
  MOK_RETURN_IF_ERROR(CheckLayer(workspace, layer));
  const int64_t ep_size = workspace.ep_size;
  // A single rank knows the batch; several know its bound.
  const int64_t most_tokens = ep_size > 1 ? workspace.max_tokens : layer.num_tokens;
  const int64_t most_rows =
      RoutingTableCapacityRows(ep_size * most_tokens, workspace.topk, layer.num_local_experts);
  const int64_t capacity = std::max<int64_t>(most_rows, kRowBlock);

  ForwardLayerShape shape;
  shape.max_tokens = most_tokens;
  shape.hidden = workspace.hidden;
  shape.intermediate = layer.intermediate;
  shape.shared_intermediate = layer.shared_intermediate;
  shape.topk = workspace.topk;
  shape.num_experts = std::max(layer.num_experts, 1);  // the heuristics divide by it
  shape.num_local_experts = layer.num_local_experts;
  shape.ep_size = workspace.ep_size;
  HopperDevice device;
  device.num_sms = workspace.num_sms;
  ForwardOptions options;
  options.num_sms = layer.num_sms;
  options.num_comm_sms = layer.num_comm_sms;
  options.minibatch_rows = RoundUp<int64_t>(layer.minibatch_rows, kRowBlock);
  options.macrobatch_rows =
      layer.macrobatch_rows < 0
          ? capacity
          : std::min(RoundUp<int64_t>(layer.macrobatch_rows, kRowBlock), capacity);
  MOK_ASSIGN_OR_RETURN(const ForwardConfig config, SelectForwardConfig(shape, device, options));
  MOK_RETURN_IF_ERROR(CheckSizes(workspace, layer, config.ring_rows()));

  shape.max_tokens = layer.num_tokens;
  // Its blocks wait for each other too: no more than may be resident beside other kernels. Scratch
  // is for any such number.
  const auto grid_of = [&](int32_t num_sms) {
    return ScheduleGridBlocks(ep_size * workspace.max_tokens * workspace.topk, num_sms,
                              GetScheduleKernel().threads);
  };
  const int grid = grid_of(layer.num_sms > 0 ? layer.num_sms : workspace.num_sms);
  const int largest_grid = grid_of(workspace.num_sms);
  const PassMemoryLayout pass_memory(shape, config);
  const size_t kept_bytes = CudaStateLayout(workspace).pass_bytes();
  if (pass_memory.bytes() > kept_bytes) {
    return InternalError("the workspace keeps ", kept_bytes, " bytes of counters, the layer needs ",
                         pass_memory.bytes());
  }
  return CudaLayerPlan{
      shape,
      config,
      most_rows > 0,
      grid,
      DeviceScheduleLayout({capacity, layer.num_local_experts, config.macrobatch_blocks, ep_size,
                            workspace.max_tokens, workspace.topk}),
      ScheduleScratchLayout(ep_size, workspace.max_tokens, workspace.topk, layer.num_local_experts,
                            largest_grid),
      pass_memory,
      ForwardScratchLayout(shape, config),
      BackwardScratchLayout(shape, config, BackwardKernelOf(config.order))};
}

MokCudaLayer CudaErrorLayer() {
  MokCudaLayer layer = {};
  layer.num_experts = 1;
  layer.intermediate = 8;
  return layer;
}

StatusOr<int64_t> CudaErrorScratchBytes(const CudaWorkspaceShape& workspace) {
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan, PlanCudaLayer(workspace, CudaErrorLayer()));
  return RoundUp<int64_t>(plan.schedule.bytes(), MOK_CUDA_ALIGNMENT) +
         plan.schedule_scratch.bytes();
}

}  // namespace mok
