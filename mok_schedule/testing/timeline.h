// When the tasks of a program run on given numbers of workers: a deterministic discrete-event
// simulation. Workers take tasks as a GPU kernel's do: compute workers draw the next task of the
// queue (ticket), exchange workers own every n-th task of theirs (round robin); a worker that has a
// task waits until its dependencies hold.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mok_schedule/task_program.h"

namespace mok::testing {

struct TimelineModel {
  int compute_workers = 132;
  int exchange_workers = 132;    // of the communication queue, or of each of pull and push
  bool separate_pushes = false;  // workers of their own for Queue::kPull and Queue::kPush
  // Duration of a compute task.
  std::function<double(const Task&)> compute_seconds;
  // The link moves one exchange tile at a time, in the order in which they become ready.
  double exchange_seconds = 0;     // of one exchange tile on the link
  double exchange_latency = 2e-6;  // until its rows have arrived
  double barrier_seconds = 5e-6;
};

struct Timeline {
  double end = 0;                 // of the last task
  double busy = 0;                // compute seconds per compute worker
  double exchange_busy = 0;       // link seconds
  double last_exchange_end = 0;   // of the last tile
  double stalled[kNumTaskKinds];  // per compute worker: waiting with a task of this kind in hand
};

// `merged` holds the tasks of the merged queue, in any order in which no task needs a later one.
Timeline RunTimeline(const TaskProgram& program, const std::vector<Task>& merged,
                     const TimelineModel& model);

// The program's own order.
std::vector<Task> MergedOrder(const TaskProgram& program);

// The same tasks without software pipelining, to compare with: every minibatch runs all its stages
// in a row, its exchange one minibatch ahead, and the whole shared expert but for its weight
// gradients comes first.
std::vector<Task> UnpipelinedOrder(const TaskProgram& program);

}  // namespace mok::testing
