// What the compute roles of both passes have in common: the scheduler.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/ticket_work_source.h"
#include "mok_megakernel/sm90/pass_storage.h"
#include "mok_schedule/program_cursor.h"
#include "mok_schedule/program_dependencies.h"

namespace mok {

namespace pass_internal {

// The part of the compute queue that the launch's mode runs. What sums the routes is its end.
struct TaskRange {
  int64_t begin, count;
};
MOK_DEVICE TaskRange ComputeRange(PassMode mode, const ProgramView& program) {
  const int64_t all = program.NumTasks(Queue::kCompute);
  const int64_t reduce = program.shape().num_reductions();
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
template <Pass kPass, PassBug kBug>
class DependencyWaits {
 public:
  explicit MOK_DEVICE DependencyWaits(const uint64_t* counters) : counters_(counters) {}

  // False: the grid is aborted. meanwhile(): see DeviceWait.
  template <class Meanwhile>
  MOK_DEVICE bool Await(const Dependencies& dependencies, const DeviceWait& wait,
                        Meanwhile meanwhile) {
    constexpr int kSkipped = kBug == PassBug::kSkipLastDependency ? 1 : 0;
    const int num_waits = dependencies.num_waits - dependencies.num_late_waits - kSkipped;
    for (int i = 0; i < num_waits; ++i) {
      const Wait on = WaitAt(dependencies, i);
      const bool is_range = on.num_counters > 1;
      if (is_range && on.first_counter == range_.first_counter &&
          on.num_counters == range_.num_counters && on.target == range_.target) {
        continue;
      }
      for (int32_t j = 0; j < on.num_counters; ++j) {
        const uint64_t* counter = counters_ + on.first_counter + j;
        if (!wait.ForCounterGpu(counter, on.target, meanwhile)) return false;
      }
      if (is_range) range_ = on;
    }
    return true;
  }

 private:
  // Without a variable index, which would put the waits into memory.
  MOK_DEVICE static Wait WaitAt(const Dependencies& dependencies, int index) {
    Wait wait = dependencies.waits[0];
    MOK_UNROLL
    for (int i = 1; i < MaxWaits(kPass); ++i) {
      if (i == index) wait = dependencies.waits[i];
    }
    return wait;
  }

  const uint64_t* counters_;
  Wait range_ = {};  // the last one of several counters
};

// Signals the tiles that consumers have stored. A release takes until everything that the SM has
// stored before has arrived, tens of microseconds while rows come in at full speed: in a consumer
// it would hold up the GEMM. So consumers only pop a task once they have stored their parts, and
// the scheduler, which would have to notice it anyway, signals.
template <class Config>
class TileSignals {
 public:
  MOK_DEVICE TileSignals(PassStorage<Config>& s, uint64_t* counters)
      : queue_(s.queue), counters_(counters) {}

  // A task has been pushed.
  MOK_DEVICE void Pushed() {
    ++num_tasks_;
    if (Config::kBug == PassBug::kSignalBeforeEpilogue) SignalOldest();
  }
  // Signals what is finished by now.
  MOK_DEVICE void SignalFinished() {
    while (num_tasks_ > 0 && queue_.IsPopped()) SignalOldest();
  }
  // At most `most` tasks are unfinished.
  MOK_DEVICE void AwaitAllBut(int most, const DeviceWait& wait) {
    while (num_tasks_ > most) {
      queue_.AwaitPop(wait);
      SignalOldest();
    }
  }

 private:
  MOK_DEVICE void SignalOldest() {
    const int32_t signal = queue_.Oldest().signal;
    queue_.Finished();
    --num_tasks_;
    if (signal < 0) return;
    // Stores of this tile, then tensor and bulk loads of whoever acquires.
    if (Config::kBug != PassBug::kNoProxyFence) FenceProxyAsyncGlobal();
    if (Config::kBug == PassBug::kRelaxedSignal) {
      ReduceAddRelaxedGpu(counters_ + signal, uint64_t{1});
    } else {
      ReduceAddReleaseGpu(counters_ + signal, uint64_t{1});
    }
  }

  PassQueue<Config> queue_;
  uint64_t* counters_;
  int num_tasks_ = 0;  // pushed and not yet signalled
};

template <PassBug kBug>
MOK_DEVICE bool WaitsOnlyForItsInput(const Task& task) {
  return (kBug == PassBug::kWindowOverwrite && task.kind == TaskKind::kInputGrad) ||
         (kBug == PassBug::kGateUpOverwrite && task.kind == TaskKind::kRecomputeGateUp);
}

template <PassBug kBug>
MOK_DEVICE bool SkipsWaits(PassMode mode, const Task& task) {
  if (kBug == PassBug::kSkipDependencies || mode == PassMode::kReduceOnly) return true;
  return task.kind == TaskKind::kTokenReduce && kBug == PassBug::kReduceBeforeExit;
}

// The counter of the exit barrier if the tile needs it, for its epilogue; else null.
template <PassBug kBug>
MOK_DEVICE const uint64_t* LateCounter(PassMode mode, const ProgramView& program,
                                       const uint64_t* counters, const Dependencies& dependencies) {
  const bool waits = dependencies.num_late_waits > 0 && mode != PassMode::kReduceOnly &&
                     kBug != PassBug::kReduceBeforeExit;
  return waits ? counters + program.CounterOf(CounterFamily::kExit, 0) : nullptr;
}

}  // namespace pass_internal

// One thread: takes the next task of the grid, waits for what it depends on and queues it for the
// block, up to kQueueDepth tasks ahead of the GEMM, and signals the tiles that the block has
// stored. FillWork<Config>(p, program, task, work) of the pass says what the task is made of.
// `time`: when the trace of the warp begins.
template <class Config, class Params>
MOK_DEVICE void SchedulerRole(const Params& p, PassStorage<Config>& s, uint64_t time) {
  using namespace pass_internal;
  DeviceWait wait = WaitOf(p, PassRole::kScheduler);
  PassQueue<Config> queue(s.queue);
  const TaskRange range = ComputeRange(p.shape.mode, s.program);
  TicketWorkSource source(&p.signals.state->ticket, range.count);
  ProgramCursor cursor(s.program, Queue::kCompute);
  DependencyWaits<Config::kPass, Config::kBug> waits(p.signals.counters);
  TileSignals<Config> signals(s, p.signals.counters);
  const auto signal_finished = [&] { signals.SignalFinished(); };
  PassTracer<Config> tracer(p.trace);
  bool aborted = false;
  // A task is taken when there is a place for it and no sooner: blocks that run far ahead of each
  // other share fewer operands in L2.
  const auto next = [&](int64_t& index) {
    signals.AwaitAllBut(Config::kQueueDepth - 1, wait);
    return source.Next(index);
  };
  for (int64_t index; !aborted && next(index);) {
    const Task task = cursor.Seek(range.begin + index);
    Dependencies dependencies = DependenciesInPass<Config::kPass>(s.program, task);
    if (WaitsOnlyForItsInput<Config::kBug>(task)) dependencies.num_waits = 1;
    const auto kind = static_cast<int32_t>(task.kind);
    wait.SetTask(kind, index);
    time = tracer.Record(kind, TracePhase::kWork, index, time);
    signals.SignalFinished();
    if (!SkipsWaits<Config::kBug>(p.shape.mode, task) &&
        !waits.Await(dependencies, wait, signal_finished)) {
      aborted = true;
      continue;
    }
    time = tracer.Record(kind, TracePhase::kWait, index, time);
    typename Config::Work& work = queue.Place(wait);
    work.task_kind = kind;
    work.task = index;
    work.signal = dependencies.num_signals > 0 ? dependencies.signals[0] : -1;
    work.late_counter =
        LateCounter<Config::kBug>(p.shape.mode, s.program, p.signals.counters, dependencies);
    FillWork<Config>(p, s.program, task, work);
    queue.Push();
    signals.Pushed();
    time = tracer.Record(kind, TracePhase::kStore, index, time);
  }
  signals.AwaitAllBut(Config::kQueueDepth - 1, wait);
  queue.Place(wait).kind = Config::Work::Kind::kEnd;
  if (!aborted || Config::kBug != PassBug::kNoEndOfWorkOnAbort) queue.Push();
  signals.AwaitAllBut(0, wait);
  const auto blocks = static_cast<int32_t>(GridDimensions().x) - p.shape.num_comm_sms;
  if (Config::kBug != PassBug::kNoTicketReset) source.Finish(blocks);
}

// What the first thread of a consumer warpgroup records.
template <class Config>
class ConsumerTrace {
 public:
  explicit MOK_DEVICE ConsumerTrace(const DeviceTraceParams& trace)
      : tracer_(trace), traces_(ThreadIndex().x % 128 == 0), time_(tracer_.Now()) {}
  template <class Work>
  MOK_DEVICE void Record(const Work& work, TracePhase phase) {
    if (Config::kTraces && traces_) {
      time_ = tracer_.Record(work.task_kind, phase, work.task, time_);
    }
  }

 private:
  PassTracer<Config> tracer_;
  bool traces_;
  uint64_t time_;
};

// The wait of a consumer for rows that its epilogue adds to the products. One lane of each warp
// asks, and none again once the rows are there.
class LateWait {
 public:
  explicit MOK_DEVICE LateWait(const DeviceWait& wait) : wait_(wait) {}

  // All lanes. counter: as in a task. False: the grid is aborted.
  MOK_DEVICE bool Await(const uint64_t* counter) {
    if (is_over_) return true;
    bool is_over = true;
    const bool asks = counter != nullptr && ThreadIndexReadHere() % 32 == 0;
    if (asks) is_over = wait_.ForCounterGpu(counter, 1);
    is_over_ = Shuffle(is_over ? 1 : 0, 0) != 0;
    SyncWarp();  // what the lane has acquired
    return is_over_;
  }

 private:
  const DeviceWait& wait_;
  bool is_over_ = false;
};

}  // namespace mok
