// Epilogues of the backward's products that work on the accumulators alone: InputGrad's and weight
// gradients'. DownGrad's also reads pipeline stages and is part of BackwardConsumer.
//
// All 128 threads of a warpgroup call. kN: how many columns of the tile were multiplied; an
// accumulator is the fragment of wgmma m64nNk16 with columns in natural order. Rows and columns
// beyond the valid ones are neither read nor written.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/backward_task.h"
#include "mok_gemm/sm90/epilogue.h"

namespace mok {

namespace gemm_internal {

template <class Config>
struct ValidProduct {
  int rows, columns;
  explicit MOK_DEVICE ValidProduct(const ProductTile& tile)
      : rows(Config::kBackwardBug == BackwardBug::kStoresPaddingRows ? Config::kTileM : tile.rows),
        columns(Config::kBackwardBug == BackwardBug::kStoresTailColumns ? Config::kTileN
                                                                        : tile.columns) {}
  MOK_DEVICE bool Contains(int row, int column) const { return row < rows && column < columns; }
};

// From the words of a fragment to 8 adjacent columns, and back.
template <class Config>
MOK_DEVICE Word4 TransposeColumns(const uint32_t (&words)[4]) {
  if (Config::kBackwardBug == BackwardBug::kNoQuadTranspose) {
    return {words[0], words[1], words[2], words[3]};
  }
  return QuadTranspose(words);
}

// Moves the accumulators of all columns but the first 64 down by 64 columns: a loop whose body
// works on the first registers, which have to be indexed by constants, reaches all of them.
template <int kRegisters>
MOK_DEVICE void NextColumns(float (&accumulator)[kRegisters]) {
  constexpr int kStep = 64 / 2;
  MOK_UNROLL
  for (int i = 0; i + kStep < kRegisters; ++i) accumulator[i] = accumulator[i + kStep];
}

// How many of `count` items an epilogue takes at once, `most` if there are as many.
constexpr int BatchOf(int count, int most) {
  const int batch = count < most ? count : most;
  return count % batch == 0 ? batch : 1;
}

MOK_DEVICE Word4 LoadColumns(const BFloat16* matrix, int64_t offset) {
  return LoadVector(reinterpret_cast<const Word4*>(matrix + offset));
}

// Rounds kN columns to bf16 and stores them; kStreams: nobody reads them soon. All exchanges
// between lanes of 64 columns come before their stores, so that latencies overlap, and a row's
// address is there before, so that a store is one predicated instruction.
template <class Config, int kN, bool kStreams>
MOK_DEVICE void StoreRounded(const ProductTile& tile, const StoredRows& stored,
                             const float (&accumulator)[kN / 2]) {
  constexpr int kBatch = BatchOf(kN / 32, 2);  // groups of 32 columns
  const StorePlace place(ThreadIndexReadHere());
  const ValidProduct<Config> valid(tile);
  BFloat16* const rows[2] = {stored.row[0] + place.column, stored.row[1] + place.column};
  // Valid columns from the thread's first one on.
  const int columns = valid.columns - place.column;
  const int columns_of[2] = {place.row < valid.rows ? columns : 0,
                             place.row + 8 < valid.rows ? columns : 0};
  MOK_UNROLL
  for (int first = 0; first < kN / 32; first += kBatch) {
    Word4 values[kBatch][2];
    MOK_UNROLL
    for (int i = 0; i < 2 * kBatch; ++i) {
      uint32_t words[4];
      PackColumns(accumulator, 16 * (first + i / 2), i % 2, words);
      values[i / 2][i % 2] = TransposeColumns<Config>(words);
    }
    MOK_UNROLL
    for (int i = 0; i < 2 * kBatch; ++i) {
      const int offset = 32 * (first + i / 2), half = i % 2;
      if (offset >= columns_of[half]) continue;
      if constexpr (kStreams) {
        StoreStreaming8(rows[half], offset, values[i / 2][half]);
      } else {
        Store8(rows[half], offset, values[i / 2][half]);
      }
    }
  }
}

// accumulator += the bf16 matrix. Loads of 128 columns are in flight at once.
template <class Config, int kN>
MOK_DEVICE void AddRounded(const ProductTile& tile, const BFloat16* matrix, int64_t stride,
                           float (&accumulator)[kN / 2]) {
  constexpr int kBatch = BatchOf(kN / 32, 4);  // groups of 32 columns
  const StorePlace place(ThreadIndexReadHere());
  const ValidProduct<Config> valid(tile);
  const BFloat16* from = matrix + place.row * stride + place.column;
  MOK_UNROLL
  for (int first = 0; first < kN / 32; first += kBatch) {
    Word4 old[kBatch][2];
    MOK_UNROLL
    for (int i = 0; i < 2 * kBatch; ++i) {
      const int group = first + i / 2, half = i % 2;
      old[i / 2][half] = {0, 0, 0, 0};
      if (valid.Contains(place.row + 8 * half, place.column + 32 * group)) {
        old[i / 2][half] = LoadColumns(from, 8 * half * stride + 32 * group);
      }
    }
    MOK_UNROLL
    for (int i = 0; i < 2 * kBatch; ++i) {
      const Word4 adjacent = old[i / 2][i % 2];
      const uint32_t words[4] = {adjacent.x, adjacent.y, adjacent.z, adjacent.w};
      const Word4 pairs = TransposeColumns<Config>(words);
      const uint32_t in_order[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
      MOK_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * (first + i / 2) + 4 * j + 2 * (i % 2);
        accumulator[at] += LowBFloat16(in_order[j]);
        accumulator[at + 1] += HighBFloat16(in_order[j]);
      }
    }
  }
}

// The fp32 pairs of a fragment: 8 columns and 8 rows of a warp are full sectors of 32 bytes.
struct PairPlace {
  int row, column;  // and row + 8; column + 8 j
  MOK_DEVICE PairPlace() {
    const int thread = static_cast<int>(ThreadIndexReadHere()), lane = thread % 32;
    row = thread / 32 * 16 + lane / 4;
    column = lane % 4 * 2;
  }
};

template <class Config, int kN>
MOK_DEVICE void StoreFloats(const ProductTile& tile, float* matrix, int64_t stride,
                            const float (&accumulator)[kN / 2]) {
  const PairPlace place;
  const ValidProduct<Config> valid(tile);
  float* out = matrix + place.row * stride + place.column;
  MOK_UNROLL
  for (int i = 0; i < kN / 4; ++i) {
    const int j = i / 2, half = i % 2;
    if (!valid.Contains(place.row + 8 * half, place.column + 8 * j)) continue;
    StoreVectorStreaming(
        reinterpret_cast<Word2*>(out + 8 * half * stride + 8 * j),
        Word2{FloatToBits(accumulator[2 * i]), FloatToBits(accumulator[2 * i + 1])});
  }
}

// accumulator += the fp32 matrix. Loads of 64 columns are in flight at once.
template <class Config, int kN>
MOK_DEVICE void AddFloats(const ProductTile& tile, const float* matrix, int64_t stride,
                          float (&accumulator)[kN / 2]) {
  constexpr int kBatch = BatchOf(kN / 4, 16);  // pairs
  const PairPlace place;
  const ValidProduct<Config> valid(tile);
  const float* from = matrix + place.row * stride + place.column;
  MOK_UNROLL
  for (int first = 0; first < kN / 4; first += kBatch) {
    Word2 old[kBatch];
    MOK_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const int j = (first + i) / 2, half = i % 2;
      old[i] = {0, 0};
      if (valid.Contains(place.row + 8 * half, place.column + 8 * j)) {
        old[i] = LoadVector(reinterpret_cast<const Word2*>(from + 8 * half * stride + 8 * j));
      }
    }
    MOK_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      accumulator[2 * (first + i)] += BitsToFloat(old[i].x);
      accumulator[2 * (first + i) + 1] += BitsToFloat(old[i].y);
    }
  }
}

