// The three invariants of the task program: waits look back only, no number of workers deadlocks,
// and nothing is overwritten before its last reader is done. The last test removes and weakens
// every kind of wait in turn and sees that the checks above would notice.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "mok_schedule/task_program.h"
#include "mok_schedule/testing/random_program.h"
#include "mok_schedule/testing/simulation.h"

namespace mok {
namespace {

using ::mok::testing::Adversary;
using ::mok::testing::kAdversaries;
using ::mok::testing::ProgramCase;
using ::mok::testing::ProgramOfBlocks;
using ::mok::testing::RandomProgram;
using ::mok::testing::Simulate;
using ::mok::testing::SimulationOptions;
using ::mok::testing::Uniform;

constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward};

TEST(TaskDependenciesTest, WaitsAreSatisfiedByEarlierTasksOfTheMergedOrder) {
  for (const Pass pass : kPasses) {
    for (uint64_t seed = 0; seed < 3000; ++seed) {
      std::mt19937_64 random(seed);
      const ProgramCase program_case = RandomProgram(random, pass);
      const TaskProgram program = program_case.Create();
      std::vector<uint64_t> counters(program.NumCounters(), 0);
      for (int64_t i = 0; i < program.NumTasks(Queue::kMerged); ++i) {
        const Task task = program.Decode(Queue::kMerged, i);
        const Dependencies dependencies = program.DependenciesOf(task);
        ASSERT_LE(dependencies.num_waits, kMaxWaits);
        ASSERT_LE(dependencies.num_signals, kMaxSignals);
        for (int w = 0; w < dependencies.num_waits; ++w) {
          const Wait& wait = dependencies.waits[w];
          ASSERT_GE(wait.first_counter, 0);
          ASSERT_LE(wait.first_counter + wait.num_counters, program.NumCounters());
          ASSERT_GE(wait.target, 1u);
          for (int c = 0; c < wait.num_counters; ++c) {
            ASSERT_GE(counters[wait.first_counter + c], wait.target)
                << TaskKindName(task.kind) << " block " << task.block << " waits for "
                << CounterFamilyName(program.NameOfCounter(wait.first_counter).family) << ", seed "
                << seed << ": " << program_case.Description();
          }
        }
        for (int s = 0; s < dependencies.num_signals; ++s) {
          ASSERT_LT(dependencies.signals[s], program.NumCounters());
          ++counters[dependencies.signals[s]];
        }
      }
    }
  }
}

TEST(TaskDependenciesTest, CountersHaveDistinctNames) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const ProgramCase program_case = RandomProgram(random, kPasses[seed % 2]);
    const TaskProgram program = program_case.Create();
    std::set<std::pair<int, int>> names;
    for (int32_t counter = 0; counter < program.NumCounters(); ++counter) {
      const CounterName name = program.NameOfCounter(counter);
      ASSERT_EQ(program.view().CounterOf(name.family, name.index), counter);
      names.insert({static_cast<int>(name.family), name.index});
    }
    ASSERT_EQ(static_cast<int32_t>(names.size()), program.NumCounters());
  }
}

// A random number of workers, of one, two or three queues.
SimulationOptions RandomWorkers(std::mt19937_64& random, int most) {
  SimulationOptions options;
  options.adversary = kAdversaries[Uniform(random, 0, std::size(kAdversaries) - 1)];
  options.num_compute_workers = static_cast<int>(Uniform(random, 1, most));
  options.num_communication_workers =
      static_cast<int>(std::max<int64_t>(0, Uniform(random, -2, most)));
  if (options.num_communication_workers > 0 && Uniform(random, 0, 1) == 0) {
    options.num_push_workers = static_cast<int>(Uniform(random, 1, most));
  }
  return options;
}

std::string Text(const SimulationOptions& options) {
  return StrCat("adversary ", static_cast<int>(options.adversary), ", ",
                options.num_compute_workers, " compute, ", options.num_communication_workers,
                " communication and ", options.num_push_workers, " push workers");
}

TEST(TaskDependenciesTest, NoInterleavingDeadlocksOrReadsWrongData) {
  for (const Pass pass : kPasses) {
    for (uint64_t seed = 0; seed < 3000; ++seed) {
      std::mt19937_64 random(seed);
      const ProgramCase program_case = RandomProgram(random, pass);
      const TaskProgram program = program_case.Create();
      for (int repeat = 0; repeat < 4; ++repeat) {
        const SimulationOptions options = RandomWorkers(random, 12);
        ASSERT_EQ(Simulate(program, options, random), "")
            << Text(options) << ", seed " << seed << ": " << program_case.Description();
      }
    }
  }
}

