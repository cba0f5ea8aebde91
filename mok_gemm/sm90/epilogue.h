// Epilogues: from the accumulators of a consumer warpgroup straight to global memory, 16 bytes per
// thread and store. There is no room for an output tile in shared memory beside four stages.
//
// All 128 threads of the warpgroup call, after GemmConsumer::MainLoop returned true. Rows at and
// beyond task.rows and columns at and beyond task.columns are not written.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/gemm_config.h"
#include "mok_gemm/sm90/gemm_task.h"
#include "mok_gemm/sm90/swiglu.h"

namespace mok {

namespace gemm_internal {

// 4 x 4 transpose of words over the lanes of a quad: lane q gets word q of lanes 0 .. 3.
MOK_DEVICE Word4 QuadTranspose(const uint32_t (&words)[4]) {
  const bool odd = (ThreadIndex().x & 1) != 0, upper = (ThreadIndex().x & 2) != 0;
  // Blocks of 2 x 2 first, then inside the blocks.
  const uint32_t keep0 = upper ? words[2] : words[0], keep1 = upper ? words[3] : words[1];
  const uint32_t come0 = ShuffleXor(upper ? words[0] : words[2], 2);
  const uint32_t come1 = ShuffleXor(upper ? words[1] : words[3], 2);
  const uint32_t cross_keep = ShuffleXor(odd ? keep0 : keep1, 1);
  const uint32_t cross_come = ShuffleXor(odd ? come0 : come1, 1);
  const uint32_t own_keep = odd ? keep1 : keep0, own_come = odd ? come1 : come0;
  const uint32_t near0 = odd ? cross_keep : own_keep, near1 = odd ? own_keep : cross_keep;
  const uint32_t far0 = odd ? cross_come : own_come, far1 = odd ? own_come : cross_come;
  return upper ? Word4{far0, far1, near0, near1} : Word4{near0, near1, far0, far1};
}

// The 8 adjacent columns that a lane stores of 32: words in, in the order of its accumulators.
template <class Config>
MOK_DEVICE Word4 AdjacentColumns(const uint32_t (&words)[4]) {
  constexpr bool kNoTranspose =
      (Config::kOrder == ColumnOrder::kPermuted && Config::kBug != GemmBug::kWrongColumnOrder) ||
      (Config::kOrder == ColumnOrder::kNatural &&
       (Config::kBug == GemmBug::kNoQuadTranspose || Config::kBug == GemmBug::kWrongColumnOrder));
  if constexpr (kNoTranspose) {
    return {words[0], words[1], words[2], words[3]};
  } else {
    return QuadTranspose(words);
  }
}

// The accumulators of 32 columns and one row of a fragment, rounded: word j holds columns
// 8 j + 2 (lane % 4) and the next.
template <int kRegisters>
MOK_DEVICE void PackColumns(const float (&accumulator)[kRegisters], int first, int half,
                            uint32_t (&words)[4]) {
  MOK_UNROLL
  for (int j = 0; j < 4; ++j) {
    const int i = first + 4 * j + 2 * half;
    words[j] = PackBFloat16(accumulator[i], accumulator[i + 1]);
  }
}

// Which part of the tile a thread stores: rows row and row + 8, columns column + 32 g + (0 .. 7).
struct StorePlace {
  int row, column;
  MOK_DEVICE StorePlace() : StorePlace(ThreadIndex().x) {}
  explicit MOK_DEVICE StorePlace(uint32_t thread) {
    const int lane = static_cast<int>(thread) % 32;
    row = static_cast<int>(thread) / 32 * 16 + lane / 4;  // 4 warps of 16 rows per warpgroup
    column = lane % 4 * 8;
  }
};

template <class Config>
struct ValidPart {
  int rows, columns;
  explicit MOK_DEVICE ValidPart(const GemmTask& task)
      : rows(Config::kBug == GemmBug::kStoresPaddingRows ? Config::kTileM : task.rows),
        columns(Config::kBug == GemmBug::kStoresTailColumns ? Config::kTileN : task.columns) {}
  MOK_DEVICE bool Contains(int row, int column) const { return row < rows && column < columns; }
};

MOK_DEVICE void Store8(BFloat16* base, int64_t offset, Word4 value) {
  StoreVector(reinterpret_cast<Word4*>(base + offset), value);
}
// For what the forward does not read again: it leaves L2 first.
MOK_DEVICE void StoreStreaming8(BFloat16* base, int64_t offset, Word4 value) {
  StoreVectorStreaming(reinterpret_cast<Word4*>(base + offset), value);
}

}  // namespace gemm_internal

// The two rows of a tile that the calling thread stores, the second one eight below the first: the
// tile's first column of each.
struct StoredRows {
  BFloat16* row[2];
};

// The first of them in the tile. (A thread that asks for its index where it needs it, in
// ThreadIndexReadHere, keeps no register for it: the backward has none to spare.)
MOK_DEVICE int StoredRow() { return gemm_internal::StorePlace().row; }

// In a matrix. out: the tile's first element; row: StoredRow().
MOK_DEVICE StoredRows RowsOfMatrix(BFloat16* out, int64_t stride, int row) {
  BFloat16* const first = out + row * stride;
  return {{first, first + 8 * stride}};
}

// The owners of the two rows. Made before the main loop, which hides the loads: nothing looks at
// what they bring until Place.
class OwnersOfRows {
 public:
  MOK_DEVICE OwnersOfRows() {}
  MOK_DEVICE OwnersOfRows(const RowOwners& owners, const OwnRows& own_rows, int row) {
    if (own_rows.table_row < 0) return;
    const int32_t first = own_rows.table_row + row;
    MOK_UNROLL
    for (int half = 0; half < 2; ++half) {
      owner_[half] = LoadNonCoherent(owners.owner + first + 8 * half);
      index_[half] = LoadNonCoherent(owners.index + first + 8 * half);
    }
  }

