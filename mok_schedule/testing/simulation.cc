#include "mok_schedule/testing/simulation.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "mok_core/status.h"
#include "mok_schedule/testing/program_effects.h"
#include "mok_schedule/testing/random_program.h"

namespace mok::testing {
namespace {

class Simulator {
 public:
  Simulator(const TaskProgram& program, const SimulationOptions& options, std::mt19937_64& random)
      : program_(program),
        options_(options),
        random_(random),
        effects_(program),
        cells_(effects_.num_cells()),
        counters_(program.NumCounters(), 0) {
    const std::vector<int64_t> labels = effects_.InitialLabels();
    for (size_t i = 0; i < labels.size(); ++i) cells_[i].label = labels[i];
    const bool merged = options.num_communication_workers == 0;
    const bool split = options.num_push_workers > 0;
    const auto add_workers = [&](Queue queue, int count) {
      for (int i = 0; i < count; ++i) workers_.emplace_back().queue = queue;
    };
    add_workers(merged ? Queue::kMerged : Queue::kCompute, options.num_compute_workers);
    add_workers(split ? Queue::kPull : Queue::kCommunication, options.num_communication_workers);
    add_workers(Queue::kPush, options.num_push_workers);
    for (double& priority : kind_priority_) priority = Fraction() < 0.3 ? Fraction() : 1.0;
    takers_are_eager_ = Fraction() < 0.5;
    for (Worker& worker : workers_) worker.priority = IdlePriority();
  }

  std::string Run() {
    while (error_.empty()) {
      std::vector<Worker*> movable;
      for (Worker& worker : workers_) {
        if (CanMove(worker)) movable.push_back(&worker);
      }
      if (movable.empty()) break;
      Move(Choose(movable));
    }
    if (error_.empty()) CheckEnd();
    return error_;
  }

 private:
  static constexpr double kHighestPriority = 1e9;

  enum class State { kIdle, kWaiting, kRunning };

  struct Worker {
    Queue queue = Queue::kMerged;
    State state = State::kIdle;
    Task task = {};
    Dependencies dependencies = {};
    Effects effects;
    double priority = 0;
  };

  struct CellState {
    int64_t label = kNoData;
    const Worker* writer = nullptr;  // while it is being written
  };

  double Fraction() { return std::uniform_real_distribution<double>(0, 1)(random_); }

  // Eager workers keep as many tasks in flight as there are workers.
  double IdlePriority() { return takers_are_eager_ ? kHighestPriority : Fraction(); }

  int64_t& NextTask(Queue queue) { return next_task_[static_cast<int>(queue)]; }

  bool CanMove(const Worker& worker) {
    switch (worker.state) {
      case State::kIdle:
        return NextTask(worker.queue) < program_.NumTasks(worker.queue);
      case State::kRunning:  // and has its products
        return WaitsHold(worker.dependencies, EarlyWaits(worker), worker.dependencies.num_waits);
      case State::kWaiting:
        break;
    }
    return WaitsHold(worker.dependencies, 0, EarlyWaits(worker));
  }

  static int EarlyWaits(const Worker& worker) {
    return worker.dependencies.num_waits - worker.dependencies.num_late_waits;
  }

  bool WaitsHold(const Dependencies& dependencies, int begin, int end) const {
    for (int i = begin; i < end; ++i) {
      const Wait& wait = dependencies.waits[i];
      for (int c = wait.first_counter; c < wait.first_counter + wait.num_counters; ++c) {
        if (counters_[c] < wait.target) return false;
      }
    }
    return true;
  }

  Worker& Choose(const std::vector<Worker*>& movable) {
    if (options_.adversary == Adversary::kRandom) {
      return *movable[Uniform(random_, 0, static_cast<int64_t>(movable.size()) - 1)];
    }
    return **std::max_element(movable.begin(), movable.end(), [](const Worker* a, const Worker* b) {
      return a->priority < b->priority;
    });
  }

  void Move(Worker& worker) {
    switch (worker.state) {
      case State::kIdle:
        Take(worker);
        break;
      case State::kWaiting:
        Start(worker);
        break;
      case State::kRunning:
        End(worker);
        break;
    }
  }

