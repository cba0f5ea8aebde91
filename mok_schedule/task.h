// The vocabulary of the task program: kinds of tasks, tasks, and what they wait for and signal.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"

namespace mok {

enum class Pass : int32_t { kForward, kBackward };

// Compute and communication workers take tasks from two queues; where one worker does both, it
// takes them from the merged queue. The two queues are subsequences of the merged one.
enum class Queue : int32_t { kCompute, kCommunication, kMerged };
inline constexpr int kNumQueues = 3;

enum class TaskKind : int32_t {
  // Communication, both passes.
  kEntryBarrier,  // peers' inputs are in place, nobody still reads last pass's buffers
  kExitBarrier,   // all pushes of this pass, from every rank, have landed
  // Communication, forward. One task is one row block.
  kDispatch,  // pull the tokens of a row block into its ring slot
  kCombine,   // push the rows of y to their source ranks
  // Compute, forward. One task is one output tile of one row block (of one token block).
  kGateUp,        // g, u and h = silu(g) * u
  kDown,          // y
  kTokenReduce,   // sum of a token block's routes (and shared expert) into the output; both passes
  kSharedGateUp,  // the shared expert's g, u and h
  kSharedDown,    // the shared expert's y
  // Communication, backward.
  kRecomputeDispatch,  // pull the tokens again: the forward's ring does not hold them any more
  kReverseCombine,     // pull the (unweighted) output gradients of a row block's tokens
  kReverseDispatch,    // push input gradients and router weight gradients to their source ranks
  // Compute, backward.
  kRecomputeGateUp,   // g and u again
  kDownGrad,          // d_hidden; SwiGLU backward to d_gate, d_up, weighted_h; partial of d_router
  kInputGrad,         // rows of d_x
  kWeightGradDown,    // one tile of an expert's Wd gradient over the rows of one macrobatch
  kWeightGradGateUp,  // one tile of an expert's Wg and Wu gradients over the same rows
  kSharedRecomputeGateUp,
  kSharedDownGrad,
  kSharedInputGrad,
  kSharedWeightGradDown,
  kSharedWeightGradGateUp,
};
inline constexpr int kNumTaskKinds = 22;

// "GateUp" for kGateUp; "Unknown" for a value that is no kind.
const char* TaskKindName(TaskKind kind);

MOK_HOST_DEVICE constexpr bool IsCommunication(TaskKind kind) {
  switch (kind) {
    case TaskKind::kEntryBarrier:
    case TaskKind::kExitBarrier:
    case TaskKind::kDispatch:
    case TaskKind::kCombine:
    case TaskKind::kRecomputeDispatch:
    case TaskKind::kReverseCombine:
    case TaskKind::kReverseDispatch:
      return true;
    default:
      return false;
  }
}

MOK_HOST_DEVICE constexpr bool IsInQueue(TaskKind kind, Queue queue) {
  return queue == Queue::kMerged || IsCommunication(kind) == (queue == Queue::kCommunication);
}

struct Task {
  TaskKind kind;
  int32_t block;       // row block of the table (routed kinds), token block of 128 tokens (shared
                       // kinds and kTokenReduce); -1: barriers and weight gradients
  int32_t tile;        // output tile of the block or of the weight gradient; 0 where only one
  int32_t expert;      // local expert (routed kinds and routed weight gradients); else -1
  int32_t macrobatch;  // of the block or of the weight gradient's rows; -1: no routed rows
};

// All counters first_counter .. first_counter + num_counters - 1 must reach target.
struct Wait {
  int32_t first_counter;
  int32_t num_counters;  // may be 0: nothing to wait for
  uint64_t target;       // >= 1
};

inline constexpr int kMaxWaits = 6;
inline constexpr int kMaxSignals = 2;

// Before a task runs, all its waits must hold; after it has run, every counter in `signals` is
// incremented by 1. Counters start at 0 in each pass and only grow.
struct Dependencies {
  Wait waits[kMaxWaits];
  int32_t num_waits;
  int32_t signals[kMaxSignals];
  int32_t num_signals;
};

}  // namespace mok