// Where a thread's accumulators i .. i + 3 lie in the carry of a tile: 16 bytes per thread, thread
// after thread.
template <class Config>
MOK_DEVICE Word4* CarryWords(float* carry, uint32_t thread, uint32_t i) {
  return reinterpret_cast<Word4*>(carry) +
         (thread / 128 * (Config::kAccumulators / 4) + i / 4) * 128 + thread % 128;
}

template <class Config, int kRegisters>
MOK_DEVICE void LoadCarryIf(bool condition, float* carry, float (&accumulator)[kRegisters]) {
  const uint32_t thread = ThreadIndexReadHere();
  MOK_UNROLL
  for (int i = 0; i < kRegisters; i += 4) {
    LoadVectorIf(condition, CarryWords<Config>(carry, thread, i),
                 reinterpret_cast<float (&)[4]>(accumulator[i]));
  }
}

template <class Config, int kRegisters>
MOK_DEVICE void StoreCarry(float* carry, const float (&accumulator)[kRegisters]) {
  const uint32_t thread = ThreadIndexReadHere();
  MOK_UNROLL
  for (int i = 0; i < kRegisters; i += 4) {
    StoreVector(CarryWords<Config>(carry, thread, i),
                Word4{FloatToBits(accumulator[i]), FloatToBits(accumulator[i + 1]),
                      FloatToBits(accumulator[i + 2]), FloatToBits(accumulator[i + 3])});
  }
}

