#include "mok_megakernel/cuda/stage_rows.h"

#include <algorithm>

#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"

namespace mok {
namespace {

bool Overlap(const StageRowsParams::Copy& copy) {
  const auto source = reinterpret_cast<uintptr_t>(copy.source);
  const auto destination = reinterpret_cast<uintptr_t>(copy.destination);
  const auto bytes = static_cast<uintptr_t>(copy.bytes);
  return source < destination + bytes && destination < source + bytes;
}

}  // namespace

Status LaunchStageRows(const void* kernel, const StageRowsParams& params, int32_t num_sms,
                       int device, void* stream) {
  if (params.num_copies == 0 && !params.asks) return OkStatus();
  int64_t most_bytes = 0;
  for (int32_t i = 0; i < params.num_copies; ++i) {
    const StageRowsParams::Copy& copy = params.copies[i];
    if (Overlap(copy)) {
      return InvalidArgumentError("a tensor of ", copy.bytes,
                                  " bytes overlaps the part of the symmetric heap that its rows ",
                                  "are copied to: expected it to begin there or to lie elsewhere");
    }
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
