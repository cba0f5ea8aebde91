// From a compute task of the program to the work of a block: which rows, weights and outputs.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/gemm_task.h"
#include "mok_megakernel/sm90/forward_params.h"
#include "mok_megakernel/sm90/pass_storage.h"

namespace mok {

// What a scheduler hands to the producer and the consumers of its block.
struct ForwardWork {
  enum class Kind : int32_t { kEnd, kGemm, kSwiGluGemm, kReduce };

  GemmTask gemm;  // kGemm, kSwiGluGemm
  Kind kind;
  int32_t first_token;  // kReduce
  int32_t num_tokens;   // kReduce: may be 0
  int32_t signal;       // counter to increment once the tile is stored; -1: none
  int32_t task_kind;    // for reports
  int64_t task;
};

namespace forward_internal {

// The operands of a tile of one of the four GEMMs.
struct TileOperands {
  const TensorMap* a;
  const TensorMap* b[2];
  int32_t a_row;
  int32_t rows;    // valid
  int32_t expert;  // of the weights
  int32_t width;   // columns of the whole output
  int32_t k;
};

// Fills what all kinds of tiles have in common. kHalves: gate and up; else one matrix.
template <class Gemm, bool kIsSwiGlu>
MOK_DEVICE void FillTile(const TileOperands& operands, int32_t tile, GemmTask& task) {
  constexpr int32_t kColumns = kIsSwiGlu ? Gemm::kHalfN : Gemm::kTileN;
  const int32_t column = tile * kColumns, rest = operands.width - column;
  const int32_t second = kIsSwiGlu ? column : column + Gemm::kHalfN;
  const WeightCoordinate first_half =
      WeightTileCoordinate(Gemm::kOrder, operands.expert, column, operands.width);
  const WeightCoordinate second_half =
      WeightTileCoordinate(Gemm::kOrder, operands.expert, second, operands.width);
  task.a = operands.a;
  task.b[0] = operands.b[0];
  task.b[1] = operands.b[1];
  task.a_row = operands.a_row;
  task.b_expert = first_half.expert;
  task.b_row[0] = first_half.row;
  task.b_row[1] = second_half.row;
  task.k_blocks = (operands.k + Gemm::kTileK - 1) / Gemm::kTileK;
  task.b_halves = kIsSwiGlu || rest > Gemm::kHalfN ? 2 : 1;
  task.rows = operands.rows;
  task.columns = rest < kColumns ? rest : kColumns;
  task.out_stride = operands.width;
}

// Outputs of a SwiGLU tile.
struct GateUpOutputs {
  BFloat16 *gate, *up, *h;
};

template <class Gemm>
MOK_DEVICE void FillGateUp(const TileOperands& operands, const GateUpOutputs& outputs, int32_t tile,
                           float limit, GemmTask& task) {
  FillTile<Gemm, true>(operands, tile, task);
  const int64_t offset = int64_t{operands.a_row} * operands.width + tile * Gemm::kHalfN;
  task.gate = outputs.gate + offset;
  task.up = outputs.up + offset;
  task.out = outputs.h + offset;
  task.swiglu_limit = limit;
}

template <class Gemm>
MOK_DEVICE void FillDown(const TileOperands& operands, BFloat16* y, int32_t tile, GemmTask& task) {
  FillTile<Gemm, false>(operands, tile, task);
  task.out = y + int64_t{operands.a_row} * operands.width + tile * Gemm::kTileN;
  task.gate = nullptr;
  task.up = nullptr;
  task.swiglu_limit = 0;
}

}  // namespace forward_internal

// Valid tokens of a token block.
MOK_DEVICE int32_t TokensInBlock(const ForwardParams& p, int32_t block) {
  const int64_t rest = p.shape.num_tokens - int64_t{block} * kRowBlock;
  return rest < kRowBlock ? static_cast<int32_t>(rest) : kRowBlock;
}

// Fills `work` for a task of the compute queue.
template <class Config>
MOK_DEVICE void FillWork(const ForwardParams& p, const ProgramView& program, const Task& task,
                         ForwardWork& work) {
  using namespace forward_internal;
  using Gemm = typename Config::Gemm;
  const ForwardParams::Shape& shape = p.shape;
  const bool is_routed = task.kind == TaskKind::kGateUp || task.kind == TaskKind::kDown;
  const int32_t slot =
      is_routed ? static_cast<int32_t>(program.shape().ring.slot_of_block(task.block)) : task.block;
  int32_t rows = kRowBlock;
  if (is_routed) {
    rows = program.table().rows_in_block(task.block);
  } else if (Config::kBug != PassBug::kWrongSharedRows) {
    rows = TokensInBlock(p, task.block);
  }
  const int32_t row = slot * kRowBlock;
  switch (task.kind) {
    case TaskKind::kGateUp:
      work.kind = ForwardWork::Kind::kSwiGluGemm;
      FillGateUp<Gemm>({&p.ring.x,
                        {&p.weights.gate, &p.weights.up},
                        row,
                        rows,
                        task.expert,
                        shape.intermediate,
                        shape.hidden},
                       {p.ring.gate, p.ring.up, p.ring.h}, task.tile, shape.swiglu_limit,
                       work.gemm);
      break;
    case TaskKind::kSharedGateUp:
      work.kind = ForwardWork::Kind::kSwiGluGemm;
      FillGateUp<Gemm>({&p.tokens.x,
                        {&p.weights.shared_gate, &p.weights.shared_up},
                        row,
                        rows,
                        0,
                        shape.shared_intermediate,
                        shape.hidden},
                       {p.shared.gate, p.shared.up, p.shared.h}, task.tile, shape.swiglu_limit,
                       work.gemm);
      break;
    case TaskKind::kDown:
      work.kind = ForwardWork::Kind::kGemm;
      FillDown<Gemm>({&p.ring.activation,
                      {&p.weights.down, &p.weights.down},
                      row,
                      rows,
                      task.expert,
                      shape.hidden,
                      shape.intermediate},
                     p.ring.y, task.tile, work.gemm);
      break;
    case TaskKind::kSharedDown:
      work.kind = ForwardWork::Kind::kGemm;
      FillDown<Gemm>({&p.shared.activation,
                      {&p.weights.shared_down, &p.weights.shared_down},
                      row,
                      rows,
                      0,
                      shape.hidden,
                      shape.shared_intermediate},
                     p.shared.y, task.tile, work.gemm);
      break;
    default: {  // kTokenReduce
      const int32_t per_tile = program.shape().tokens_per_reduce_tile();
      const int32_t rest = rows - task.tile * per_tile;
      work.kind = ForwardWork::Kind::kReduce;
      work.first_token = row + task.tile * per_tile;
      work.num_tokens = rest < 0 ? 0 : rest < per_tile ? rest : per_tile;
      break;
    }
  }
}

}  // namespace mok
