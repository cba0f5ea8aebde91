// What each task waits for and signals. One rule per edge, with its reason.
//
// Counters of ring slots count over all row blocks that pass through the slot. A task of a row
// block that is the slot's n-th occupant (n = 0, 1, ...) waits for a family's counter to reach
//     (n + 1) * s   when it needs what the other tasks of the same block have produced, and
//     n * s         when it overwrites what they read for the previous occupant,
// where s is the number of signals per block, that is tiles (of output, or of exchange). Both are
// exact: no task of a later occupant signals a family before the earlier occupant's signals are
// complete.
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
  MOK_HOST_DEVICE DependencyList(Pass pass, const ProgramView& program, const Task& task)
      : pass_(pass), program_(program), task_(task) {}

  MOK_HOST_DEVICE const Dependencies& result() const { return result_; }

  // Waits that hold from the start are left out.
  MOK_HOST_DEVICE void WaitForRange(CounterFamily family, int64_t index, int64_t count,
                                    int64_t target) {
    if (count == 0 || target == 0) return;
    const Wait wait = {program_.CounterOf(family, index), static_cast<int32_t>(count),
                       static_cast<uint64_t>(target)};
    // Values are selected, not places, so that device code keeps all of it in registers.
    for (int i = 0; i < MaxWaits(pass_); ++i) {
      result_.waits[i] = i == result_.num_waits ? wait : result_.waits[i];
    }
    ++result_.num_waits;
  }
  MOK_HOST_DEVICE void WaitFor(CounterFamily family, int64_t index, int64_t target) {
    WaitForRange(family, index, 1, target);
  }
  // The last wait of a task: for the routes' rows, which it adds to its products.
  MOK_HOST_DEVICE void WaitForExitLate() {
    WaitFor(CounterFamily::kExit, 0, 1);
    result_.num_late_waits = 1;
  }
  MOK_HOST_DEVICE void WaitForSlot(CounterFamily family, Occupant occupant) {
    const int64_t occupants = OccupantsBefore(family) + static_cast<int64_t>(occupant);
    WaitFor(family, Slot(), occupants * SignalsPerBlock(family));
  }
  MOK_HOST_DEVICE void WaitForAllSent() {
    const ProgramShape& shape = program_.shape();
    WaitFor(CounterFamily::kSent, 0, shape.ring.num_row_blocks * shape.exchange_tiles);
  }
  MOK_HOST_DEVICE void Signal(CounterFamily family, int64_t index) {
    const int32_t counter = program_.CounterOf(family, index);
    for (int i = 0; i < kMaxSignals; ++i) {
      result_.signals[i] = i == result_.num_signals ? counter : result_.signals[i];
    }
    ++result_.num_signals;
  }
  MOK_HOST_DEVICE void SignalSlot(CounterFamily family) { Signal(family, Slot()); }

  // x, d_out, d_gate, d_up and weighted_h of the slot's previous occupant are read until all weight
  // gradient tiles of its expert, over the pieces up to that block's macrobatch, are done.
  MOK_HOST_DEVICE void WaitForWeightGradOfPreviousOccupant() {
    if (task_.macrobatch == 0) return;
    const int64_t previous = task_.block - program_.shape().ring.macrobatch_blocks;
    const int64_t expert = program_.table().expert_of_block(previous);
    WaitFor(CounterFamily::kWeightGradDone, expert,
            WeightGradSignals(expert, task_.macrobatch - 1));
  }

  // The rows of d_x that were in the block's place of the window have been sent. Without a window
  // DownGrad has waited for that.
  MOK_HOST_DEVICE void WaitForWindow() {
    const ProgramShape& shape = program_.shape();
    const int64_t ring = shape.ring.macrobatch_blocks, slots = shape.d_x_slots();
    if (slots == ring) return;
    int64_t slot = Slot() - slots, occupants = task_.macrobatch + int64_t{1};
    if (slot < 0) {  // of the macrobatch before
      slot += ring;
      --occupants;
    }
    WaitFor(CounterFamily::kReverseDispatched, slot, occupants * shape.exchange_tiles);
  }

  // The three buffers a weight gradient tile reads and writes: the rows, and both ends of the
  // carry.
  MOK_HOST_DEVICE void WaitForPiece() {
    const WeightGradPiece piece = program_.PieceOf(task_);
    const ProgramShape& shape = program_.shape();
    WaitForRange(CounterFamily::kDownGradDone, shape.ring.slot_of_block(piece.first_block),
                 piece.num_blocks, (task_.macrobatch + 1) * int64_t{shape.down_grad_tiles});
    if (piece.carry_in) {
      WaitFor(CounterFamily::kWeightGradDone, task_.expert,
              WeightGradSignals(task_.expert, task_.macrobatch - 1));
    } else if (piece.carry_out) {
      // The buffer's last owner, which need not have ended in this macrobatch, has read it all. Its
      // own first piece waited for the owner before it.
      const int64_t owner = program_.pieces().carry_owner[task_.macrobatch];
      if (owner >= 0) WaitFor(CounterFamily::kWeightGradDone, owner, AllWeightGradSignals(owner));
    }
  }

 private:
  // Signals of kWeightGradDone once the pieces of an expert up to a macrobatch are done. The pieces
  // of an expert lie in consecutive macrobatches.
  MOK_HOST_DEVICE int64_t WeightGradSignals(int64_t expert, int64_t last_macrobatch) const {
    const int64_t first_block = program_.table().expert_block_begin[expert];
    const int64_t first_macrobatch = program_.shape().ring.macrobatch_of_block(first_block);
    return (last_macrobatch - first_macrobatch + 1) * program_.shape().weight_grad_tiles();
  }
  MOK_HOST_DEVICE int64_t AllWeightGradSignals(int64_t expert) const {
    const int64_t last_block = program_.table().expert_block_begin[expert + 1] - 1;
    return WeightGradSignals(expert, program_.shape().ring.macrobatch_of_block(last_block));
  }

  MOK_HOST_DEVICE int64_t Slot() const {
    return program_.SlotOfBlock(task_.block, task_.macrobatch);
  }

  // Earlier blocks of this pass whose tasks signalled the family for this task's slot.
  MOK_HOST_DEVICE int64_t OccupantsBefore(CounterFamily family) const {
    const ProgramShape& shape = program_.shape();
    if (pass_ == Pass::kForward) {
      return program_.BlocksInSlot(Slot()) - 1 - task_.macrobatch;
    }
    const bool only_recomputed =
        family == CounterFamily::kRecomputeDispatched || family == CounterFamily::kRecomputeDone;
    return only_recomputed ? task_.macrobatch - shape.kept_macrobatches : task_.macrobatch;
  }

  MOK_HOST_DEVICE int64_t SignalsPerBlock(CounterFamily family) const {
    switch (family) {
      case CounterFamily::kGateUpDone:
      case CounterFamily::kRecomputeDone:
        return program_.shape().intermediate_tiles;
      case CounterFamily::kDownGradDone:
        return program_.shape().down_grad_tiles;
      case CounterFamily::kDownDone:
      case CounterFamily::kInputGradDone:
        return program_.shape().hidden_tiles;
      default:
        return program_.shape().exchange_tiles;
    }
  }

  Pass pass_;
  const ProgramView& program_;
  const Task& task_;
  Dependencies result_ = {};
};

