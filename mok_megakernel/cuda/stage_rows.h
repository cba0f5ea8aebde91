// Copies the tokens of a rank to where its peers read them.
#pragma once

#include <cstdint>

#include "mok_core/status.h"

namespace mok {

struct StageRowsParams {
  const void* source;  // [bytes] the caller's x -> the copy
  void* destination;   // [bytes] the copy -> peers' Dispatch. The two do not overlap
  int64_t bytes;       // a multiple of 16; both addresses are aligned to 16
};

inline constexpr int kStageRowsThreads = 512;

// Address of the kernel: any grid of kStageRowsThreads threads.
const void* StageRowsKernelAddress();

// Queues the copy.
Status LaunchStageRows(const StageRowsParams& params, int32_t num_sms, int device, void* stream);

}  // namespace mok
