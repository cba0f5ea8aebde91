// Shared memory of the schedule kernel, and the small things that all its steps use.
#pragma once

#include <cstdint>

#include "mok_core/device/device.h"
#include "mok_schedule/device/block_operations.h"
#include "mok_schedule/device/schedule_params.h"

namespace mok {

template <int kThreads>
struct alignas(16) ScheduleStorage {
  static constexpr int kNumThreads = kThreads;
  static constexpr int kWarps = kThreads / 32;

  BlockScratch<kThreads> scratch;
  uint64_t epoch;       // of this batch
  uint64_t generation;  // of RefusalState, before this batch
  int32_t failed;       // a wait ran out, here or elsewhere in the grid
  int32_t is_last;      // this block was the last to arrive
  int32_t is_refused;   // the batch
  // Of the source ranks.
  int64_t token_begin[kMaxScheduleRanks + 1];  // first global token id
  const int32_t* ids[kMaxScheduleRanks];       // [num_tokens, topk] in that rank's memory
  // Of this rank's experts.
  int32_t rows[kMaxScheduleExperts];             // valid rows
  int32_t block_begin[kMaxScheduleExperts + 1];  // first row block
  union {
    // In placing blocks. First each warp's count, then the row of its next route.
    int32_t next_row[kWarps][kMaxScheduleExperts];
    // In the block that writes the tables.
    struct {
      int32_t piece_begin[kMaxScheduleExperts + 1];   // first piece of each expert
      int32_t carrier[kMaxScheduleExperts + 1];       // last expert before it with several pieces
      int32_t empty_before[kMaxScheduleExperts + 1];  // experts without rows before it
    } tables;
  };
};

MOK_DEVICE int Thread() { return static_cast<int>(ThreadIndex().x); }

// All blocks but the last place routes; the last writes the tables.
MOK_DEVICE int NumPlacingBlocks() { return static_cast<int>(GridDimensions().x) - 1; }
MOK_DEVICE bool IsTableBlock() { return static_cast<int>(BlockIndex().x) == NumPlacingBlocks(); }

// The first index in [0, count) whose value is above `key`; count if there is none. `values` do not
// decrease.
template <class T>
MOK_DEVICE int UpperBound(const T* values, int count, T key) {
  int begin = 0;
  while (count > 0) {
    const int half = count / 2;
    if (values[begin + half] <= key) {
      begin += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return begin;
}

// False if the grid has been aborted. Every thread of the block calls, after its own waits.
template <class Storage>
MOK_DEVICE bool AllWaitsHeld(Storage& s, const DeviceWait& wait) {
  SyncBlock();
  if (Thread() == 0) s.failed = wait.aborted() ? 1 : 0;
  SyncBlock();
  return s.failed == 0;
}

}  // namespace mok
