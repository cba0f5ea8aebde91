#include "mok_schedule/testing/timeline.h"

#include <algorithm>
#include <cstdint>
#include <queue>
#include <tuple>
#include <vector>

#include "mok_core/bits.h"
#include "mok_core/status.h"

namespace mok::testing {
namespace {

class TimelineSimulation {
 public:
  TimelineSimulation(const TaskProgram& program, const std::vector<Task>& merged,
                     const TimelineModel& model)
      : program_(program),
        model_(model),
        counters_(program.NumCounters(), 0),
        waiting_(program.NumCounters()) {
    const int num_exchange = model.exchange_workers * (model.separate_pushes ? 2 : 1);
    workers_.resize(model.compute_workers + num_exchange);
    int64_t num_pulls = 0;
    int64_t num_pushes = 0;
    for (const Task& task : merged) {
      if (IsInQueue(task.kind, Queue::kCompute)) {
        compute_.push_back(task);
        continue;
      }
      const bool push = model.separate_pushes && IsPush(task.kind);
      const int64_t index = push ? num_pushes++ : num_pulls++;
      const int64_t worker = model.compute_workers + (push ? model.exchange_workers : 0) +
                             index % model.exchange_workers;
      workers_[worker].tasks.push_back(task);
    }
  }

  Timeline Run() {
    for (size_t worker = 0; worker < workers_.size(); ++worker) TakeNext(worker);
    while (!ends_.empty()) {
      const Event event = ends_.top();
      ends_.pop();
      now_ = event.time;
      Finish(event.worker);
      TakeNext(event.worker);
    }
    for (const Worker& worker : workers_) {
      MOK_CHECK(worker.idle) << TaskKindName(worker.task.kind) << " of block " << worker.task.block
                             << " waits for ever";
    }
    result_.end = now_;
    result_.busy /= model_.compute_workers;
    for (double& stalled : result_.stalled) stalled /= model_.compute_workers;
    return result_;
  }

 private:
  struct Worker {
    std::vector<Task> tasks;  // of an exchange worker
    size_t next = 0;
    bool idle = true;  // nothing left to take
    Task task = {};
    Dependencies dependencies = {};
    double taken = 0;
  };

  // Ends of tasks, earliest first; ties in the order in which they were scheduled.
  struct Event {
    double time;
    int64_t number;
    size_t worker;
    bool operator>(const Event& other) const {
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };

  bool IsCompute(size_t worker) const {
    return worker < static_cast<size_t>(model_.compute_workers);
  }

  void TakeNext(size_t index) {
    Worker& worker = workers_[index];
    const std::vector<Task>& tasks = IsCompute(index) ? compute_ : worker.tasks;
    size_t& next = IsCompute(index) ? next_compute_ : worker.next;
    worker.idle = next == tasks.size();
    if (worker.idle) return;
    worker.task = tasks[next++];
    worker.dependencies = program_.DependenciesOf(worker.task);
    worker.taken = now_;
    StartOrWait(index);
  }

  // Registers at the first counter that is not there yet.
  void StartOrWait(size_t index) {
    const Worker& worker = workers_[index];
    for (int w = 0; w < worker.dependencies.num_waits; ++w) {
      const Wait& wait = worker.dependencies.waits[w];
      for (int c = wait.first_counter; c < wait.first_counter + wait.num_counters; ++c) {
        if (counters_[c] >= wait.target) continue;
        waiting_[c].push_back({wait.target, index});
        return;
      }
    }
    Start(index);
  }

  void Start(size_t index) {
    const Worker& worker = workers_[index];
    const TaskKind kind = worker.task.kind;
    double end = now_ + model_.barrier_seconds;
    if (IsCompute(index)) {
      const double seconds = model_.compute_seconds(worker.task);
      end = now_ + seconds;
      result_.busy += seconds;
      result_.stalled[static_cast<int>(kind)] += now_ - worker.taken;
    } else if (kind != TaskKind::kEntryBarrier && kind != TaskKind::kExitBarrier) {
      link_free_ = std::max(link_free_, now_) + model_.exchange_seconds;
      end = link_free_ + model_.exchange_latency;
      result_.exchange_busy += model_.exchange_seconds;
      result_.last_exchange_end = end;
    }
    ends_.push({end, num_events_++, index});
  }

