// Copies what a rank's peers read to where they read it, before a pass. A kernel of its own: copies
// by the exchange warps of the pass, beside its first tiles, were slower (benchmarks/RESULTS.md).
//
// No peer still reads the copies of the pass before: rows that a rank pulls lead to rows that it
// pushes, and it comes to the exit when its pushes have been sent, so that all pulls of a pass are
// over when its ranks have met at the exit, which precedes the end of every rank's kernel.
#pragma once

#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/status.h"
#include "mok_megakernel/sm90/pass_params.h"
#include "mok_schedule/device/device_schedule.h"

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
  int32_t num_copies;

  // With `asks`, the last copy, if it is optional, is made only if a rank wishes it: one that has
  // more row blocks than it has kept. How many a rank has, and keeps, is its own affair, so all
  // ranks ask and answer, also those without a copy.
  bool asks;
  bool last_is_optional;
  int64_t kept_row_blocks;
  const DeviceScheduleResult* schedule;  // schedule kernel -> the wish
  const PassState* state;                // epoch of the passes, refusals
  RankMeeting meeting;                   // kStart and kWish
  DeviceWaitParams wait;                 // for the other ranks
};

inline constexpr int kStageRowsThreads = 1024;

// Mistakes that tests plant.
enum class StageRowsBug : int32_t {
  kNone,
  kNoWish,       // a rank that needs the optional copy does not say so
  kNoStartWait,  // ... or is not listened to
  kAsksLost,     // waits for ranks that do not come
  kCount
};

// Address of the kernel. Grid: any number of blocks of kStageRowsThreads threads.
const void* StageRowsKernelAddress();

// Queues the copies, and the question, as one kernel; nothing if there are none. It waits for other
// ranks on no more than num_sms SMs, a block on each. kInvalidArgument: a source overlaps its
// destination.
Status LaunchStageRows(const void* kernel, const StageRowsParams& params, int32_t num_sms,
                       int device, void* stream);

}  // namespace mok
