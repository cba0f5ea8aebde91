// Copies what a rank's peers read to where they read it.
#pragma once

#include <cstdint>

#include "mok_core/status.h"

namespace mok {

struct StageRowsParams {
  static constexpr int kMaxCopies = 3;
  // source: the caller's tensor -> the copy; destination: the copy -> peers' pulls. Aligned to 16
  // bytes, not overlapping; bytes is a multiple of 4.
  struct Copy {
    const void* source;
    void* destination;
    int64_t bytes;
  };
  Copy copies[kMaxCopies];
};

inline constexpr int kStageRowsThreads = 512;

// Address of the kernel. Grid: any number of blocks of kStageRowsThreads threads, by copies.
const void* StageRowsKernelAddress();

// Queues the first num_copies copies, as one kernel.
Status LaunchStageRows(const StageRowsParams& params, int num_copies, int32_t num_sms, int device,
                       void* stream);

}  // namespace mok