  void Take(Worker& worker) {
    worker.task = program_.Decode(worker.queue, NextTask(worker.queue)++);
    worker.dependencies = options_.dependencies ? options_.dependencies(worker.task)
                                                : program_.DependenciesOf(worker.task);
    worker.effects = effects_.Of(worker.task);
    worker.state = State::kWaiting;
    switch (options_.adversary) {
      case Adversary::kRandom:
        break;
      case Adversary::kLastTakerFirst:
        worker.priority = 1 + num_taken_++;
        break;
      case Adversary::kStarveKinds:
        worker.priority = kind_priority_[static_cast<int>(worker.task.kind)] + 0.01 * Fraction();
        break;
      case Adversary::kStarveTasks:
        worker.priority = Fraction();
        break;
    }
  }

  void Start(Worker& worker) {
    worker.state = State::kRunning;
    CheckReads(worker, worker.effects.reads, "starts");
    for (const Access& access : worker.effects.writes) {
      CellState& cell = cells_[access.cell];
      if (cell.writer != nullptr) Fail(worker, "writes what another task is writing:", access);
      cell = {access.label, &worker};
    }
  }

  void End(Worker& worker) {
    CheckReads(worker, worker.effects.reads, "ends");
    CheckReads(worker, worker.effects.late_reads, "ends");
    for (const Access& access : worker.effects.writes) {
      CellState& cell = cells_[access.cell];
      if (cell.writer != &worker) Fail(worker, "finds its output overwritten:", access);
      cell.writer = nullptr;
    }
    for (int i = 0; i < worker.dependencies.num_signals; ++i) {
      ++counters_[worker.dependencies.signals[i]];
    }
    worker.state = State::kIdle;
    worker.priority = IdlePriority();
  }

  void CheckReads(const Worker& worker, const std::vector<Access>& reads, const char* when) {
    for (const Access& access : reads) {
      const CellState& cell = cells_[access.cell];
      if (cell.writer == &worker) continue;  // its own update in place
      if (cell.writer != nullptr || cell.label != access.label) {
        Fail(worker, StrCat(when, " without its input:"), access);
      }
    }
  }

  void CheckEnd() {
    for (const Worker& worker : workers_) {
      if (worker.state == State::kIdle) continue;
      error_ = StrCat("deadlock: ", TaskText(worker.task), " waits for ever");
      return;
    }
    for (const Access& access : effects_.FinalLabels()) {
      if (cells_[access.cell].label == access.label) continue;
      error_ = StrCat("at the end ", effects_.CellName(access.cell), " holds ",
                      cells_[access.cell].label, " instead of ", access.label);
      return;
    }
  }

  static std::string TaskText(const Task& task) {
    return StrCat(TaskKindName(task.kind), " (block ", task.block, ", tile ", task.tile,
                  ", expert ", task.expert, ", macrobatch ", task.macrobatch, ")");
  }

  void Fail(const Worker& worker, const std::string& what, const Access& access) {
    if (!error_.empty()) return;
    const CellState& cell = cells_[access.cell];
    error_ = StrCat(TaskText(worker.task), " ", what, " ", effects_.CellName(access.cell),
                    " should hold ", access.label, ", holds ", cell.label,
                    cell.writer != nullptr ? " (being written)" : "");
  }

  const TaskProgram& program_;
  const SimulationOptions& options_;
  std::mt19937_64& random_;
  const ProgramEffects effects_;
  std::vector<CellState> cells_;
  std::vector<uint64_t> counters_;
  std::vector<Worker> workers_;
  int64_t next_task_[kNumQueues] = {};
  double kind_priority_[kNumTaskKinds];
  bool takers_are_eager_;
  double num_taken_ = 0;
  std::string error_;
};

}  // namespace

std::string Simulate(const TaskProgram& program, const SimulationOptions& options,
                     std::mt19937_64& random) {
  return Simulator(program, options, random).Run();
}

}  // namespace mok::testing
