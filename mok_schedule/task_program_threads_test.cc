// Task programs on real threads and real counters. The buffers are plain memory, so a sanitizer
// sees every access that the program's waits and signals do not order.
#include <gtest/gtest.h>

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

  // With no communication workers all threads share the merged queue. The first error, or "".
  std::string Run(int num_compute, int num_communication) {
    const Queue queue = num_communication == 0 ? Queue::kMerged : Queue::kCompute;
    ThreadWorkSource compute(program_.NumTasks(queue));
    ThreadWorkSource communication(program_.NumTasks(Queue::kCommunication));
    std::vector<std::thread> threads;
    for (int i = 0; i < num_compute; ++i) {
      threads.emplace_back([&, queue] { Work(queue, compute); });
    }
    for (int i = 0; i < num_communication; ++i) {
      threads.emplace_back([&] { Work(Queue::kCommunication, communication); });
    }
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
    ASSERT_EQ(ThreadedRun(program).Run(num_compute, num_communication), "")
        << num_compute << " + " << num_communication << " threads, seed " << seed << ": "
        << program_case.Description();
  }
}

}  // namespace
}  // namespace mok