  // `rows`, but for those that are own.
  MOK_DEVICE StoredRows Place(StoredRows rows, const RowOwners& owners, const OwnRows& own_rows,
                              int64_t stride) const {
    MOK_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (owner_[half] != owners.own) continue;
      rows.row[half] = own_rows.out + index_[half] * stride;
    }
    return rows;
  }

 private:
  int32_t owner_[2] = {-1, -1}, index_[2] = {};
};

namespace gemm_internal {

// The first 32 * kGroups columns of C.
template <class Config, int kGroups>
MOK_DEVICE void StoreColumns(const GemmTask& task, const StoredRows& rows,
                             const float (&accumulator)[Config::kAccumulators]) {
  const StorePlace place;
  const ValidPart<Config> valid(task);
  MOK_UNROLL
  for (int group = 0; group < kGroups; ++group) {
    MOK_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      PackColumns(accumulator, 16 * group, half, words);
      const Word4 value = AdjacentColumns<Config>(words);
      if (valid.Contains(place.row + 8 * half, place.column + 32 * group)) {
        Store8(rows.row[half], place.column + 32 * group, value);
      }
    }
  }
}

}  // namespace gemm_internal

// C, rounded to bf16, its rows wherever the caller wants each of them.
template <class Config>
MOK_DEVICE void EpilogueStore(const GemmTask& task, const StoredRows& rows,
                              const float (&accumulator)[Config::kAccumulators]) {
  if (task.b_halves == 1) {
    gemm_internal::StoreColumns<Config, Config::kHalfN / 32>(task, rows, accumulator);
  } else {
    gemm_internal::StoreColumns<Config, Config::kTileN / 32>(task, rows, accumulator);
  }
}

// C, rounded to bf16.
template <class Config>
MOK_DEVICE void EpilogueStore(const GemmTask& task,
                              const float (&accumulator)[Config::kAccumulators]) {
  EpilogueStore<Config>(task, RowsOfMatrix(task.out, task.out_stride, StoredRow()), accumulator);
}

// g and u, rounded to bf16, and h = silu(g) * u from the rounded values.
template <class Config>
MOK_DEVICE void EpilogueSwiGlu(const GemmTask& task,
                               const float (&accumulator)[Config::kAccumulators]) {
  using namespace gemm_internal;
  const StorePlace place;
  const ValidPart<Config> valid(task);
  const int64_t stride = task.out_stride, start = place.row * stride + place.column;
  BFloat16 *const gate_out = task.gate + start, *const up_out = task.up + start;
  BFloat16* const hidden_out = task.out + start;
  const float limit = task.swiglu_limit;
  MOK_UNROLL
  for (int group = 0; group < Config::kHalfN / 32; ++group) {
    MOK_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t gate[4], up[4], hidden[4];
      PackColumns(accumulator, 16 * group, half, gate);
      PackColumns(accumulator, Config::kAccumulators / 2 + 16 * group, half, up);
      MOK_UNROLL
      for (int j = 0; j < 4; ++j) hidden[j] = SwiGluPacked(gate[j], up[j], limit);
      const Word4 g = AdjacentColumns<Config>(gate), u = AdjacentColumns<Config>(up);
      const Word4 h = AdjacentColumns<Config>(hidden);
      if (valid.Contains(place.row + 8 * half, place.column + 32 * group)) {
        const int64_t offset = 8 * half * stride + 32 * group;
        StoreStreaming8(gate_out, offset, g);
        StoreStreaming8(up_out, offset, u);
        Store8(hidden_out, offset, h);
      }
    }
  }
}

}  // namespace mok
