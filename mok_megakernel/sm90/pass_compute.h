// What the compute roles of both passes have in common: one thread schedules; tiles are signalled
// once they are stored.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/ticket_work_source.h"
#include "mok_megakernel/sm90/pass_storage.h"
#include "mok_schedule/program_dependencies.h"

namespace mok {

namespace pass_internal {

// The part of the compute queue that the launch's mode runs. TokenReduce tasks are its end.
struct TaskRange {
  int64_t begin, count;
};
MOK_DEVICE TaskRange ComputeRange(PassMode mode, const ProgramView& program) {
  const int64_t all = program.NumTasks(Queue::kCompute);
  const int64_t reduce = program.shape().token_blocks * program.shape().token_reduce_tiles;
  switch (mode) {
    case PassMode::kExchangeAndCompute:
      return {0, all - reduce};
    case PassMode::kReduceOnly:
      return {all - reduce, reduce};
    default:
      return {0, all};
  }
}

// Waits for the counters of tasks. The tiles of a weight gradient wait for the same long range one
// after the other: counters only grow, so that what this thread has acquired it need not ask again.
template <PassBug kBug>
class DependencyWaits {
 public:
  explicit MOK_DEVICE DependencyWaits(const uint64_t* counters) : counters_(counters) {}

  // False: the grid is aborted.
  MOK_DEVICE bool Await(const Dependencies& dependencies, const DeviceWait& wait) {
    constexpr int kSkipped = kBug == PassBug::kSkipLastDependency ? 1 : 0;
    for (int i = 0; i < dependencies.num_waits - kSkipped; ++i) {
      const Wait& on = dependencies.waits[i];
      const bool is_range = on.num_counters > 1;
      if (is_range && on.first_counter == range_.first_counter &&
          on.num_counters == range_.num_counters && on.target == range_.target) {
        continue;
      }
      for (int32_t j = 0; j < on.num_counters; ++j) {
        if (!wait.ForCounterGpu(counters_ + on.first_counter + j, on.target)) return false;
      }
      if (is_range) range_ = on;
    }
    return true;
  }

 private:
  const uint64_t* counters_;
  Wait range_ = {};  // the last one of several counters
};

template <PassBug kBug>
MOK_DEVICE bool SkipsWaits(PassMode mode, const Task& task) {
  if (kBug == PassBug::kSkipDependencies) return true;
  const bool reduces = task.kind == TaskKind::kTokenReduce;
  return reduces && (mode == PassMode::kReduceOnly || kBug == PassBug::kReduceBeforeExit);
}

}  // namespace pass_internal

// One thread: takes the next task of the grid, waits for what it depends on and queues it for the
// block, up to kQueueDepth tasks ahead of the GEMM. FillWork<Config>(p, program, task, work) of the
// pass says what the task is made of.
template <class Config, class Params>
MOK_DEVICE void SchedulerRole(const Params& p, PassStorage<Config>& s) {
  using namespace pass_internal;
  DeviceWait wait = WaitOf(p, PassRole::kScheduler);
  PassQueue<Config> queue(s.queue);
  const TaskRange range = ComputeRange(p.shape.mode, s.program);
  TicketWorkSource source(&p.signals.state->ticket, range.count);
  DependencyWaits<Config::kBug> waits(p.signals.counters);
  PassTracer tracer(p.trace);
  typename Config::Work work = {};
  bool aborted = false;
  uint64_t time = tracer.Now();
  for (int64_t index; !aborted && source.Next(index);) {
    const Task task = s.program.Decode(Queue::kCompute, range.begin + index);
    const Dependencies dependencies = DependenciesOf(s.program, task);
    work.task_kind = static_cast<int32_t>(task.kind);
    work.task = index;
    wait.SetTask(work.task_kind, index);
    time = tracer.Record(work.task_kind, TracePhase::kWork, index, time);
    if (!SkipsWaits<Config::kBug>(p.shape.mode, task) && !waits.Await(dependencies, wait)) {
      aborted = true;
      continue;
    }
    time = tracer.Record(work.task_kind, TracePhase::kWait, index, time);
    work.signal = dependencies.num_signals > 0 ? dependencies.signals[0] : -1;
    FillWork<Config>(p, s.program, task, work);
    queue.Push(work, wait);
    time = tracer.Record(work.task_kind, TracePhase::kStore, index, time);
  }
  work.kind = Config::Work::Kind::kEnd;
  if (!aborted || Config::kBug != PassBug::kNoEndOfWorkOnAbort) queue.Push(work, wait);
  const auto blocks = static_cast<int32_t>(GridDimensions().x) - p.shape.num_comm_sms;
  if (Config::kBug != PassBug::kNoTicketReset) source.Finish(blocks);
}

// Two named barriers, used in turn: a warp arrives when it has stored its part of a tile and goes
// on; only the first warp waits for all, and signals. No warp can be two tiles ahead of the first
// one, which frees the queue's place after it has signalled.
inline constexpr int kStoredBarriers[2] = {1, 2};

template <class Config, int kBarrier>
MOK_DEVICE void WaitUntilStored() {
  constexpr bool kHalf = Config::kBug == PassBug::kSignalOfOneWarpgroup;
  constexpr int kThreads = kHalf ? 128 : Config::Gemm::kConsumerThreads;
  if (Config::kBug == PassBug::kSignalBeforeEpilogue || ThreadIndex().x >= kThreads) return;
  if (ThreadIndex().x < 32) {
    NamedBarrierSync(kBarrier, kThreads);
  } else {
    NamedBarrierArrive(kBarrier, kThreads);
  }
}

// By all consumer threads. odd: whether the number of tiles signalled so far is odd.
template <class Config>
MOK_DEVICE void SignalStored(uint64_t* counter, bool odd) {
  if (odd) {
    WaitUntilStored<Config, kStoredBarriers[1]>();
  } else {
    WaitUntilStored<Config, kStoredBarriers[0]>();
  }
  if (ThreadIndex().x != 0) return;
  // Stores of this tile, then tensor and bulk loads of whoever acquires.
  if (Config::kBug != PassBug::kNoProxyFence) FenceProxyAsyncGlobal();
  if (Config::kBug == PassBug::kRelaxedSignal) {
    ReduceAddRelaxedGpu(counter, uint64_t{1});
  } else {
    ReduceAddReleaseGpu(counter, uint64_t{1});
  }
}

}  // namespace mok