// Zeros in the valid part of a matrix of elements of kElementBytes.
template <class Config, int kElementBytes>
MOK_DEVICE void StoreZeros(const ProductTile& tile, void* matrix, int64_t stride) {
  constexpr int kElements = sizeof(Word4) / kElementBytes;  // of a store
  const ValidProduct<Config> valid(tile);
  const int thread = static_cast<int>(ThreadIndexReadHere()), lane = thread % 32;
  // A warp has 16 rows, as in the other epilogues.
  for (int i = 0; i < 16; ++i) {
    const int row = thread / 32 * 16 + i;
    for (int column = lane * kElements; column < valid.columns; column += 32 * kElements) {
      if (row >= valid.rows) continue;
      auto* at = static_cast<unsigned char*>(matrix) + (row * stride + column) * kElementBytes;
      StoreVectorStreaming(reinterpret_cast<Word4*>(at), Word4{0, 0, 0, 0});
    }
  }
}

}  // namespace gemm_internal

// dx, rounded to bf16. owners: of the thread's rows in the table `routes`.
template <class Config, int kN>
MOK_DEVICE void EpilogueInputGrad(const BackwardTask& task, const RowOwners& routes,
                                  const OwnersOfRows& owners, const float (&accumulator)[kN / 2]) {
  const InputGradEpilogue& epilogue = task.input_grad;
  const int row = gemm_internal::StorePlace(ThreadIndexReadHere()).row;
  const StoredRows rows = RowsOfMatrix(epilogue.d_x, epilogue.stride, row);
  gemm_internal::StoreRounded<Config, kN, false>(
      task.product, owners.Place(rows, routes, epilogue.own_rows, epilogue.stride), accumulator);
}

// The sum of a weight gradient: to the carry, or to the output in its dtype. Changes the
// accumulator.
template <class Config, int kN>
MOK_DEVICE void EpilogueWeightGrad(const BackwardTask& task, float (&accumulator)[kN / 2]) {
  using namespace gemm_internal;
  constexpr BackwardBug kBug = Config::kBackwardBug;
  const WeightGradEpilogue& epilogue = task.weight_grad;
  if (Uniform(epilogue.carry_out) && kBug != BackwardBug::kCarryStoredToOutput) {
    StoreCarry<Config>(epilogue.carry, accumulator);
    return;
  }
  const bool adds = Uniform(epilogue.accumulate) && kBug != BackwardBug::kAddsNothing;
  const int64_t stride = epilogue.out_stride;
  if (Uniform(epilogue.out_dtype) == DType::kFp32) {
    auto* out = static_cast<float*>(epilogue.out);
    if (adds) AddFloats<Config, kN>(task.product, out, stride, accumulator);
    StoreFloats<Config, kN>(task.product, out, stride, accumulator);
  } else {
    auto* out = static_cast<BFloat16*>(epilogue.out);
    if (adds) AddRounded<Config, kN>(task.product, out, stride, accumulator);
    const int row = StorePlace(ThreadIndexReadHere()).row;
    StoreRounded<Config, kN, true>(task.product, RowsOfMatrix(out, stride, row), accumulator);
  }
}

// Instead of EpilogueWeightGrad for a tile without rows of K.
template <class Config>
MOK_DEVICE void EpilogueNoRows(const BackwardTask& task) {
  using namespace gemm_internal;
  const WeightGradEpilogue& epilogue = task.weight_grad;
  if (epilogue.accumulate && Config::kBackwardBug != BackwardBug::kOverwritesWithoutRows) return;
  if (epilogue.out_dtype == DType::kFp32) {
    StoreZeros<Config, 4>(task.product, epilogue.out, epilogue.out_stride);
  } else {
    StoreZeros<Config, 2>(task.product, epilogue.out, epilogue.out_stride);
  }
}

}  // namespace mok