MOK_HOST_DEVICE inline void ListBarrierDependencies(const Task& task, DependencyList& list) {
  if (task.kind == TaskKind::kEntryBarrier) {
    list.Signal(CounterFamily::kEntry, 0);
  } else if (task.kind == TaskKind::kExitBarrier) {
    list.WaitFor(CounterFamily::kEntry, 0, 1);  // a rank without rows sends nothing
    list.WaitForAllSent();
    list.Signal(CounterFamily::kExit, 0);
  }
}

// What a forward task does in the ring slot of its row block. The kinds differ in the families
// alone, so that device code holds what computes counters and targets once and not once per kind.
struct SlotRule {
  static constexpr auto kNothing = static_cast<CounterFamily>(kNumCounterFamilies);

  CounterFamily needs = kNothing;       // of this occupant
  CounterFamily overwrites = kNothing;  // whose tasks of the previous occupant have to have read it
  CounterFamily signals = kNothing;
};
MOK_HOST_DEVICE inline SlotRule ForwardSlotRule(TaskKind kind) {
  switch (kind) {
    case TaskKind::kDispatch:  // x
      return {SlotRule::kNothing, CounterFamily::kGateUpDone, CounterFamily::kDispatched};
    case TaskKind::kGateUp:  // x -> h
      return {CounterFamily::kDispatched, CounterFamily::kDownDone, CounterFamily::kGateUpDone};
    case TaskKind::kDown:  // h -> y
      return {CounterFamily::kGateUpDone, CounterFamily::kCombined, CounterFamily::kDownDone};
    case TaskKind::kCombine:  // y
      return {CounterFamily::kDownDone, SlotRule::kNothing, CounterFamily::kCombined};
    default:
      return {};
  }
}

