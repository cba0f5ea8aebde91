// The task program: the total order of the tasks of a pass and their dependencies, as functions.
//
// Both passes stream the row blocks through the ring macrobatch by macrobatch. Inside a macrobatch
// they are a software pipeline over its minibatches 0 .. n - 1, so that no tile needs what the
// tiles right before it produce; the pipeline drains at the end of each macrobatch, whose slots the
// next one takes over. Terms of a minibatch that does not exist are empty; lead-in(m) brings in the
// first three minibatches of macrobatch m.
//
// Forward (macrobatches from the last to the first, so that at the end the ring holds macrobatch 0,
// which the backward needs first):
//     EntryBarrier, SharedGateUp*, lead-in(first macrobatch),
//     for each macrobatch: GateUp(0),
//         for j: GateUp(j+1), Dispatch(j+3), {j = max(n-2, 0): lead-in(next macrobatch)},
//                Combine(j-1), Down(j);
//         Combine(n-1);
//     SharedDown*, ExitBarrier, TokenReduce*
//     {fused: SharedDown* instead of TokenReduce*, and not before}
// Backward (macrobatches ascending; [ ] only where macrobatch or shared expert is recomputed):
//     EntryBarrier, [SharedRecomputeGateUp*], SharedDownGrad*, lead-in(0),
//     for each macrobatch: [RecomputeGateUp(0), RecomputeGateUp(1)], DownGrad(0),
//         {first macrobatch, early_shared_weight_grads: SharedWeightGrad{Down,GateUp}*},
//         for j: [RecomputeGateUp(j+2)], DownGrad(j+1),
//                [RecomputeDispatch(j+3)], ReverseCombine(j+3), ReverseDispatch(j-1), InputGrad(j);
//         WeightGradDown*, WeightGradGateUp* of each piece, ReverseDispatch(n-1),
//         lead-in(next macrobatch);
//     SharedInputGrad*, {unless early: SharedWeightGradDown*, SharedWeightGradGateUp*},
//     WeightGrad* of experts without rows, ExitBarrier, TokenReduce*
//     {fused: SharedInputGrad* instead of TokenReduce*, and not before}
// The shared expert's first stage runs while the first rows come in, its second stage while the
// last rows leave; where it does TokenReduce's work as well (fused_reduce_width) it
// waits for the exit barrier when its products are there.
//
// Inside a minibatch tiles are the outer loop and row blocks the inner one, so that a tile's
// weights stay in cache (GateUp, Down and InputGrad: in panels, see ProgramShape); token blocks of
// the shared expert are taken in groups of the size of a minibatch (its last stage, unless fused:
// of a panel). Exchanges go block by block.
//
// The queues are subsequences of this order. Invariants (tested):
//  - a task waits only for tasks that precede it in the merged order, so that any number of
//    workers >= 1 per queue, each taking the next task and finishing it, cannot deadlock;
//  - between the barriers no rank waits for another rank;
//  - a ring slot, and the carry buffer, is overwritten only after its last reader has signalled.
//
// ProgramView (program_view.h) is the plain form that device code uses; TaskProgram owns its
// arrays on the host. Both have the same functions.
#pragma once

#include <cstdint>
#include <vector>

#include "mok_core/status.h"
#include "mok_schedule/program_dependencies.h"
#include "mok_schedule/program_shape.h"
#include "mok_schedule/program_view.h"
#include "mok_schedule/routing_table.h"
#include "mok_schedule/task.h"

namespace mok {

class TaskProgram {
 public:
  // `table` must outlive the program and have shape.ring.num_row_blocks row blocks.
  // kInvalidArgument names the field of the shape that is out of its range.
  static StatusOr<TaskProgram> Create(const ProgramShape& shape, const RoutingTableView& table);

  // The view points into the program's arrays: moving keeps them in place, copying would not.
  TaskProgram(TaskProgram&&) = default;
  TaskProgram& operator=(TaskProgram&&) = default;
  TaskProgram(const TaskProgram&) = delete;
  TaskProgram& operator=(const TaskProgram&) = delete;

  const ProgramShape& shape() const { return view_.shape(); }
  const ProgramView& view() const { return view_; }

  // Number of tasks of a queue.
  int64_t NumTasks(Queue queue) const { return view_.NumTasks(queue); }
  // Task `index` of a queue, 0 <= index < NumTasks(queue).
  Task Decode(Queue queue, int64_t index) const { return view_.Decode(queue, index); }
  // What the task waits for and signals.
  Dependencies DependenciesOf(const Task& task) const { return mok::DependenciesOf(view_, task); }
  // Counters used by waits and signals: 0 .. NumCounters() - 1, all zero when the pass begins.
  int32_t NumCounters() const { return view_.NumCounters(); }
  // The rows of a WeightGradDown or WeightGradGateUp task.
  WeightGradPiece PieceOf(const Task& task) const { return view_.PieceOf(task); }
  // For messages and traces: which counter of which kind a counter index is.
  CounterName NameOfCounter(int32_t counter) const { return view_.NameOfCounter(counter); }

 private:
  TaskProgram() = default;

  std::vector<int32_t> piece_begin_;
  std::vector<int32_t> piece_expert_;
  std::vector<int32_t> carry_owner_;
  ProgramView view_;
};

}  // namespace mok
