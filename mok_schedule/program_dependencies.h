// What each task waits for and signals. One rule per edge, with its reason.
//
// Counters of ring slots count over all row blocks that pass through the slot. A task of a row
// block that is the slot's n-th occupant (n = 0, 1, ...) waits for a family's counter to reach
//     (n + 1) * s   when it needs what the other tasks of the same block have produced, and
//     n * s         when it overwrites what they read for the previous occupant,
// where s is the number of signals per block, that is tiles. Both are exact: no task of a later
// occupant signals a family before the earlier occupant's signals are complete.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"
#include "mok_schedule/program_view.h"
#include "mok_schedule/task.h"

namespace mok {

namespace schedule_internal {

// Whose signals a task waits for in its ring slot.
enum class Occupant : int32_t { kPrevious = 0, kThis = 1 };

// Collects the dependencies of one task.
class DependencyList {
 public:
  MOK_HOST_DEVICE DependencyList(const ProgramView& program, const Task& task)
      : program_(program), task_(task) {}

  MOK_HOST_DEVICE const Dependencies& result() const { return result_; }

  // Waits that hold from the start are left out.
  MOK_HOST_DEVICE void WaitForRange(CounterFamily family, int64_t index, int64_t count,
                                    int64_t target) {
    if (count == 0 || target == 0) return;
    result_.waits[result_.num_waits++] = {program_.CounterOf(family, index),
                                          static_cast<int32_t>(count),
                                          static_cast<uint64_t>(target)};
  }
  MOK_HOST_DEVICE void WaitFor(CounterFamily family, int64_t index, int64_t target) {
    WaitForRange(family, index, 1, target);
  }
  MOK_HOST_DEVICE void WaitForSlot(CounterFamily family, Occupant occupant) {
    const int64_t occupants = OccupantsBefore(family) + static_cast<int64_t>(occupant);
    WaitFor(family, Slot(), occupants * SignalsPerBlock(family));
  }
  MOK_HOST_DEVICE void Signal(CounterFamily family, int64_t index) {
    result_.signals[result_.num_signals++] = program_.CounterOf(family, index);
  }
  MOK_HOST_DEVICE void SignalSlot(CounterFamily family) { Signal(family, Slot()); }

  // x, d_out, d_gate, d_up and weighted_h of the slot's previous occupant are read until all weight
  // gradient tiles of its expert, over the pieces up to that block's macrobatch, are done.
  MOK_HOST_DEVICE void WaitForWeightGradOfPreviousOccupant() {
    if (task_.macrobatch == 0) return;
    const RingPlan& ring = program_.shape().ring;
    const int64_t expert =
        program_.table().expert_of_block(task_.block - ring.macrobatch_blocks);
    WaitFor(CounterFamily::kWeightGradDone, expert,
            WeightGradSignals(expert, task_.macrobatch - 1));
  }

  // Signals of kWeightGradDone once the pieces of an expert up to a macrobatch are done. The pieces
  // of an expert lie in consecutive macrobatches.
  MOK_HOST_DEVICE int64_t WeightGradSignals(int64_t expert, int64_t last_macrobatch) const {
    const int64_t first_macrobatch = program_.shape().ring.macrobatch_of_block(
        program_.table().expert_block_begin[expert]);
    return (last_macrobatch - first_macrobatch + 1) * program_.shape().weight_grad_tiles();
  }
  MOK_HOST_DEVICE int64_t AllWeightGradSignals(int64_t expert) const {
    return WeightGradSignals(expert, program_.shape().ring.macrobatch_of_block(
                                         program_.table().expert_block_begin[expert + 1] - 1));
  }

 private:
  MOK_HOST_DEVICE int64_t Slot() const { return program_.shape().ring.slot_of_block(task_.block); }

  // Earlier blocks of this pass whose tasks signalled the family for this task's slot.
  MOK_HOST_DEVICE int64_t OccupantsBefore(CounterFamily family) const {
    const ProgramShape& shape = program_.shape();
    if (shape.pass == Pass::kForward) {
      return shape.ring.blocks_in_slot(Slot()) - 1 - task_.macrobatch;
    }
    const bool only_recomputed = family == CounterFamily::kRecomputeDispatched ||
                                 family == CounterFamily::kRecomputeDone;
    return only_recomputed ? task_.macrobatch - shape.kept_macrobatches : task_.macrobatch;
  }

  MOK_HOST_DEVICE int64_t SignalsPerBlock(CounterFamily family) const {
    switch (family) {
      case CounterFamily::kGateUpDone:
      case CounterFamily::kRecomputeDone:
      case CounterFamily::kDownGradDone:
        return program_.shape().intermediate_tiles;
      case CounterFamily::kDownDone:
      case CounterFamily::kInputGradDone:
        return program_.shape().hidden_tiles;
      default:
        return 1;
    }
  }

  const ProgramView& program_;
  const Task& task_;
  Dependencies result_ = {};
};

MOK_HOST_DEVICE inline void ListForwardDependencies(const Task& task, DependencyList& list) {
  switch (task.kind) {
    case TaskKind::kDispatch:
      list.WaitFor(CounterFamily::kEntry, 0, 1);
      list.WaitForSlot(CounterFamily::kGateUpDone, Occupant::kPrevious);  // has read x
      list.SignalSlot(CounterFamily::kDispatched);
      return;
    case TaskKind::kGateUp:
      list.WaitForSlot(CounterFamily::kDispatched, Occupant::kThis);    // x
      list.WaitForSlot(CounterFamily::kDownDone, Occupant::kPrevious);  // has read h
      list.SignalSlot(CounterFamily::kGateUpDone);
      return;
    case TaskKind::kDown:
      list.WaitForSlot(CounterFamily::kGateUpDone, Occupant::kThis);    // h
      list.WaitForSlot(CounterFamily::kCombined, Occupant::kPrevious);  // has read y
      list.SignalSlot(CounterFamily::kDownDone);
      return;
    case TaskKind::kCombine:
      list.WaitForSlot(CounterFamily::kDownDone, Occupant::kThis);  // y
      list.SignalSlot(CounterFamily::kCombined);
      list.Signal(CounterFamily::kRowBlocksSent, 0);
      return;
    default:
      return;
  }
}

MOK_HOST_DEVICE inline void ListBackwardDependencies(const Task& task, DependencyList& list) {
  switch (task.kind) {
    case TaskKind::kRecomputeDispatch:
      list.WaitFor(CounterFamily::kEntry, 0, 1);
      list.WaitForWeightGradOfPreviousOccupant();  // has read x
      list.SignalSlot(CounterFamily::kRecomputeDispatched);
      return;
    case TaskKind::kRecomputeGateUp:
      // The previous occupant's DownGrad, which read g and u, is done: its weight gradients, which
      // RecomputeDispatch waited for, come after it.
      list.WaitForSlot(CounterFamily::kRecomputeDispatched, Occupant::kThis);  // x
      list.SignalSlot(CounterFamily::kRecomputeDone);
      return;
    case TaskKind::kReverseCombine:
      list.WaitFor(CounterFamily::kEntry, 0, 1);
      list.WaitForWeightGradOfPreviousOccupant();  // has read d_out, d_gate, d_up, weighted_h
      list.SignalSlot(CounterFamily::kReverseCombined);
      return;
    default:
      return;
  }
}

}  // namespace schedule_internal

MOK_HOST_DEVICE inline Dependencies DependenciesOf(const ProgramView& program, const Task& task) {
  schedule_internal::DependencyList list(program, task);
  schedule_internal::ListForwardDependencies(task, list);
  schedule_internal::ListBackwardDependencies(task, list);
  return list.result();
}

}  // namespace mok