  void Finish(size_t index) {
    for (int s = 0; s < workers_[index].dependencies.num_signals; ++s) {
      const int32_t counter = workers_[index].dependencies.signals[s];
      const uint64_t value = ++counters_[counter];
      std::vector<Waiter> waiters;
      waiters.swap(waiting_[counter]);
      for (const Waiter& waiter : waiters) {
        if (value >= waiter.target) {
          StartOrWait(waiter.worker);
        } else {
          waiting_[counter].push_back(waiter);
        }
      }
    }
  }

  struct Waiter {
    uint64_t target;
    size_t worker;
  };

  const TaskProgram& program_;
  const TimelineModel& model_;
  std::vector<uint64_t> counters_;
  std::vector<std::vector<Waiter>> waiting_;  // [counter]
  std::vector<Worker> workers_;
  std::vector<Task> compute_;
  size_t next_compute_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> ends_;
  int64_t num_events_ = 0;
  double now_ = 0;
  double link_free_ = 0;
  Timeline result_ = {};
};

// Where a task comes in the order without pipelining: part of the pass, minibatch of the execution
// order, stage.
std::tuple<int, int64_t, int> UnpipelinedKey(const ProgramShape& shape, const Task& task) {
  const RingPlan& ring = shape.ring;
  const int64_t last = ring.num_macrobatches() - 1;
  const int64_t position = shape.pass == Pass::kForward ? last - task.macrobatch : task.macrobatch;
  const int64_t per_macrobatch = CeilDiv(ring.macrobatch_blocks, ring.minibatch_blocks);
  const int64_t first = position * per_macrobatch;
  const int64_t minibatch =
      task.block < 0 ? 0 : first + ring.slot_of_block(task.block) / ring.minibatch_blocks;
  switch (task.kind) {
    case TaskKind::kEntryBarrier:
      return {0, 0, 0};
    case TaskKind::kSharedGateUp:
    case TaskKind::kSharedRecomputeGateUp:
      return {1, 0, 0};
    case TaskKind::kSharedDown:
    case TaskKind::kSharedDownGrad:
      return {1, 0, 1};
    case TaskKind::kSharedInputGrad:
      return {1, 0, 2};
    case TaskKind::kGateUp:
    case TaskKind::kRecomputeGateUp:
      return {2, minibatch, 0};
    case TaskKind::kDown:
    case TaskKind::kDownGrad:
      return {2, minibatch, 1};
    case TaskKind::kInputGrad:
      return {2, minibatch, 2};
    case TaskKind::kDispatch:
    case TaskKind::kRecomputeDispatch:
      return {2, minibatch - 1, 4};
    case TaskKind::kReverseCombine:
      return {2, minibatch - 1, 5};
    case TaskKind::kCombine:
    case TaskKind::kReverseDispatch:
      return {2, minibatch, 6};
    case TaskKind::kWeightGradDown:
    case TaskKind::kWeightGradGateUp:
      if (task.macrobatch < 0) return {3, 1, 0};
      return {2, first + ring.minibatches_in_macrobatch(task.macrobatch) - 1, 3};
    case TaskKind::kSharedWeightGradDown:
    case TaskKind::kSharedWeightGradGateUp:
      return {3, 0, 0};
    case TaskKind::kExitBarrier:
      return {4, 0, 0};
    case TaskKind::kTokenReduce:
      return {5, 0, 0};
  }
  return {};
}

}  // namespace

Timeline RunTimeline(const TaskProgram& program, const std::vector<Task>& merged,
                     const TimelineModel& model) {
  return TimelineSimulation(program, merged, model).Run();
}

std::vector<Task> MergedOrder(const TaskProgram& program) {
  std::vector<Task> tasks;
  for (int64_t i = 0; i < program.NumTasks(Queue::kMerged); ++i) {
    tasks.push_back(program.Decode(Queue::kMerged, i));
  }
  return tasks;
}

std::vector<Task> UnpipelinedOrder(const TaskProgram& program) {
  std::vector<Task> tasks = MergedOrder(program);
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
    return UnpipelinedKey(program.shape(), a) < UnpipelinedKey(program.shape(), b);
  });
  return tasks;
}

}  // namespace mok::testing
