#include "mok_schedule/task_program.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "mok_core/argument_checks.h"
#include "mok_core/status.h"

namespace mok {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Parts into which the rows of a block can be split equally.
Status CheckParts(const char* field, int64_t value) {
  if (value >= 1 && value <= kRowBlock && kRowBlock % value == 0) return OkStatus();
  return InvalidArgumentError("ProgramShape.", field, ": expected a divisor of ", kRowBlock,
                              ", got ", value);
}

Status CheckShape(const ProgramShape& shape, const RoutingTableView& table) {
  MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.ring.num_row_blocks", shape.ring.num_row_blocks, 0,
                                 kMaxInt32 / kRowBlock));
  MOK_RETURN_IF_ERROR(
      CheckRange("ProgramShape.ring.minibatch_blocks", shape.ring.minibatch_blocks, 1, kMaxInt32));
  MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.ring.macrobatch_blocks",
                                 shape.ring.macrobatch_blocks, 1, kMaxInt32));
  MOK_RETURN_IF_ERROR(
      CheckRange("ProgramShape.intermediate_tiles", shape.intermediate_tiles, 1, kMaxInt32));
  MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.hidden_tiles", shape.hidden_tiles, 1, kMaxInt32));
  MOK_RETURN_IF_ERROR(
      CheckRange("ProgramShape.output_panel_blocks", shape.output_panel_blocks, 0, kMaxInt32));
  MOK_RETURN_IF_ERROR(
      CheckRange("ProgramShape.gate_up_panel_blocks", shape.gate_up_panel_blocks, 0, kMaxInt32));
  MOK_RETURN_IF_ERROR(CheckParts("exchange_tiles", shape.exchange_tiles));
  MOK_RETURN_IF_ERROR(CheckParts("token_reduce_tiles", shape.token_reduce_tiles));
  MOK_RETURN_IF_ERROR(
      CheckRange("ProgramShape.token_blocks", shape.token_blocks, 0, kMaxInt32 / kRowBlock));
  MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.shared_intermediate_tiles",
                                 shape.shared_intermediate_tiles, 0, kMaxInt32));
  MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.kept_macrobatches", shape.kept_macrobatches, 0, 1));
  MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.fused_reduce_width", shape.fused_reduce_width, 0,
                                 shape.has_shared_expert() ? kMaxInt32 : 0));
  if (shape.pass == Pass::kBackward) {
    MOK_RETURN_IF_ERROR(
        CheckRange("ProgramShape.down_grad_tiles", shape.down_grad_tiles, 1, kMaxInt32));
    // Without them nothing would tell when the rows they read may be overwritten.
    MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.weight_grad_down_tiles",
                                   shape.weight_grad_down_tiles, 1, kMaxInt32));
    MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.weight_grad_gate_up_tiles",
                                   shape.weight_grad_gate_up_tiles, 1, kMaxInt32));
    // InputGrad would wait for rows that are sent after it.
    const int64_t window = std::min(shape.ring.minibatch_blocks, shape.ring.macrobatch_blocks);
    if (shape.d_x_window_blocks != 0) {
      MOK_RETURN_IF_ERROR(
          CheckRange("ProgramShape.d_x_window_blocks", shape.d_x_window_blocks, window, kMaxInt32));
    }
    const int64_t smallest = shape.has_shared_expert() ? 1 : 0;
    const int64_t largest = shape.has_shared_expert() ? kMaxInt32 : 0;
    MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.shared_down_grad_tiles",
                                   shape.shared_down_grad_tiles, smallest, largest));
    MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.shared_weight_grad_down_tiles",
                                   shape.shared_weight_grad_down_tiles, smallest, largest));
    MOK_RETURN_IF_ERROR(CheckRange("ProgramShape.shared_weight_grad_gate_up_tiles",
                                   shape.shared_weight_grad_gate_up_tiles, smallest, largest));
  }
  if (shape.ring.num_row_blocks != table.num_row_blocks()) {
    return InvalidArgumentError("ProgramShape.ring.num_row_blocks: expected ",
                                table.num_row_blocks(), ", the row blocks of the table, got ",
                                shape.ring.num_row_blocks);
  }
  return OkStatus();
}

}  // namespace

StatusOr<TaskProgram> TaskProgram::Create(const ProgramShape& shape,
                                          const RoutingTableView& table) {
  MOK_RETURN_IF_ERROR(CheckShape(shape, table));
  TaskProgram program;
  const int64_t num_macrobatches = shape.ring.num_macrobatches();
  program.piece_begin_.resize(num_macrobatches + 2);
  program.piece_expert_.resize(table.num_local_experts + num_macrobatches);
  program.carry_owner_.resize(num_macrobatches + 1);
  const PieceTables pieces = {program.piece_begin_.data(), program.piece_expert_.data(),
                              program.carry_owner_.data()};
  BuildPieceTables(shape.ring, table, pieces);
  program.view_ = ProgramView(shape, table, pieces);
  return program;
}

const char* TaskKindName(TaskKind kind) {
  static constexpr const char* kNames[kNumTaskKinds] = {"EntryBarrier",
                                                        "ExitBarrier",
                                                        "Dispatch",
                                                        "Combine",
                                                        "GateUp",
                                                        "Down",
                                                        "TokenReduce",
                                                        "SharedGateUp",
                                                        "SharedDown",
                                                        "RecomputeDispatch",
                                                        "ReverseCombine",
                                                        "ReverseDispatch",
                                                        "RecomputeGateUp",
                                                        "DownGrad",
                                                        "InputGrad",
                                                        "WeightGradDown",
                                                        "WeightGradGateUp",
                                                        "SharedRecomputeGateUp",
                                                        "SharedDownGrad",
                                                        "SharedInputGrad",
                                                        "SharedWeightGradDown",
                                                        "SharedWeightGradGateUp"};
  const int index = static_cast<int>(kind);
  return index >= 0 && index < kNumTaskKinds ? kNames[index] : "Unknown";
}

const char* CounterFamilyName(CounterFamily family) {
  static constexpr const char* kNames[kNumCounterFamilies] = {"Entry",
                                                              "Exit",
                                                              "Sent",
                                                              "Dispatched",
                                                              "GateUpDone",
                                                              "DownDone",
                                                              "Combined",
                                                              "RecomputeDispatched",
                                                              "RecomputeDone",
                                                              "ReverseCombined",
                                                              "DownGradDone",
                                                              "InputGradDone",
                                                              "ReverseDispatched",
                                                              "SharedGateUpDone",
                                                              "SharedDownDone",
                                                              "SharedDownGradDone",
                                                              "SharedInputGradDone",
                                                              "WeightGradDone"};
  const int index = static_cast<int>(family);
  return index >= 0 && index < kNumCounterFamilies ? kNames[index] : "Unknown";
}

}  // namespace mok
