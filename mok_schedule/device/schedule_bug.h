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
  kScheduleAnyRowIsFirst,  // every row of a token says that it is the first
  kScheduleCountersKept,
  kScheduleEpochKept,
  kScheduleInvalidIdAccepted,        // does not refuse the batch
  kScheduleHiddenNotCompared,        // takes ranks that disagree on it for ones that agree
  kScheduleIntermediateNotCompared,  // likewise
  kScheduleSharedNotCompared,        // likewise
  kScheduleMaxTokensNotCompared,     // likewise
  kScheduleRefusalForgotten,         // ... does not remember it for what follows
  kScheduleUnheardTakesPart,         // builds a batch that follows before the host has heard
  kScheduleUnheardCounted,           // ... counts it, so that the ranks get out of step
  kScheduleNotResumed,               // stays out after the host has heard
  kScheduleLatePassNotTold,          // does not tell the others that a pass was late
  kScheduleLatePassKept,             // ... refuses all batches for it
  kScheduleBugCount,
};

}  // namespace mok
