#include "mok_megakernel/cuda/stage_rows.h"

#include <algorithm>

#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"

namespace mok {

Status LaunchStageRows(const void* kernel, const StageRowsParams& params, int32_t num_sms,
                       int device, void* stream) {
  if (params.num_copies == 0 && !params.asks) return OkStatus();
  int64_t most_bytes = 0;
  for (const StageRowsParams::Copy& copy : params.copies) {
    most_bytes = std::max(most_bytes, copy.bytes);
  }
  constexpr int64_t kBytesPerBlock = 16 * kStageRowsThreads;
  const int64_t blocks = std::min<int64_t>(CeilDiv(most_bytes, kBytesPerBlock), num_sms);
  runtime::LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(std::max<int64_t>(blocks, 1));
  config.block.x = kStageRowsThreads;
  config.registers_per_thread = 64;
  config.device = device;
  config.stream = stream;
  config.name = "mok_stage_rows";
  return runtime::LaunchKernelAddress(kernel, config, &params, sizeof params);
}

}  // namespace mok
