#include "mok_megakernel/cuda/join_pass.h"

#include "mok_core/device/runtime.h"

namespace mok {

Status LaunchJoinPass(const JoinPassParams& params, int device, void* stream) {
  runtime::LaunchConfig config;
  config.block.x = 32;
  config.registers_per_thread = 32;
  config.device = device;
  config.stream = stream;
  config.name = "mok_join_pass";
  return runtime::LaunchKernelAddress(JoinPassKernelAddress(), config, &params, sizeof params);
}

}  // namespace mok
