// Which rows and columns a task works on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "mok_core/dtype.h"
#include "mok_megakernel/pass_params.h"
#include "mok_schedule/task.h"

namespace mok {

// A row block in the table and in the ring.
struct BlockRows {
  int64_t table_row;  // first row in the routing table
  int64_t ring_row;   // first row in the ring
  int rows;           // valid ones, 1 .. kRowBlock
};

inline BlockRows RowsOfBlock(const PassParams& params, const Task& task) {
  return {int64_t{task.block} * kRowBlock,
          params.ring_plan.slot_of_block(task.block) * int64_t{kRowBlock},
          params.table.rows_in_block(task.block)};
}

// A contiguous range [begin, begin + count).
struct Range {
  int64_t begin;
  int count;
};

// Tile `index` of an extent cut into tiles of `tile`.
inline Range TileRange(int64_t index, int tile, int64_t extent) {
  const int64_t begin = index * tile;
  return {begin, static_cast<int>(std::min<int64_t>(tile, extent - begin))};
}

// Tokens of a TokenReduce task. Finer than token blocks: nothing else is left to do meanwhile, so
// the threads should finish together.
inline constexpr int kReduceTokens = 32;
inline Range TokensOfReduceTile(const PassParams& params, const Task& task) {
  const int64_t begin = int64_t{task.block} * kRowBlock + int64_t{task.tile} * kReduceTokens;
  const int64_t rest = std::max<int64_t>(0, params.shape.num_tokens - begin);
  return {begin, static_cast<int>(std::min<int64_t>(kReduceTokens, rest))};
}

// Where the forward is asked to: zeros to columns of a block's rows that hold no route.
inline void ClearSpareRows(const PassParams& params, const UntypedMatrix& matrix,
                           const BlockRows& block, const Range& columns) {
  if (!params.clear_spare_rows) return;
  const auto bytes = static_cast<size_t>(columns.count * ElementBytes(matrix.dtype));
  for (int row = block.rows; row < kRowBlock; ++row) {
    std::memset(matrix.At(block.ring_row + row, columns.begin), 0, bytes);
  }
}

// The tokens of a token block.
inline Range TokensOfBlock(const PassParams& params, const Task& task) {
  return TileRange(task.block, kRowBlock, params.shape.num_tokens);
}

// `y` and `y_rows` of a TokenReduceTile that begins at `first_route`.
inline const std::byte* FirstRow(const ReduceRows& rows, int64_t first_route, int64_t row_bytes) {
  return rows.stay_in_ring() ? rows.base : rows.base + first_route * row_bytes;
}
inline const int32_t* RowsOfRoutes(const ReduceRows& rows, int64_t first_route) {
  return rows.stay_in_ring() ? rows.row_of_route + first_route : nullptr;
}

}  // namespace mok
