// The vocabulary of the task program: kinds of tasks, tasks, and what they wait for and signal.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"

namespace mok {

enum class Pass : int32_t { kForward, kBackward };

// Every queue is a subsequence of the merged one. Workers of one kind each take the tasks of one
// queue; a program is executed by kMerged alone, by kCompute and kCommunication, or by kCompute,
// kPull and kPush.
enum class Queue : int32_t {
  kCompute,
  kCommunication,
  kMerged,
  kPull,  // of kCommunication: what brings rows in, and the entry barrier
  kPush,  // of kCommunication: what sends rows out, and the exit barrier
};
inline constexpr int kNumQueues = 5;

enum class TaskKind : int32_t {
  // Communication, both passes.
  kEntryBarrier,  // peers' inputs are in place, nobody still reads last pass's buffers
  kExitBarrier,   // all pushes of this pass, from every rank, have landed
  // Communication, forward. One task is one exchange tile: an equal part of the rows of a row
  // block.
  kDispatch,  // pull the tokens of a row block into its ring slot
  kCombine,   // push the rows of y to their source ranks
  // Compute, forward. One task is one output tile of one row block (of one token block), or, for
  // kTokenReduce, an equal part of the tokens of a token block.
  kGateUp,        // g, u and h = silu(g) * u
  kDown,          // y
  kTokenReduce,   // sum of a token block's routes (and shared expert) into the output; both passes,
                  // unless the shared expert's last tiles do it: ProgramShape::fused_reduce_width
  kSharedGateUp,  // the shared expert's g, u and h
  kSharedDown,    // the shared expert's y, or with fused_reduce_width the output
  // Communication, backward. One task is one exchange tile.
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
  kSharedInputGrad,  // the shared expert's d_x, or with fused_reduce_width the output
  kSharedWeightGradDown,
  kSharedWeightGradGateUp,
};
inline constexpr int kNumTaskKinds = 22;

// "GateUp" for kGateUp; "Unknown" for a value that is no kind.
const char* TaskKindName(TaskKind kind);

MOK_HOST_DEVICE constexpr bool IsPull(TaskKind kind) {
  return kind == TaskKind::kEntryBarrier || kind == TaskKind::kDispatch ||
         kind == TaskKind::kRecomputeDispatch || kind == TaskKind::kReverseCombine;
}

MOK_HOST_DEVICE constexpr bool IsPush(TaskKind kind) {
  return kind == TaskKind::kExitBarrier || kind == TaskKind::kCombine ||
         kind == TaskKind::kReverseDispatch;
}

MOK_HOST_DEVICE constexpr bool IsInQueue(TaskKind kind, Queue queue) {
  switch (queue) {
    case Queue::kCompute:
      return !IsPull(kind) && !IsPush(kind);
    case Queue::kCommunication:
      return IsPull(kind) || IsPush(kind);
    case Queue::kMerged:
      return true;
    case Queue::kPull:
      return IsPull(kind);
    case Queue::kPush:
      return IsPush(kind);
  }
  return false;
}

struct Task {
  TaskKind kind;
  int32_t block;       // row block of the table (routed kinds), token block of 128 tokens (shared
                       // kinds and kTokenReduce); -1: barriers and weight gradients
  int32_t tile;        // output or exchange tile of the block, part of its tokens, or tile of the
                       // weight gradient; 0 where there is only one
  int32_t expert;      // local expert (routed kinds and routed weight gradients); else -1
  int32_t macrobatch;  // of the block or of the weight gradient's rows; -1: no routed rows
};

// All counters first_counter .. first_counter + num_counters - 1 must reach target.
struct Wait {
  int32_t first_counter;
  int32_t num_counters;  // may be 0: nothing to wait for
  uint64_t target;       // >= 1
};

inline constexpr int kMaxWaits = 3;
inline constexpr int kMaxSignals = 2;
// Of the tasks of one pass.
MOK_HOST_DEVICE constexpr int MaxWaits(Pass pass) { return pass == Pass::kForward ? 2 : kMaxWaits; }

// Before a task runs, all its waits must hold; after it has run, every counter in `signals` is
// incremented by 1. Counters start at 0 in each pass and only grow.
struct Dependencies {
  Wait waits[kMaxWaits];
  int32_t num_waits;
  // The last so many of them are for what the task needs only once it has its products: it may
  // start without them.
  int32_t num_late_waits;
  int32_t signals[kMaxSignals];
  int32_t num_signals;
};

}  // namespace mok
