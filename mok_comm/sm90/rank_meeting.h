// Entry and exit barrier of the ranks, as a task of one warp.
#pragma once

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"

namespace mok {

// Tells every rank that this one has come to `meeting` of pass `epoch` (1, 2, ...). What the warp
// has seen happen before, on this GPU or another, is visible to every rank that has met it. All
// lanes of the warp call; lane l looks after ranks l, l + 32, ... Not after an abort (RankMeeting).
template <ExchangeBug kBug = ExchangeBug::kNone>
MOK_DEVICE void TellRanks(const RankMeeting& ranks, Meeting meeting, uint64_t epoch) {
  const int lane = static_cast<int>(ThreadIndex().x) % 32;
  MOK_EXPECT(epoch > 0);
  SyncWarp();  // what lane 0 has acquired is released by every lane
  const Meeting raised = kBug == ExchangeBug::kFlagOfOtherMeeting ? Meeting::kEntry : meeting;
  for (int rank = lane; rank < ranks.num_ranks; rank += 32) {
    uint64_t* flag = ranks.Flag(rank, raised, ranks.rank);
    if (kBug == ExchangeBug::kFlagOfGpuScope) {
      StoreReleaseGpu(flag, epoch);
    } else {
      StoreReleaseSys(flag, epoch);
    }
  }
}

// Waits until every rank has told that it has come. All lanes of the warp call.
//
// False: the grid is aborted. If the wait itself ran out of time, the record's task is the missing
// rank and its kind `task_kind`. Give `wait` less patience than the waits for counters of this GPU:
// they start as early, depend on the meeting, and would be reported in its place.
template <ExchangeBug kBug = ExchangeBug::kNone>
MOK_DEVICE bool AwaitRanks(const RankMeeting& ranks, Meeting meeting, uint64_t epoch,
                           int32_t task_kind, DeviceWait& wait) {
  const int lane = static_cast<int>(ThreadIndex().x) % 32;
  const bool skips_wait = (kBug == ExchangeBug::kNoEntryWait && meeting == Meeting::kEntry) ||
                          (kBug == ExchangeBug::kNoExitWait && meeting == Meeting::kExit);
  bool met = true;
  for (int rank = lane; rank < ranks.num_ranks && met; rank += 32) {
    if (skips_wait) continue;
    const uint64_t* flag = ranks.Flag(ranks.rank, meeting, rank);
    wait.SetTask(task_kind, rank);
    met = kBug == ExchangeBug::kWaitOfGpuScope ? wait.ForCounterGpu(flag, epoch)
                                               : wait.ForCounterSys(flag, epoch);
  }
  SyncWarp();  // what any lane has acquired, lane 0 may hand on
  return Ballot(met) == 0xFFFFFFFFu;
}

// Whether any rank has raised kWish in pass `epoch`, whose kStart has been awaited by this warp.
// All lanes of the warp call.
MOK_DEVICE bool AnyRankWishes(const RankMeeting& ranks, uint64_t epoch) {
  const int lane = static_cast<int>(ThreadIndex().x) % 32;
  bool wishes = false;
  for (int rank = lane; rank < ranks.num_ranks; rank += 32) {
    wishes = LoadRelaxedSys(ranks.Flag(ranks.rank, Meeting::kWish, rank)) >= epoch || wishes;
  }
  return Ballot(wishes) != 0;
}

// TellRanks, then AwaitRanks.
template <ExchangeBug kBug = ExchangeBug::kNone>
MOK_DEVICE bool MeetRanks(const RankMeeting& ranks, Meeting meeting, uint64_t epoch,
                          int32_t task_kind, DeviceWait& wait) {
  TellRanks<kBug>(ranks, meeting, epoch);
  return AwaitRanks<kBug>(ranks, meeting, epoch, task_kind, wait);
}

}  // namespace mok
