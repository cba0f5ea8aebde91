// The mistakes that tests plant into the schedule kernel: each must be flagged by the emulator or
// change the result.
#pragma once

namespace mok {

enum ScheduleBug : int {
  kScheduleCorrect,
  kScheduleNoWaitForRanks,
  kScheduleFlagOfGpuScope,
  kScheduleWaitOfGpuScope,
  kScheduleAnnounceTooEarly,
  kScheduleSingleBuffer,
  kScheduleRelaxedCounts,
  kScheduleNoWaitForCounts,
  kScheduleTallyWithoutSync,
  kScheduleTallyByEveryLane,
  kSchedulePlaceWithoutSync,
  kScheduleLanesOutOfOrder,
  kScheduleTokensInOrder,
  kScheduleNoPadding,
  kScheduleCountersKept,
  kScheduleEpochKept,
  kScheduleInvalidIdKept,
  kScheduleBugCount,
};

}  // namespace mok
