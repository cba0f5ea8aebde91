// Task programs on real threads and real counters. The buffers are plain memory, so a sanitizer
// sees every access that the program's waits and signals do not order.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mok_core/counter.h"
#include "mok_core/status.h"
#include "mok_core/work_source.h"
#include "mok_schedule/task_program.h"
#include "mok_schedule/testing/program_effects.h"
#include "mok_schedule/testing/random_program.h"

namespace mok {
namespace {

using ::mok::testing::Access;
using ::mok::testing::Effects;
using ::mok::testing::ProgramCase;
using ::mok::testing::ProgramEffects;
using ::mok::testing::RandomProgram;
using ::mok::testing::Uniform;

class ThreadedRun {
 public:
  explicit ThreadedRun(const TaskProgram& program)
      : program_(program),
        effects_(program),
        labels_(effects_.InitialLabels()),
        counters_(program.NumCounters()),
        deadline_(std::chrono::steady_clock::now() + std::chrono::seconds(60)) {}

  // With no communication threads all threads share the merged queue; with push threads the
  // communication threads pull. The first error, or "".
  std::string Run(int num_compute, int num_communication, int num_push) {
    const Queue compute_queue = num_communication == 0 ? Queue::kMerged : Queue::kCompute;
    const Queue communication_queue = num_push == 0 ? Queue::kCommunication : Queue::kPull;
    ThreadWorkSource compute(program_.NumTasks(compute_queue));
    ThreadWorkSource communication(program_.NumTasks(communication_queue));
    ThreadWorkSource push(program_.NumTasks(Queue::kPush));
    std::vector<std::thread> threads;
    const auto start = [&](int count, Queue queue, ThreadWorkSource& source) {
      for (int i = 0; i < count; ++i) {
        threads.emplace_back([this, queue, &source] { Work(queue, source); });
      }
    };
    start(num_compute, compute_queue, compute);
    start(num_communication, communication_queue, communication);
    start(num_push, Queue::kPush, push);
    for (std::thread& thread : threads) thread.join();
    for (const Access& access : effects_.FinalLabels()) {
      if (labels_[access.cell] != access.label) Fail(Text("the end", access));
    }
    return error_;
  }

 private:
  void Work(Queue queue, ThreadWorkSource& source) {
    int64_t index = 0;
    while (source.Next(index)) {
      const Task task = program_.Decode(queue, index);
      const Dependencies dependencies = program_.DependenciesOf(task);
      const WaitContext context = {0, TaskKindName(task.kind), index, deadline_, &cancelled_};
      for (int w = 0; w < dependencies.num_waits; ++w) {
        const Wait& wait = dependencies.waits[w];
        const Status status = WaitAllAtLeast(counters_.data() + wait.first_counter,
                                             wait.num_counters, wait.target, context);
        if (!status.ok()) return Fail(status.ToString());
      }
      Execute(task);
      for (int s = 0; s < dependencies.num_signals; ++s) Signal(counters_[dependencies.signals[s]]);
    }
  }

  void Execute(const Task& task) {
    const Effects effects = effects_.Of(task);
    for (const Access& access : effects.reads) {
      if (labels_[access.cell] != access.label) Fail(Text(TaskKindName(task.kind), access));
    }
    if (effects.reads.size() % 3 == 1) std::this_thread::yield();  // lets others overtake
    for (const Access& access : effects.writes) labels_[access.cell] = access.label;
  }

  std::string Text(const char* reader, const Access& access) const {
    return StrCat(reader, " finds ", effects_.CellName(access.cell), " without the data of ",
                  access.label);
  }

  void Fail(const std::string& error) {
    cancelled_ = true;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = error;
  }

  const TaskProgram& program_;
  const ProgramEffects effects_;
  std::vector<int64_t> labels_;  // not atomic: the program orders all accesses
  std::vector<Counter> counters_;
  const std::chrono::steady_clock::time_point deadline_;
  std::atomic<bool> cancelled_ = false;
  std::mutex mutex_;
  std::string error_;
};

TEST(TaskProgramThreadsTest, RandomProgramsOnRandomNumbersOfThreads) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    std::mt19937_64 random(seed);
    const Pass pass = seed % 2 == 0 ? Pass::kForward : Pass::kBackward;
    const ProgramCase program_case = RandomProgram(random, pass);
    const TaskProgram program = program_case.Create();
    const int num_compute = static_cast<int>(Uniform(random, 1, 5));
    const int num_communication = static_cast<int>(Uniform(random, 0, 3));
    const int num_push =
        num_communication == 0 ? 0 : static_cast<int>(std::max<int64_t>(0, Uniform(random, -2, 2)));
    ASSERT_EQ(ThreadedRun(program).Run(num_compute, num_communication, num_push), "")
        << num_compute << " + " << num_communication << " + " << num_push << " threads, seed "
        << seed << ": " << program_case.Description();
  }
}

}  // namespace
}  // namespace mok
