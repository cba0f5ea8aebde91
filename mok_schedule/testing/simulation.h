// Executes a task program on simulated workers, one step at a time, in an order that an adversary
// chooses, and reports the first broken promise: a task that finds the wrong data when it starts or
// when it ends, two tasks that write one cell at once, or a deadlock.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>

#include "mok_schedule/task_program.h"

namespace mok::testing {

// Whose step comes next among the workers that can move. A worker moves when it takes the next task
// of its queue, when it starts the task because all waits hold, and when it ends the task.
enum class Adversary {
  kRandom,          // anyone
  kLastTakerFirst,  // whoever took its task last: early tasks are left hanging as long as possible
  kStarveKinds,     // some kinds of tasks only when nobody else can move
  kStarveTasks,     // every task gets a random priority, so that some starve
};
inline constexpr Adversary kAdversaries[] = {Adversary::kRandom, Adversary::kLastTakerFirst,
                                             Adversary::kStarveKinds, Adversary::kStarveTasks};

struct SimulationOptions {
  Adversary adversary = Adversary::kRandom;
  // Workers of each queue. With no communication workers all take from the merged queue; with push
  // workers the communication workers take from the pull queue.
  int num_compute_workers = 1;
  int num_communication_workers = 0;
  int num_push_workers = 0;
  // The dependencies in force; those of the program when empty.
  std::function<Dependencies(const Task&)> dependencies;
};

// Empty when every promise was kept, else what was broken.
std::string Simulate(const TaskProgram& program, const SimulationOptions& options,
                     std::mt19937_64& random);

}  // namespace mok::testing
