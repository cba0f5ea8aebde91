// What the parameters of the forward and the backward kernel have in common; shared by host and
// device code.
#pragma once

#include <cstdint>

#include "mok_core/device/ticket_counter.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/macros.h"
#include "mok_schedule/device/device_schedule.h"

namespace mok {

// Which tasks a launch runs.
enum class PassMode : int32_t {
  // All of them: ranks run at the same time and meet inside the kernel.
  kWhole,
  // For ranks that share one GPU, whose kernels run one after the other: first this for every rank,
  // then kReduceOnly for every rank. Stream order stands in for the meetings.
  kExchangeAndCompute,
  kReduceOnly,  // TokenReduce
};

// State of a rank that outlives a launch, one for all passes. Zero before the first; every launch
// leaves it ready for the next, so that a captured graph can be replayed.
struct PassState {
  uint64_t epoch;            // passes that have met their peers
  uint64_t finished_blocks;  // of the running launch
  TicketCounter ticket;      // compute tasks: schedulers -> schedulers
  RefusalState refusals;     // schedule kernels -> passes, and that one was late
};

struct PassSignals {
  uint64_t* counters;  // of the task program, zero between launches
  PassState* state;
  DeviceWaitParams wait;          // for counters of this GPU
  DeviceWaitParams meeting_wait;  // less patient, so that the record names the missing rank
};

// Who waits, in a DeviceWaitRecord. kMeeting: a warp in the entry or exit barrier; `task` of the
// record is then the missing rank.
enum class PassRole : int32_t { kConsumer, kProducer, kScheduler, kPull, kPush, kMeeting };
const char* PassRoleName(int32_t role);

// What a warp did with a task, in a trace. The leader of a consumer warpgroup (warps 0 and 4) and
// every other warp that has a role record; `kind` of an event is TraceKind.
enum class TracePhase : int32_t {
  kWait,   // for the task, what it depends on, or a place to put it
  kWork,   // multiply, load, move rows, decode
  kStore,  // epilogue and signal
};
inline constexpr int kNumTracePhases = 3;
inline constexpr uint32_t kTraceRoles = 12;  // the warps of a block
MOK_HOST_DEVICE constexpr int32_t TraceKind(int32_t task_kind, TracePhase phase) {
  return task_kind * kNumTracePhases + static_cast<int32_t>(phase);
}

// Mistakes that tests plant; the emulator or the comparison of results has to notice each.
enum class PassBug : int32_t {
  kNone,
  kSkipDependencies,      // the scheduler waits for nothing
  kSkipLastDependency,    // ... but for all waits except the last
  kNoProxyFence,          // neither who stores a tile nor who loads it
  kSignalBeforeEpilogue,  // a tile is signalled before it is stored
  kRelaxedSignal,
  kReduceBeforeExit,   // what sums the routes does not wait
  kRoutesDescending,   // a fused reduction adds the routes in the wrong order
  kRingOverwrite,      // a pull does not wait for the readers of the slot
  kCopiesOverwritten,  // a pull copies rows of a ring that is used several times
  kWindowOverwrite,    // InputGrad does not wait until the rows of the slot have been sent
  kGateUpOverwrite,    // GateUp's recomputation does not wait for the readers of d_gate and d_up
  kOwnRowsInRing,      // Down and InputGrad store rows of own tokens where nobody fetches them
  kPushTooEarly,       // a push does not wait for the rows that it sends
  kExitBeforeSent,     // the exit does not wait for this rank's own pushes
  kTailNotShared,      // pull warps do not come to the last pushes, their half of them
  kEntryNotTold,       // no warp tells the peers that this rank has entered
  kNoEntrySignal,
  kTaskReleasedBeforeRead,
  kNoEndOfWorkOnAbort,  // an aborted scheduler lets its block wait for ever
  kCountersKept,        // the next launch starts from the last one's counters
  kEpochKept,
  kNoTicketReset,
  kWrongSharedRows,  // the shared expert writes padding tokens
  kLostMeets,        // a pass of a schedule that was lost waits for its peers
  kLostHasRows,      // ... or moves its rows
  kLostNotTold,      // ... or, if it is late, does not say so
  kCount
};

}  // namespace mok