// Every small number of workers of each queue, on programs with many macrobatches.
TEST(TaskDependenciesTest, EveryNumberOfWorkersFinishes) {
  std::mt19937_64 random(1);
  for (const Pass pass : kPasses) {
    for (const int kept : {0, 1}) {
      ProgramCase program_case = ProgramOfBlocks(pass, {5, 0, 1, 9, 2}, 2, 3);
      program_case.shape.kept_macrobatches = kept;
      program_case.shape.token_blocks = 3;
      program_case.shape.intermediate_tiles = 2;
      const TaskProgram program = program_case.Create();
      for (int compute = 1; compute <= 8; ++compute) {
        for (int communication = 0; communication <= 8; ++communication) {
          for (const Adversary adversary : kAdversaries) {
            for (const int push : {0, 1, 3}) {
              if (communication == 0 && push > 0) continue;
              const SimulationOptions options = {adversary, compute, communication, push, nullptr};
              ASSERT_EQ(Simulate(program, options, random), "") << Text(options);
            }
          }
        }
      }
    }
  }
}

// A class of waits: those of one kind of task for one family of counters. The weight gradient's two
// waits for its family, for its own expert and for the carry buffer's last owner, are two classes.
using WaitClass = std::tuple<TaskKind, CounterFamily, bool>;

std::string Text(const WaitClass& wait_class) {
  const auto& [kind, family, other_expert] = wait_class;
  return StrCat(TaskKindName(kind), " waits for ", CounterFamilyName(family),
                other_expert ? " of another expert" : "");
}

WaitClass ClassOf(const TaskProgram& program, const Task& task, const Wait& wait) {
  const CounterName name = program.NameOfCounter(wait.first_counter);
  const bool is_weight_grad =
      task.kind == TaskKind::kWeightGradDown || task.kind == TaskKind::kWeightGradGateUp;
  const bool other_expert =
      is_weight_grad && name.family == CounterFamily::kWeightGradDone && name.index != task.expert;
  return {task.kind, name.family, other_expert};
}

using K = TaskKind;
using F = CounterFamily;

const std::set<WaitClass> kForwardWaits = {
    {K::kDispatch, F::kEntry, false},    {K::kDispatch, F::kGateUpDone, false},
    {K::kGateUp, F::kDispatched, false}, {K::kGateUp, F::kDownDone, false},
    {K::kDown, F::kGateUpDone, false},   {K::kDown, F::kCombined, false},
    {K::kCombine, F::kDownDone, false},  {K::kSharedDown, F::kSharedGateUpDone, false},
    {K::kExitBarrier, F::kEntry, false}, {K::kExitBarrier, F::kSent, false},
    {K::kTokenReduce, F::kExit, false},  {K::kTokenReduce, F::kSharedDownDone, false},
    {K::kSharedDown, F::kExit, false},
};

const std::set<WaitClass> kBackwardWaits = {
    {K::kRecomputeDispatch, F::kEntry, false},
    {K::kRecomputeDispatch, F::kWeightGradDone, false},
    {K::kReverseCombine, F::kEntry, false},
    {K::kReverseCombine, F::kWeightGradDone, false},
    {K::kRecomputeGateUp, F::kRecomputeDispatched, false},
    {K::kRecomputeGateUp, F::kInputGradDone, false},
    {K::kDownGrad, F::kReverseCombined, false},
    {K::kDownGrad, F::kRecomputeDone, false},
    {K::kDownGrad, F::kReverseDispatched, false},
    {K::kInputGrad, F::kDownGradDone, false},
    {K::kInputGrad, F::kReverseDispatched, false},
    {K::kReverseDispatch, F::kInputGradDone, false},
    {K::kWeightGradDown, F::kDownGradDone, false},
    {K::kWeightGradDown, F::kWeightGradDone, false},
    {K::kWeightGradDown, F::kWeightGradDone, true},
    {K::kWeightGradGateUp, F::kDownGradDone, false},
    {K::kWeightGradGateUp, F::kWeightGradDone, false},
    {K::kWeightGradGateUp, F::kWeightGradDone, true},
    {K::kSharedDownGrad, F::kSharedGateUpDone, false},
    {K::kSharedInputGrad, F::kSharedDownGradDone, false},
    {K::kSharedInputGrad, F::kExit, false},
    {K::kSharedWeightGradDown, F::kSharedDownGradDone, false},
    {K::kSharedWeightGradGateUp, F::kSharedDownGradDone, false},
    {K::kExitBarrier, F::kEntry, false},
    {K::kExitBarrier, F::kSent, false},
    {K::kTokenReduce, F::kExit, false},
    {K::kTokenReduce, F::kSharedInputGradDone, false},
};

const std::set<WaitClass>& WaitsOf(Pass pass) {
  return pass == Pass::kForward ? kForwardWaits : kBackwardWaits;
}

// So that a new kind of wait gets into the mutation test.
TEST(TaskDependenciesTest, TheListsOfWaitsAreComplete) {
  for (const Pass pass : kPasses) {
    std::set<WaitClass> seen;
    for (uint64_t seed = 0; seed < 1000; ++seed) {
      std::mt19937_64 random(seed);
      const ProgramCase program_case = RandomProgram(random, pass);
      const TaskProgram program = program_case.Create();
      for (int64_t i = 0; i < program.NumTasks(Queue::kMerged); ++i) {
        const Task task = program.Decode(Queue::kMerged, i);
        const Dependencies dependencies = program.DependenciesOf(task);
        for (int w = 0; w < dependencies.num_waits; ++w) {
          seen.insert(ClassOf(program, task, dependencies.waits[w]));
        }
      }
    }
    EXPECT_EQ(seen, WaitsOf(pass));
  }
}

