#include "mok_megakernel/cuda/stage_rows.h"

#include <algorithm>

#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"

namespace mok {

Status LaunchStageRows(const StageRowsParams& params, int num_copies, int32_t num_sms, int device,
                       void* stream) {
  int64_t most_bytes = 0;
  for (int i = 0; i < num_copies; ++i) most_bytes = std::max(most_bytes, params.copies[i].bytes);
  if (most_bytes == 0) return OkStatus();
  constexpr int64_t kBytesPerBlock = 16 * kStageRowsThreads;
  constexpr int64_t kBlocksPerSm = 4;
  runtime::LaunchConfig config;
  config.grid.x =
      static_cast<uint32_t>(std::min(CeilDiv(most_bytes, kBytesPerBlock), kBlocksPerSm * num_sms));
  config.grid.y = static_cast<uint32_t>(num_copies);
  config.block.x = kStageRowsThreads;
  config.registers_per_thread = 32;
  config.device = device;
  config.stream = stream;
  config.name = "mok_stage_rows";
  return runtime::LaunchKernelAddress(StageRowsKernelAddress(), config, &params, sizeof params);
}

}  // namespace mok
