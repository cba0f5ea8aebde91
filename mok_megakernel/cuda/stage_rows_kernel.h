// The kernel of stage_rows.h.
#pragma once

#include "mok_comm/sm90/rank_meeting.h"
#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"
#include "mok_megakernel/cuda/stage_rows.h"

namespace mok {

namespace stage_rows_internal {

// One warp of the grid: tells the other ranks what this one wishes, and then that it has come.
template <StageRowsBug kBug>
MOK_DEVICE void TellWish(const StageRowsParams& p, uint64_t epoch) {
  const bool wishes = p.schedule->num_row_blocks > p.kept_row_blocks;
  if (wishes && kBug != StageRowsBug::kNoWish) TellRanks(p.meeting, Meeting::kWish, epoch);
  TellRanks(p.meeting, Meeting::kStart, epoch);
}

// A warp. Whether any rank needs the optional copy; no, if the wait for one is in vain.
template <StageRowsBug kBug>
MOK_DEVICE bool IsWished(const StageRowsParams& p, uint64_t epoch) {
  constexpr int32_t kNoTask = -1;
  DeviceWait wait(p.wait, static_cast<int32_t>(PassRole::kMeeting));
  if (kBug != StageRowsBug::kNoStartWait &&
      !AwaitRanks(p.meeting, Meeting::kStart, epoch, kNoTask, wait)) {
    return false;
  }
  return AnyRankWishes(p.meeting, epoch);
}

MOK_DEVICE void Copy(const StageRowsParams::Copy& copy) {
  // Loads in flight per thread: 64 KiB per SM.
  constexpr int kUnroll = 4;
  const auto* source = static_cast<const Word4*>(copy.source);
  auto* destination = static_cast<Word4*>(copy.destination);
  const int64_t count = copy.bytes / static_cast<int64_t>(sizeof(Word4));
  const int64_t step = int64_t{GridDimensions().x} * kStageRowsThreads;
  const int64_t first = int64_t{BlockIndex().x} * kStageRowsThreads + ThreadIndex().x;
  int64_t i = first;
  for (; i + (kUnroll - 1) * step < count; i += kUnroll * step) {
    Word4 words[kUnroll];
    MOK_UNROLL
    for (int j = 0; j < kUnroll; ++j) words[j] = source[i + j * step];
    MOK_UNROLL
    for (int j = 0; j < kUnroll; ++j) destination[i + j * step] = words[j];
  }
  for (; i < count; i += step) destination[i] = source[i];
  // The rest of less than one vector: fp32 scalars.
  const int64_t scalars = copy.bytes / 4, last = count * 4 + first;
  if (last < scalars) {
    static_cast<uint32_t*>(copy.destination)[last] =
        static_cast<const uint32_t*>(copy.source)[last];
  }
}

}  // namespace stage_rows_internal

// Schedules that were lost have no rows, and not all ranks may come.
template <StageRowsBug kBug>
MOK_KERNEL(kStageRowsThreads, 1)
StageRowsKernel(MOK_GRID_CONSTANT(StageRowsParams) p) {
  using namespace stage_rows_internal;
  bool meets = false;
  uint64_t epoch = 0;
  if (p.asks) {
    meets = TakesPart(*p.schedule, p.state->refusals) || kBug == StageRowsBug::kAsksLost;
    epoch = LoadRelaxedGpu(&p.state->epoch) + 1;
    if (meets && BlockIndex().x == 0 && ThreadIndex().x < 32) TellWish<kBug>(p, epoch);
  }
  MOK_NO_UNROLL
  for (int32_t i = 0; i < p.num_copies; ++i) {
    const bool is_optional = p.asks && p.last_is_optional && i == p.num_copies - 1;
    if (is_optional && !(meets && IsWished<kBug>(p, epoch))) break;
    Copy(p.copies[i]);
  }
}

}  // namespace mok
