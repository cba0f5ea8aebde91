// How a layer runs on a CUDA workspace: sizes and configuration, from shapes only.
#pragma once

#include <cstdint>

#include "mok_core/status.h"
#include "mok_megakernel/cuda/workspace_layout.h"
#include "mok_megakernel/mok_cuda.h"
#include "mok_megakernel/sm90/backward_launch.h"
#include "mok_megakernel/sm90/forward_config.h"
#include "mok_megakernel/sm90/forward_launch.h"
#include "mok_schedule/device/device_schedule.h"
#include "mok_schedule/device/schedule_params.h"

namespace mok {

// Pure arithmetic, cheap enough to be done again by every call.
struct CudaLayerPlan {
  ForwardLayerShape shape;  // max_tokens: of this call, so that scratch is not larger
  ForwardConfig config;
  bool may_have_rows;  // some routing leads a route to this rank
  int schedule_grid_blocks;
  DeviceScheduleLayout schedule;
  ScheduleScratchLayout schedule_scratch;
  PassMemoryLayout pass_memory;
  ForwardScratchLayout forward_scratch;
  BackwardScratchLayout backward_scratch;
};

// Errors name the field of `layer`, what was expected and what was given.
StatusOr<CudaLayerPlan> PlanCudaLayer(const CudaWorkspaceShape& workspace,
                                      const MokCudaLayer& layer);

// A rank that reports an error takes part as one without tokens and experts.
MokCudaLayer CudaErrorLayer();
// Scratch of its schedule, which comes first, and of the kernel.
StatusOr<int64_t> CudaErrorScratchBytes(const CudaWorkspaceShape& workspace);

}  // namespace mok
