// What one output tile is made of. Plain data: a scheduler writes it, producer and consumers read
// it, usually through a TaskQueue in shared memory.
#pragma once

#include <cstdint>

#include "mok_core/device/types.h"
#include "mok_core/dtype.h"
#include "mok_core/macros.h"
#include "mok_gemm/sm90/gemm_config.h"

namespace mok {

// One tile of C = A B^T, fp32 accumulation over the k_blocks in ascending order.
//
// The B tile has two halves of Config::kHalfN columns. GateUp: columns [c, c + kHalfN) of Wg and
// the same columns of Wu, so that g and u of one column meet in one thread. Otherwise both halves
// come from one matrix, the second kHalfN columns after the first.
struct GemmTask {
  // Operands. The maps are built from ActivationMapSpec and WeightMapSpec (tensor_maps.h) and live
  // in the kernel's parameters.
  const TensorMap* a;     // [rows, K]
  const TensorMap* b[2];  // [experts, N, K], of each half
  int32_t a_row;          // first row of the tile in A
  int32_t b_expert;       // coordinates from WeightCoordinate
  int32_t b_row[2];       // first row of each half
  int32_t k_blocks;       // ceil(K / Config::kTileK), >= 1; what is beyond K reads as zero
  int32_t b_halves;       // 2; 1 for EpilogueStore with at most kHalfN columns: the second half is
                          // neither loaded nor multiplied
  int32_t rows;           // valid rows, 1 .. Config::kTileM; others are neither stored nor, where a
                          // whole warpgroup has none, loaded and multiplied
  int32_t columns;        // valid columns of an output, a multiple of 8: 1 .. Config::kTileN for
                          // EpilogueStore, 1 .. Config::kHalfN for EpilogueSwiGlu

  // Outputs: bf16, at the tile's first element, 16-byte aligned.
  float swiglu_limit;  // EpilogueSwiGlu: > 0, +infinity: no clamp
  int64_t out_stride;  // elements from row to row, of all outputs, a multiple of 8
  BFloat16* out;       // EpilogueStore: C; EpilogueSwiGlu: h = silu(g) * u
  BFloat16* gate;      // EpilogueSwiGlu: g
  BFloat16* up;        // EpilogueSwiGlu: u
};

// Whose the rows of a table are. Device memory, an entry for each row, padding included.
struct RowOwners {
  const int32_t* owner;
  const int32_t* index;  // which of its owner's rows
  int32_t own;           // the owner that OwnRows is about; that of padding is -1
};

// Where a tile stores those of its rows that are RowOwners::own: at their index in a matrix of
// their own, whose rows are as far apart as those of the tile's output.
struct OwnRows {
  int32_t table_row;  // of the tile's first row; -1: all rows go to the tile's output
  BFloat16* out;      // the tile's first column of row 0 of that matrix
};

// Where a half tile of B starts in its tensor map.
struct WeightCoordinate {
  int32_t expert, row;
};

// The coordinate of column `column` (a row of B; kPermuted: a multiple of 32) of an expert whose
// matrix has `width` of them. The permuted map has no room for an expert dimension: experts follow
// each other without a gap there, so that the tile's columns beyond `width` (never stored) come
// from the next expert instead of being zeros.
MOK_HOST_DEVICE constexpr WeightCoordinate WeightTileCoordinate(ColumnOrder order, int32_t expert,
                                                                int32_t column, int32_t width) {
  if (order == ColumnOrder::kNatural) return {expert, column};
  return {0, (expert * (width / 32)) + column / 32};
}

}  // namespace mok
