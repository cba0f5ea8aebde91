#include "mok_schedule/testing/program_effects.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "mok_core/status.h"

namespace mok::testing {
namespace {

// The label of d_gate and d_up where g and u were labelled `label`.
int64_t GradientOf(int64_t label) { return label + (int64_t{1} << 32); }

}  // namespace

ProgramEffects::ProgramEffects(const TaskProgram& program)
    : program_(program), shape_(program.shape()) {
  const int64_t slots = shape_.ring.num_slots();
  const int64_t tokens = shape_.token_blocks;
  const int64_t experts = program.view().table().num_local_experts;
  const int64_t intermediate = shape_.intermediate_tiles;
  const int64_t hidden = shape_.hidden_tiles;
  const int64_t down_grad = shape_.down_grad_tiles;
  const int64_t shared_down_grad = shape_.shared_down_grad_tiles;
  // Cells that are tiles of both GateUp and DownGrad are parts of either.
  const int64_t shared_gate_up = shape_.shared_intermediate_tiles;
  const int64_t parts = intermediate * down_grad;
  const int64_t shared_parts = shared_gate_up * std::max<int64_t>(shared_down_grad, 1);
  const int64_t exchange = shape_.exchange_tiles;
  const int64_t gradient = shape_.weight_grad_tiles();
  const int64_t reductions =
      shape_.fuses_token_reduce() ? shape_.fused_reduce_tasks() : shape_.token_reduce_tiles;
  const int64_t shared_gradient =
      int64_t{shape_.shared_weight_grad_down_tiles} + shape_.shared_weight_grad_gate_up_tiles;
  const struct {
    int64_t rows, columns;
  } sizes[kNumBuffers] = {
      {1, 1},                                  // kInputs
      {shape_.ring.num_row_blocks, exchange},  // kSent
      {shape_.ring.num_row_blocks, hidden},    // kOwnRows
      {1, 1},                                  // kLanded
      {slots, exchange},                       // kX
      {slots, parts},                          // kGateUp
      {slots, intermediate},                   // kHidden
      {slots, hidden},                         // kY
      {slots, exchange},                       // kDOut
      {slots, parts},                          // kWeightedHidden
      {slots, down_grad},                      // kDRouter
      {shape_.d_x_slots(), hidden},            // kDX
      {1, gradient},                           // kCarry
      {experts, gradient},                     // kGradient
      {tokens, shared_parts},                  // kSharedGateUp
      {tokens, shared_gate_up},                // kSharedHidden
      {tokens, hidden},                        // kSharedY
      {tokens, shared_parts},                  // kSharedWeightedHidden
      {tokens, hidden},                        // kSharedDX
      {1, shared_gradient},                    // kSharedGradient
      {tokens, reductions},                    // kOutput
  };
  begin_[0] = 0;
  for (int i = 0; i < kNumBuffers; ++i) {
    rows_[i] = sizes[i].rows;
    columns_[i] = sizes[i].columns;
    begin_[i + 1] = begin_[i] + static_cast<int32_t>(rows_[i] * columns_[i]);
  }
}

std::string ProgramEffects::CellName(int32_t cell) const {
  static constexpr const char* kNames[kNumBuffers] = {"inputs",
                                                      "sent",
                                                      "own rows",
                                                      "landed",
                                                      "x",
                                                      "gate_up",
                                                      "hidden",
                                                      "y",
                                                      "d_out",
                                                      "weighted_hidden",
                                                      "d_router",
                                                      "d_x",
                                                      "carry",
                                                      "gradient",
                                                      "shared gate_up",
                                                      "shared hidden",
                                                      "shared y",
                                                      "shared weighted_hidden",
                                                      "shared d_x",
                                                      "shared gradient",
                                                      "output"};
  int buffer = 0;
  while (cell >= begin_[buffer + 1]) ++buffer;
  const int64_t offset = cell - begin_[buffer];
  return StrCat(kNames[buffer], "(", offset / columns_[buffer], ", ", offset % columns_[buffer],
                ")");
}

Access ProgramEffects::Cell(Buffer buffer, int64_t row, int64_t column, int64_t label) const {
  const int index = static_cast<int>(buffer);
  MOK_CHECK(row >= 0 && row < rows_[index] && column >= 0 && column < columns_[index])
      << "buffer " << index << " has no cell " << row << ", " << column;
  return {static_cast<int32_t>(begin_[index] + row * columns_[index] + column), label};
}

void ProgramEffects::Append(std::vector<Access>& list, Buffer buffer, int64_t row,
                            int64_t label) const {
  for (int64_t column = 0; column < columns_[static_cast<int>(buffer)]; ++column) {
    list.push_back(Cell(buffer, row, column, label));
  }
}

void ProgramEffects::AppendPart(std::vector<Access>& list, Buffer buffer, const Part& part,
                                int64_t label) const {
  const int64_t columns = columns_[static_cast<int>(buffer)] / part.parts;
  for (int64_t i = 0; i < columns; ++i) {
    list.push_back(Cell(buffer, part.row, part.index * columns + i, label));
  }
}

std::vector<int64_t> ProgramEffects::InitialLabels() const {
  std::vector<int64_t> labels(num_cells(), kNoData);
  if (shape_.pass == Pass::kForward || shape_.kept_macrobatches == 0) return labels;
  std::vector<Access> kept;
  for (int64_t block = 0; block < shape_.ring.num_slots(); ++block) {
    Append(kept, Buffer::kX, block, block);
    Append(kept, Buffer::kGateUp, block, block);
  }
  if (shape_.has_shared_expert()) {
    for (int64_t block = 0; block < shape_.token_blocks; ++block) {
      Append(kept, Buffer::kSharedGateUp, block, 0);
    }
  }
  for (const Access& access : kept) labels[access.cell] = access.label;
  return labels;
}

std::vector<Access> ProgramEffects::FinalLabels() const {
  std::vector<Access> labels;
  for (int64_t block = 0; block < shape_.ring.num_row_blocks; ++block) {
    Append(labels, Buffer::kSent, block, block);
  }
  for (int64_t block = 0; block < shape_.token_blocks; ++block) {
    Append(labels, Buffer::kOutput, block, 0);
  }
  if (shape_.pass == Pass::kForward) {
    for (int64_t block = 0; block < shape_.ring.num_slots(); ++block) {
      Append(labels, Buffer::kX, block, block);
      Append(labels, Buffer::kGateUp, block, block);
    }
    if (!shape_.has_shared_expert()) return labels;
    for (int64_t block = 0; block < shape_.token_blocks; ++block) {
      Append(labels, Buffer::kSharedGateUp, block, 0);
    }
    return labels;
  }
  for (int64_t expert = 0; expert < rows_[static_cast<int>(Buffer::kGradient)]; ++expert) {
    Append(labels, Buffer::kGradient, expert, 0);
  }
  Append(labels, Buffer::kSharedGradient, 0, 0);
  return labels;
}

Effects ProgramEffects::Of(const Task& task) const {
  Effects effects;
  AddForward(task, effects);
  AddBackward(task, effects);
  AddWeightGrad(task, effects);
  AddShared(task, effects);
  AddPassWide(task, effects);
  MOK_CHECK(!effects.writes.empty()) << TaskKindName(task.kind) << " has no effect";
  return effects;
}

void ProgramEffects::AddForward(const Task& task, Effects& effects) const {
  const int64_t block = task.block;
  const int64_t slot = shape_.ring.slot_of_block(block);
  switch (task.kind) {
    case TaskKind::kDispatch:
    case TaskKind::kRecomputeDispatch:
      Append(effects.reads, Buffer::kInputs, 0, 0);
      effects.writes = {Cell(Buffer::kX, slot, task.tile, block)};
      break;
    case TaskKind::kGateUp:
    case TaskKind::kRecomputeGateUp: {
      // The backward has no use for h; an implementation may drop it where weighted_h comes next.
      const bool forward = task.kind == TaskKind::kGateUp;
      const Part tile = {slot, task.tile, shape_.intermediate_tiles};
      Append(effects.reads, Buffer::kX, slot, block);
      AppendPart(effects.writes, Buffer::kGateUp, tile, block);
      AppendPart(effects.writes, forward ? Buffer::kHidden : Buffer::kWeightedHidden, tile, block);
      break;
    }
    case TaskKind::kDown:
      Append(effects.reads, Buffer::kHidden, slot, block);
      effects.writes = {Cell(Buffer::kY, slot, task.tile, block),
                        Cell(Buffer::kOwnRows, block, task.tile, block)};
      break;
    case TaskKind::kCombine:
      Append(effects.reads, Buffer::kY, slot, block);
      effects.writes = {Cell(Buffer::kSent, block, task.tile, block)};
      break;
    default:
      break;
  }
}

void ProgramEffects::AddBackward(const Task& task, Effects& effects) const {
  const int64_t block = task.block;
  const int64_t slot = shape_.ring.slot_of_block(block);
  switch (task.kind) {
    case TaskKind::kReverseCombine:
      Append(effects.reads, Buffer::kInputs, 0, 0);
      effects.writes = {Cell(Buffer::kDOut, slot, task.tile, block)};
      break;
    case TaskKind::kDownGrad: {
      const Part tile = {slot, task.tile, shape_.down_grad_tiles};
      Append(effects.reads, Buffer::kDOut, slot, block);
      AppendPart(effects.reads, Buffer::kGateUp, tile, block);
      AppendPart(effects.writes, Buffer::kGateUp, tile, GradientOf(block));
      AppendPart(effects.writes, Buffer::kWeightedHidden, tile, block);
      AppendPart(effects.writes, Buffer::kDRouter, tile, block);
      break;
    }
    case TaskKind::kInputGrad:
      Append(effects.reads, Buffer::kGateUp, slot, GradientOf(block));
      effects.writes = {Cell(Buffer::kDX, block % shape_.d_x_slots(), task.tile, block),
                        Cell(Buffer::kOwnRows, block, task.tile, block)};
      break;
    case TaskKind::kReverseDispatch:
      Append(effects.reads, Buffer::kDX, block % shape_.d_x_slots(), block);
      Append(effects.reads, Buffer::kDRouter, slot, block);
      effects.writes = {Cell(Buffer::kSent, block, task.tile, block)};
      break;
    default:
      break;
  }
}

// Partial sums carry the label of their expert and the last macrobatch that is in them.
void ProgramEffects::AddWeightGrad(const Task& task, Effects& effects) const {
  const bool down = task.kind == TaskKind::kWeightGradDown;
  if (!down && task.kind != TaskKind::kWeightGradGateUp) return;
  const int64_t tile = down ? task.tile : shape_.weight_grad_down_tiles + task.tile;
  const WeightGradPiece piece = program_.PieceOf(task);
  for (int64_t i = 0; i < piece.num_blocks; ++i) {
    const int64_t block = piece.first_block + i;
    const int64_t slot = shape_.ring.slot_of_block(block);
    if (down) {
      Append(effects.reads, Buffer::kDOut, slot, block);
      Append(effects.reads, Buffer::kWeightedHidden, slot, block);
    } else {
      Append(effects.reads, Buffer::kGateUp, slot, GradientOf(block));
      Append(effects.reads, Buffer::kX, slot, block);
    }
  }
  const auto carry_label = [&](int64_t macrobatch) {
    return task.expert * (shape_.ring.num_macrobatches() + 1) + macrobatch;
  };
  if (piece.carry_in) {
    effects.reads.push_back(Cell(Buffer::kCarry, 0, tile, carry_label(task.macrobatch - 1)));
  }
  effects.writes = {piece.carry_out ? Cell(Buffer::kCarry, 0, tile, carry_label(task.macrobatch))
                                    : Cell(Buffer::kGradient, task.expert, tile, 0)};
}

void ProgramEffects::AddShared(const Task& task, Effects& effects) const {
  switch (task.kind) {
    case TaskKind::kSharedGateUp:
    case TaskKind::kSharedRecomputeGateUp: {
      const bool forward = task.kind == TaskKind::kSharedGateUp;
      const Part tile = {task.block, task.tile, shape_.shared_intermediate_tiles};
      AppendPart(effects.writes, Buffer::kSharedGateUp, tile, 0);
      AppendPart(effects.writes, forward ? Buffer::kSharedHidden : Buffer::kSharedWeightedHidden,
                 tile, 0);
      break;
    }
    case TaskKind::kSharedDown:
      Append(effects.reads, Buffer::kSharedHidden, task.block, 0);
      AddLastShared(task, Buffer::kSharedY, effects);
      break;
    case TaskKind::kSharedDownGrad: {
      const Part tile = {task.block, task.tile, shape_.shared_down_grad_tiles};
      AppendPart(effects.reads, Buffer::kSharedGateUp, tile, 0);
      AppendPart(effects.writes, Buffer::kSharedGateUp, tile, GradientOf(0));
      AppendPart(effects.writes, Buffer::kSharedWeightedHidden, tile, 0);
      break;
    }
    case TaskKind::kSharedInputGrad:
      Append(effects.reads, Buffer::kSharedGateUp, task.block, GradientOf(0));
      AddLastShared(task, Buffer::kSharedDX, effects);
      break;
    case TaskKind::kSharedWeightGradDown:
    case TaskKind::kSharedWeightGradGateUp: {
      const bool down = task.kind == TaskKind::kSharedWeightGradDown;
      for (int64_t block = 0; block < shape_.token_blocks; ++block) {
        if (down) {
          Append(effects.reads, Buffer::kSharedWeightedHidden, block, 0);
        } else {
          Append(effects.reads, Buffer::kSharedGateUp, block, GradientOf(0));
        }
      }
      const int64_t tile = down ? task.tile : shape_.shared_weight_grad_down_tiles + task.tile;
      effects.writes = {Cell(Buffer::kSharedGradient, 0, tile, 0)};
      break;
    }
    default:
      break;
  }
}

void ProgramEffects::AddLastShared(const Task& task, Buffer rows, Effects& effects) const {
  const bool is_fused = shape_.fuses_token_reduce();
  effects.writes = {Cell(is_fused ? Buffer::kOutput : rows, task.block, task.tile, 0)};
  if (is_fused) Append(effects.late_reads, Buffer::kLanded, 0, 0);
}

void ProgramEffects::AddPassWide(const Task& task, Effects& effects) const {
  switch (task.kind) {
    case TaskKind::kEntryBarrier:
      effects.writes = {Cell(Buffer::kInputs, 0, 0, 0)};
      break;
    case TaskKind::kExitBarrier:
      Append(effects.reads, Buffer::kInputs, 0, 0);  // the barriers' epochs follow each other
      for (int64_t block = 0; block < shape_.ring.num_row_blocks; ++block) {
        Append(effects.reads, Buffer::kSent, block, block);
        Append(effects.reads, Buffer::kOwnRows, block, block);
      }
      effects.writes = {Cell(Buffer::kLanded, 0, 0, 0)};
      break;
    case TaskKind::kTokenReduce:
      Append(effects.reads, Buffer::kLanded, 0, 0);
      if (shape_.has_shared_expert()) {
        Append(effects.reads, shape_.pass == Pass::kForward ? Buffer::kSharedY : Buffer::kSharedDX,
               task.block, 0);
      }
      effects.writes = {Cell(Buffer::kOutput, task.block, task.tile, 0)};
      break;
    default:
      break;
  }
}

}  // namespace mok::testing
