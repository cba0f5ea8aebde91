#include "mok_core/emulator/tests/persistent_sm90.h"

#include "mok_core/device/device.h"
#include "mok_core/device/device_trace.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/device/ticket_work_source.h"
#include "mok_core/device/wait.h"
#include "mok_core/emulator/tests/kernel_table.h"
#include "mok_core/work_source.h"

namespace mok::testing::persistent {
namespace {

static_assert(WorkSource<TicketWorkSource>);

constexpr int kStages = 2, kThreads = 64;
constexpr uint32_t kRowBytes = kRowWords * 4;
constexpr int64_t kEndOfWork = -1;

struct alignas(128) SharedStorage {
  float row[kStages][kRowWords];
  int64_t task[kStages];
  PipelineBarriers<kStages> barriers;
};

// Waits on the wrong parity: what a wrong phase convention does.
struct OtherPhase {
  const DeviceWait& wait;
  MOK_DEVICE void ForBarrier(uint64_t* barrier, uint32_t parity) const {
    wait.ForBarrier(barrier, parity ^ 1);
  }
};

template <int kBug>
MOK_DEVICE void Produce(const Params& p, SharedStorage& s) {
  DeviceWait wait(p.wait, kProducer);
  DeviceTracer tracer(p.trace, BlockIndex().x, kProducer);
  TicketWorkSource source(p.ticket, p.num_tasks);
  Pipeline<kStages> stages(s.barriers);
  int64_t task;
  bool running = true;
  while (running) {
    running = source.Next(task);
    wait.SetTask(0, task);
    const uint64_t begin = tracer.Now();
    if (running && !wait.ForCounterGpu(&p.ready[task], 1)) {
      if (kBug == kNoEndOfWorkOnAbort) break;
      running = false;
    }
    if (kBug != kSkipAcquire) stages.Acquire(wait);
    if (running) {
      FenceProxyAsyncGlobal();
      if (kBug != kCommitBeforeTask) s.task[stages.stage()] = task;
      uint64_t* full = stages.ExpectBytes(kRowBytes);
      if (kBug == kCommitBeforeTask) s.task[stages.stage()] = task;
      BulkLoad(s.row[stages.stage()], p.rows + task * kRowWords, kRowBytes, full);
      tracer.Record(0, static_cast<int32_t>(task), begin);
    } else {
      s.task[stages.stage()] = kEndOfWork;
      stages.Commit();
    }
    stages.Advance();
  }
  if (kBug != kNoFinish) source.Finish(GridDimensions().x);
}

template <int kBug>
MOK_DEVICE void Consume(const Params& p, SharedStorage& s) {
  DeviceWait wait(p.wait, kConsumer);
  Pipeline<kStages> stages(s.barriers);
  const int lane = static_cast<int>(ThreadIndex().x) % 32;
  for (;; stages.Advance()) {
    if (kBug == kWaitForOtherPhase) {
      stages.Wait(OtherPhase{wait});
    } else {
      stages.Wait(wait);
    }
    const int64_t task = s.task[stages.stage()];
    if (task == kEndOfWork) return;
    if (kBug == kReleaseBeforeRead) stages.Release();
    const float* row = s.row[stages.stage()];
    for (int i = lane; i < kRowWords; i += 32) p.doubled[task * kRowWords + i] = 2 * row[i];
    if (lane == 0) ++p.executions[task];
    if (kBug != kReleaseBeforeRead && kBug != kStageNotReleased) stages.Release();
  }
}

template <int kBug>
MOK_KERNEL(kThreads, 1)
Persistent(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  if (ThreadIndex().x == 0) {
    MOK_NAME(s.task, "task", -1);
    Pipeline<kStages>::Initialize(s.barriers, 1, kBug == kTooFewConsumers ? 33 : 32);
    FenceMbarrierInit();
  }
  SyncBlock();
  if (ThreadIndex().x < 32) {
    if (kBug == kTicketPerLane ? ThreadIndex().x < 2 : ElectOne()) Produce<kBug>(p, s);
  } else {
    Consume<kBug>(p, s);
  }
}

}  // namespace

TestKernel PersistentKernel(int bug) {
  return {MOK_KERNEL_TABLE(Persistent, kBugCount, bug), kThreads, sizeof(SharedStorage)};
}

}  // namespace mok::testing::persistent