MOK_HOST_DEVICE inline void ListForwardDependencies(const Task& task, DependencyList& list) {
  const SlotRule rule = ForwardSlotRule(task.kind);
  if (task.kind == TaskKind::kDispatch) list.WaitFor(CounterFamily::kEntry, 0, 1);
  if (rule.needs != SlotRule::kNothing) list.WaitForSlot(rule.needs, Occupant::kThis);
  if (rule.overwrites != SlotRule::kNothing) {
    list.WaitForSlot(rule.overwrites, Occupant::kPrevious);
  }
  if (rule.signals != SlotRule::kNothing) list.SignalSlot(rule.signals);
  if (task.kind == TaskKind::kCombine) list.Signal(CounterFamily::kSent, 0);
}

MOK_HOST_DEVICE inline void ListBackwardDependencies(const ProgramShape& shape, const Task& task,
                                                     DependencyList& list) {
  switch (task.kind) {
    case TaskKind::kRecomputeDispatch:
      list.WaitFor(CounterFamily::kEntry, 0, 1);
      list.WaitForWeightGradOfPreviousOccupant();  // has read x
      list.SignalSlot(CounterFamily::kRecomputeDispatched);
      break;
    case TaskKind::kRecomputeGateUp:
      // Overwrites g and u, in whose place the previous occupant's d_gate and d_up may be, and may
      // use weighted_h as scratch: the weight gradients, which RecomputeDispatch waited for, have
      // read these and come after the DownGrad that read g and u.
      list.WaitForSlot(CounterFamily::kRecomputeDispatched, Occupant::kThis);  // x
      list.WaitForSlot(CounterFamily::kInputGradDone, Occupant::kPrevious);    // d_gate, d_up
      list.SignalSlot(CounterFamily::kRecomputeDone);
      break;
    case TaskKind::kReverseCombine:
      list.WaitFor(CounterFamily::kEntry, 0, 1);
      list.WaitForWeightGradOfPreviousOccupant();  // has read d_out, d_gate, d_up, weighted_h
      list.SignalSlot(CounterFamily::kReverseCombined);
      break;
    case TaskKind::kDownGrad:
      list.WaitForSlot(CounterFamily::kReverseCombined, Occupant::kThis);  // d_out
      if (shape.is_recomputed(task.macrobatch)) {
        list.WaitForSlot(CounterFamily::kRecomputeDone, Occupant::kThis);  // g and u
      }
      // Has read the partial router gradients, and follows the InputGrad that read d_gate and d_up.
      list.WaitForSlot(CounterFamily::kReverseDispatched, Occupant::kPrevious);
      list.SignalSlot(CounterFamily::kDownGradDone);
      break;
    case TaskKind::kInputGrad:
      list.WaitForSlot(CounterFamily::kDownGradDone, Occupant::kThis);  // d_gate and d_up
      list.WaitForWindow();                                             // overwrites d_x
      list.SignalSlot(CounterFamily::kInputGradDone);
      break;
    case TaskKind::kReverseDispatch:
      // d_x, and the partial router gradients, which were complete before it.
      list.WaitForSlot(CounterFamily::kInputGradDone, Occupant::kThis);
      list.SignalSlot(CounterFamily::kReverseDispatched);
      list.Signal(CounterFamily::kSent, 0);
      break;
    case TaskKind::kWeightGradDown:
    case TaskKind::kWeightGradGateUp:
      list.WaitForPiece();
      list.Signal(CounterFamily::kWeightGradDone, task.expert);
      break;
    default:
      break;
  }
}

