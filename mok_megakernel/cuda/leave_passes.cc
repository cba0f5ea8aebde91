#include "mok_megakernel/cuda/leave_passes.h"

#include "mok_core/device/runtime.h"

namespace mok {

Status LaunchLeavePasses(const LeavePassesParams& params, int device, void* stream) {
  runtime::LaunchConfig config;
  config.block.x = 32;
  config.registers_per_thread = 32;
  config.device = device;
  config.stream = stream;
  config.name = "mok_leave_passes";
  return runtime::LaunchKernelAddress(LeavePassesKernelAddress(), config, &params, sizeof params);
}

}  // namespace mok
