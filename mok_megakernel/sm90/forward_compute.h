// The compute roles of a block: one thread schedules, one loads tiles, two warpgroups multiply,
// finish and store them.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/ticket_work_source.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_megakernel/sm90/forward_storage.h"
#include "mok_megakernel/sm90/forward_work.h"
#include "mok_megakernel/sm90/token_reduce.h"
#include "mok_schedule/program_dependencies.h"

namespace mok {

namespace forward_internal {

// The part of the compute queue that the launch's mode runs. TokenReduce tasks are its end.
struct TaskRange {
  int64_t begin, count;
};
MOK_DEVICE TaskRange ComputeRange(const ForwardParams& p, const ProgramView& program) {
  const int64_t all = program.NumTasks(Queue::kCompute);
  const int64_t reduce = program.shape().token_blocks * program.shape().token_reduce_tiles;
  switch (p.shape.mode) {
    case ForwardMode::kExchangeAndCompute:
      return {0, all - reduce};
    case ForwardMode::kReduceOnly:
      return {all - reduce, reduce};
    default:
      return {0, all};
  }
}

// False: the grid is aborted.
template <ForwardBug kBug>
MOK_DEVICE bool WaitForDependencies(const uint64_t* counters, const Dependencies& dependencies,
                                    const DeviceWait& wait) {
  constexpr int kSkipped = kBug == ForwardBug::kSkipLastDependency ? 1 : 0;
  for (int i = 0; i < dependencies.num_waits - kSkipped; ++i) {
    const Wait& on = dependencies.waits[i];
    for (int32_t j = 0; j < on.num_counters; ++j) {
      if (!wait.ForCounterGpu(counters + on.first_counter + j, on.target)) return false;
    }
  }
  return true;
}

template <ForwardBug kBug>
MOK_DEVICE bool SkipsWaits(const ForwardParams& p, const Task& task) {
  if (kBug == ForwardBug::kSkipDependencies) return true;
  const bool reduces = task.kind == TaskKind::kTokenReduce;
  return reduces &&
         (p.shape.mode == ForwardMode::kReduceOnly || kBug == ForwardBug::kReduceBeforeExit);
}

}  // namespace forward_internal

// One thread: takes the next task of the grid, waits for what it depends on and queues it for the
// block, up to kQueueDepth tasks ahead of the GEMM.
template <class Config>
MOK_DEVICE void SchedulerRole(const ForwardParams& p, ForwardStorage<Config>& s) {
  using namespace forward_internal;
  DeviceWait wait = WaitOf(p, ForwardRole::kScheduler);
  ForwardQueue<Config> queue(s.queue);
  const TaskRange range = ComputeRange(p, s.program);
  TicketWorkSource source(&p.signals.state->ticket, range.count);
  ForwardWork work = {};
  bool aborted = false;
  for (int64_t index; !aborted && source.Next(index);) {
    const Task task = s.program.Decode(Queue::kCompute, range.begin + index);
    const Dependencies dependencies = DependenciesOf(s.program, task);
    work.task_kind = static_cast<int32_t>(task.kind);
    work.task = index;
    wait.SetTask(work.task_kind, index);
    if (!SkipsWaits<Config::kBug>(p, task) &&
        !WaitForDependencies<Config::kBug>(p.signals.counters, dependencies, wait)) {
      aborted = true;
      continue;
    }
    work.signal = dependencies.num_signals > 0 ? dependencies.signals[0] : -1;
    FillWork<Config>(p, s.program, task, work);
    queue.Push(work, wait);
  }
  work.kind = WorkKind::kEnd;
  if (!aborted || Config::kBug != ForwardBug::kNoEndOfWorkOnAbort) queue.Push(work, wait);
  const auto blocks = static_cast<int32_t>(GridDimensions().x) - p.shape.num_comm_sms;
  if (Config::kBug != ForwardBug::kNoTicketReset) source.Finish(blocks);
}

// One thread: loads the operands of every tile.
template <class Config>
MOK_DEVICE void ProducerRole(const ForwardParams& p, ForwardStorage<Config>& s) {
  using Gemm = typename Config::Gemm;
  DeviceWait wait = WaitOf(p, ForwardRole::kProducer);
  ForwardQueue<Config> queue(s.queue);
  GemmPipeline<Gemm> pipeline(s.barriers);
  for (;; queue.Pop()) {
    const ForwardWork& work = queue.Front(wait);
    if (work.kind == WorkKind::kEnd) break;
    wait.SetTask(work.task_kind, work.task);
    if (work.kind == WorkKind::kReduce) continue;
    // The scheduler has acquired the rows; bulk copies and epilogues of other blocks wrote them.
    if (Config::kBug != ForwardBug::kNoProxyFence) FenceProxyAsyncGlobal();
    ProducerLoadTile<Gemm>(work.gemm, s.stages, pipeline, wait);
  }
}

// Two named barriers, used in turn: a warp arrives when it has stored its part of a tile and goes
// on; only the first warp waits for all, and signals. No warp can be two tiles ahead of the first
// one, which frees the queue's place after it has signalled.
inline constexpr int kStoredBarriers[2] = {1, 2};

template <class Config, int kBarrier>
MOK_DEVICE void WaitUntilStored() {
  constexpr bool kHalf = Config::kBug == ForwardBug::kSignalOfOneWarpgroup;
  constexpr int kThreads = kHalf ? 128 : Config::Gemm::kConsumerThreads;
  if (Config::kBug == ForwardBug::kSignalBeforeEpilogue || ThreadIndex().x >= kThreads) return;
  if (ThreadIndex().x < 32) {
    NamedBarrierSync(kBarrier, kThreads);
  } else {
    NamedBarrierArrive(kBarrier, kThreads);
  }
}

template <class Config>
MOK_DEVICE void SignalStored(const ForwardParams& p, int32_t counter, bool odd) {
  if (odd) {
    WaitUntilStored<Config, kStoredBarriers[1]>();
  } else {
    WaitUntilStored<Config, kStoredBarriers[0]>();
  }
  if (ThreadIndex().x != 0) return;
  // Stores of this tile, then tensor and bulk loads of whoever acquires.
  if (Config::kBug != ForwardBug::kNoProxyFence) FenceProxyAsyncGlobal();
  if (Config::kBug == ForwardBug::kRelaxedSignal) {
    ReduceAddRelaxedGpu(p.signals.counters + counter, uint64_t{1});
  } else {
    ReduceAddReleaseGpu(p.signals.counters + counter, uint64_t{1});
  }
}

// Two warpgroups: multiply, finish and store tiles, and sum tokens.
template <class Config>
MOK_DEVICE void ConsumerRole(const ForwardParams& p, ForwardStorage<Config>& s) {
  using Gemm = typename Config::Gemm;
  DeviceWait wait = WaitOf(p, ForwardRole::kConsumer);
  ForwardQueue<Config> queue(s.queue);
  GemmConsumer<Gemm> consumer(s.stages, s.barriers);
  bool odd = false;  // signalled tiles so far
  for (;;) {
    const ForwardWork& work = queue.Front(wait);
    if (work.kind == WorkKind::kEnd) break;
    wait.SetTask(work.task_kind, work.task);
    const int32_t signal = work.signal;
    if (Config::kBug == ForwardBug::kTaskReleasedBeforeRead) queue.PopByWarp();
    if (work.kind == WorkKind::kReduce) {
      ReduceTokens(p, work.first_token, work.num_tokens, static_cast<int>(ThreadIndex().x),
                   Gemm::kConsumerThreads);
    } else {
      typename GemmConsumer<Gemm>::Accumulator accumulator;
      if (consumer.MainLoop(work.gemm, wait, accumulator)) {
        if (work.kind == WorkKind::kSwiGluGemm) {
          EpilogueSwiGlu<Gemm>(work.gemm, accumulator);
        } else {
          EpilogueStore<Gemm>(work.gemm, accumulator);
        }
      }
    }
    if (signal >= 0) {
      SignalStored<Config>(p, signal, odd);
      odd = !odd;
    }
    if (Config::kBug != ForwardBug::kTaskReleasedBeforeRead) queue.PopByWarp();
  }
}

}  // namespace mok