// The shared expert's buffers hold all tokens of the rank, so nothing is overwritten in a pass.
MOK_HOST_DEVICE inline void ListForwardTokenDependencies(const ProgramShape& shape,
                                                         const Task& task, DependencyList& list) {
  switch (task.kind) {
    case TaskKind::kSharedGateUp:
      list.Signal(CounterFamily::kSharedGateUpDone, task.block);
      break;
    case TaskKind::kSharedDown:
      list.WaitFor(CounterFamily::kSharedGateUpDone, task.block,
                   shape.shared_intermediate_tiles);  // h
      if (shape.fuses_token_reduce()) {
        list.WaitForExitLate();  // nobody waits for the output
      } else {
        list.Signal(CounterFamily::kSharedDownDone, task.block);
      }
      break;
    case TaskKind::kTokenReduce:
      // The routes' rows, those that Down has stored in their place and nobody sends included:
      // their Combine has waited for them before the exit waited for it. Likewise in the backward.
      list.WaitFor(CounterFamily::kExit, 0, 1);
      if (shape.has_shared_expert()) {  // the shared expert's rows
        list.WaitFor(CounterFamily::kSharedDownDone, task.block, shape.hidden_tiles);
      }
      break;
    default:
      break;
  }
}

MOK_HOST_DEVICE inline void ListBackwardTokenDependencies(const ProgramShape& shape,
                                                          const Task& task, DependencyList& list) {
  switch (task.kind) {
    case TaskKind::kSharedRecomputeGateUp:
      list.Signal(CounterFamily::kSharedGateUpDone, task.block);
      break;
    case TaskKind::kSharedDownGrad:
      if (shape.is_shared_recomputed()) {
        list.WaitFor(CounterFamily::kSharedGateUpDone, task.block,
                     shape.shared_intermediate_tiles);  // g and u
      }
      list.Signal(CounterFamily::kSharedDownGradDone, task.block);
      break;
    case TaskKind::kSharedInputGrad:
      list.WaitFor(CounterFamily::kSharedDownGradDone, task.block,
                   shape.shared_down_grad_tiles);  // d_gate, d_up
      if (shape.fuses_token_reduce()) {
        list.WaitForExitLate();  // nobody waits for the output
      } else {
        list.Signal(CounterFamily::kSharedInputGradDone, task.block);
      }
      break;
    case TaskKind::kSharedWeightGradDown:
    case TaskKind::kSharedWeightGradGateUp:
      list.WaitForRange(CounterFamily::kSharedDownGradDone, 0, shape.token_blocks,
                        shape.shared_down_grad_tiles);
      break;
    case TaskKind::kTokenReduce:
      list.WaitFor(CounterFamily::kExit, 0, 1);  // the routes' rows
      if (shape.has_shared_expert()) {           // the shared expert's rows
        list.WaitFor(CounterFamily::kSharedInputGradDone, task.block, shape.hidden_tiles);
      }
      break;
    default:
      break;
  }
}

}  // namespace schedule_internal

// DependenciesOf for a program of that pass; short code for a kernel that runs only one of them.
template <Pass kPass>
MOK_HOST_DEVICE Dependencies DependenciesInPass(const ProgramView& program, const Task& task) {
  schedule_internal::DependencyList list(kPass, program, task);
  schedule_internal::ListBarrierDependencies(task, list);
  if constexpr (kPass == Pass::kForward) {
    schedule_internal::ListForwardDependencies(task, list);
    schedule_internal::ListForwardTokenDependencies(program.shape(), task, list);
  } else {
    schedule_internal::ListBackwardDependencies(program.shape(), task, list);
    schedule_internal::ListBackwardTokenDependencies(program.shape(), task, list);
  }
  return list.result();
}

MOK_HOST_DEVICE inline Dependencies DependenciesOf(const ProgramView& program, const Task& task) {
  return program.shape().pass == Pass::kForward
             ? DependenciesInPass<Pass::kForward>(program, task)
             : DependenciesInPass<Pass::kBackward>(program, task);
}

}  // namespace mok
