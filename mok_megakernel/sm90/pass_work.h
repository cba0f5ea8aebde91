// From compute tasks of either pass to the work of a block: what both passes have in common.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/backward_task.h"
#include "mok_gemm/sm90/gemm_task.h"
#include "mok_megakernel/sm90/pass_params.h"
#include "mok_schedule/program_view.h"

namespace mok {

namespace pass_internal {

// The operands of a tile of one of the forward's GEMMs.
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

// Makes a tile of one matrix the one to its right, of which `rest` columns and more are valid.
template <class Gemm>
MOK_DEVICE void MoveRight(int32_t rest, GemmTask& task) {
  const WeightCoordinate step = WeightTileCoordinate(Gemm::kOrder, 0, Gemm::kTileN, 0);
  task.b_row[0] += step.row;
  task.b_row[1] += step.row;
  task.b_halves = rest > Gemm::kHalfN ? 2 : 1;
  task.columns = rest < Gemm::kTileN ? rest : Gemm::kTileN;
}

// Likewise for a tile of the backward.
template <class Gemm>
MOK_DEVICE void MoveRight(int32_t rest, ProductTile& tile) {
  tile.b_column += Gemm::kTileN;
  tile.b_halves = rest > Gemm::kHalfN ? 2 : 1;
  tile.columns = rest < Gemm::kTileN ? rest : Gemm::kTileN;
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

}  // namespace pass_internal

// Where the rows of a task's block lie: in the ring for row blocks of the table, else among the
// rank's tokens.
struct BlockPlace {
  int32_t row, rows;  // valid rows
};
MOK_DEVICE BlockPlace PlaceInRing(const ProgramView& program, int32_t block) {
  const auto slots = static_cast<uint32_t>(program.shape().ring.macrobatch_blocks);
  const auto slot = static_cast<int32_t>(static_cast<uint32_t>(block) % slots);
  return {slot * kRowBlock, program.table().rows_in_block(block)};
}
MOK_DEVICE BlockPlace PlaceOfTokens(int64_t num_tokens, int32_t block) {
  const int64_t rest = num_tokens - int64_t{block} * kRowBlock;
  return {block * kRowBlock, rest < kRowBlock ? static_cast<int32_t>(rest) : kRowBlock};
}

// A part of the output whose tiles sum the routes themselves (ProgramShape::fused_reduce_width).
// Its rows are tokens.
struct ReduceTile {
  int32_t token, column;  // of its first element
  int32_t rows, columns;  // valid
};

// Rows of the table whose tokens are this rank's own need no exchange: Down and InputGrad store
// them where TokenReduce reads them, and not where the push finds its rows (`skips_own_rank`).
MOK_DEVICE RowOwners RowOwnersOf(const RowExchange& push) {
  return {push.sources.rank, push.sources.route, push.own_rank};
}
template <class Config>
MOK_DEVICE OwnRows OwnRowsOf(const RowExchange& push, bool is_routed, int32_t block, int32_t tile) {
  const bool has_own = is_routed && push.skips_own_rank && Config::kBug != PassBug::kOwnRowsInRing;
  auto* const routes = reinterpret_cast<BFloat16*>(push.peers.of_rank[push.own_rank]);
  return {has_own ? block * kRowBlock : -1, routes + tile * Config::Gemm::kTileN};
}

// The tokens of a TokenReduce task; there may be none.
struct TokenRange {
  int32_t first, count;
};
MOK_DEVICE TokenRange TokensOfTask(const ProgramShape& shape, int64_t num_tokens,
                                   const Task& task) {
  const BlockPlace place = PlaceOfTokens(num_tokens, task.block);
  const int32_t per_tile = shape.tokens_per_reduce_tile();
  const int32_t begin = task.tile * per_tile, rest = place.rows - begin;
  return {place.row + begin, rest < 0 ? 0 : rest < per_tile ? rest : per_tile};
}

}  // namespace mok