enum class Weakening { kRemove, kOneSignalLess, kWithoutFirstCounter, kWithoutLastCounter };

Dependencies Weakened(const TaskProgram& program, const Task& task, const WaitClass& wait_class,
                      Weakening weakening) {
  Dependencies dependencies = program.DependenciesOf(task);
  for (int w = 0; w < dependencies.num_waits; ++w) {
    Wait& wait = dependencies.waits[w];
    if (ClassOf(program, task, wait) != wait_class) continue;
    const bool is_range = wait.num_counters > 1;
    switch (weakening) {
      case Weakening::kRemove:
        wait.num_counters = 0;
        break;
      case Weakening::kOneSignalLess:
        --wait.target;
        break;
      case Weakening::kWithoutFirstCounter:
        wait.first_counter += is_range;
        wait.num_counters -= is_range;
        break;
      case Weakening::kWithoutLastCounter:
        wait.num_counters -= is_range;
        break;
    }
  }
  return dependencies;
}

// Number of random programs until one fails with the weakened wait; -1 if none does.
int64_t ProgramsUntilNoticed(Pass pass, const WaitClass& wait_class, Weakening weakening) {
  constexpr int64_t kMostPrograms = 40000;
  for (int64_t seed = 0; seed < kMostPrograms; ++seed) {
    std::mt19937_64 random(seed);
    const ProgramCase program_case = RandomProgram(random, pass);
    const TaskProgram program = program_case.Create();
    SimulationOptions options = RandomWorkers(random, 16);
    options.dependencies = [&](const Task& task) {
      return Weakened(program, task, wait_class, weakening);
    };
    if (!Simulate(program, options, random).empty()) return seed + 1;
  }
  return -1;
}

TEST(TaskDependenciesTest, EveryWaitIsNeeded) {
  for (const Pass pass : kPasses) {
    for (const WaitClass& wait_class : WaitsOf(pass)) {
      for (const Weakening weakening : {Weakening::kRemove, Weakening::kOneSignalLess}) {
        EXPECT_GT(ProgramsUntilNoticed(pass, wait_class, weakening), 0)
            << Text(wait_class) << ", weakening " << static_cast<int>(weakening);
      }
    }
  }
}

TEST(TaskDependenciesTest, EveryCounterOfARangeIsNeeded) {
  for (const WaitClass& wait_class :
       {WaitClass(K::kWeightGradDown, F::kDownGradDone, false),
        WaitClass(K::kWeightGradGateUp, F::kDownGradDone, false),
        WaitClass(K::kSharedWeightGradDown, F::kSharedDownGradDone, false),
        WaitClass(K::kSharedWeightGradGateUp, F::kSharedDownGradDone, false)}) {
    for (const Weakening weakening :
         {Weakening::kWithoutFirstCounter, Weakening::kWithoutLastCounter}) {
      EXPECT_GT(ProgramsUntilNoticed(Pass::kBackward, wait_class, weakening), 0)
          << Text(wait_class) << ", weakening " << static_cast<int>(weakening);
    }
  }
}

// The carry buffer's last owner may have ended in an earlier macrobatch than the one in which the
// next owner starts, and still be reading: expert 0 is carried into macrobatch 1, expert 5 starts
// in macrobatch 3, nobody is carried into macrobatches 2 and 3.
TEST(TaskDependenciesTest, CarryBufferWaitsForAnOwnerOfLongAgo) {
  const ProgramCase program_case = ProgramOfBlocks(Pass::kBackward, {5, 3, 1, 3, 2, 4}, 2, 4);
  const TaskProgram program = program_case.Create();
  const Task task = {TaskKind::kWeightGradDown, -1, 0, 5, 3};
  const Dependencies dependencies = program.DependenciesOf(task);
  const Wait& wait = dependencies.waits[1];
  EXPECT_EQ(wait.first_counter, program.view().CounterOf(CounterFamily::kWeightGradDone, 0));
  EXPECT_EQ(wait.target, 4u);  // two tiles of two pieces

  SimulationOptions options = {Adversary::kStarveTasks, 24, 24, 0, nullptr};
  int64_t num_noticed = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    options.dependencies = nullptr;
    ASSERT_EQ(Simulate(program, options, random), "");
    options.dependencies = [&](const Task& any) {
      Dependencies weakened = program.DependenciesOf(any);
      if (any.expert == task.expert && any.macrobatch == task.macrobatch && any.block < 0) {
        weakened.num_waits = 1;
      }
      return weakened;
    };
    if (!Simulate(program, options, random).empty()) ++num_noticed;
  }
  EXPECT_GT(num_noticed, 0);
}

}  // namespace
}  // namespace mok
