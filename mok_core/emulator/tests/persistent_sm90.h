// A persistent grid for tests of TicketWorkSource, Pipeline, DeviceWait and DeviceTracer: task t
// doubles row t, once its counter allows.
#pragma once

#include "mok_core/device/device_trace_params.h"
#include "mok_core/device/ticket_counter.h"
#include "mok_core/device/types.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::persistent {

constexpr int kRowWords = 64;  // of 4 bytes
enum Role { kProducer, kConsumer, kNumRoles };

enum Bug {
  kCorrect,
  kNoEndOfWorkOnAbort,
  kStageNotReleased,
  kReleaseBeforeRead,
  kCommitBeforeTask,
  kSkipAcquire,
  kWaitForOtherPhase,
  kTooFewConsumers,
  kTicketPerLane,
  kNoFinish,
  kBugCount
};

struct Params {
  const float* rows;      // [num_tasks, kRowWords]
  float* doubled;         // [num_tasks, kRowWords]
  const uint64_t* ready;  // [num_tasks]: task t may start at >= 1
  int32_t* executions;    // [num_tasks]: how often each task ran
  TicketCounter* ticket;
  int64_t num_tasks;
  DeviceWaitParams wait;
  DeviceTraceParams trace;
};

TestKernel PersistentKernel(int bug);

}  // namespace mok::testing::persistent
