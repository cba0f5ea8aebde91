// The epilogue that leaves most of C to the producer: see held_stage.h.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_gemm/sm90/held_stage.h"

namespace mok {

namespace gemm_internal {

// 8 columns of a box: 64 rows of one swizzle span, 128 bytes, as tensor stores expect them.
MOK_DEVICE Word4* BoxWords(unsigned char* box, int row, int chunk) {
  return reinterpret_cast<Word4*>(box + row * static_cast<int>(Swizzle::k128) +
                                  (chunk ^ row % 8) * static_cast<int>(sizeof(Word4)));
}

// The words that a thread stores of 32 columns, and of one of its two rows.
template <class Config>
MOK_DEVICE Word4 RoundedColumns(const float (&accumulator)[Config::kAccumulators], int group,
                                int half) {
  uint32_t words[4];
  PackColumns(accumulator, 16 * group, half, words);
  return AdjacentColumns<Config>(words);
}

MOK_DEVICE Word4 Select(bool condition, const Word4& a, const Word4& b) {
  return {condition ? a.x : b.x, condition ? a.y : b.y, condition ? a.z : b.z,
          condition ? a.w : b.w};
}

// Rounds 64 columns from the accumulators to a box. Eight lanes, that is two rows, write at once:
// were both to write the same four chunks, they would meet in half of the banks. So odd rows begin
// with the other four.
template <class Config>
MOK_DEVICE void FillBox(const float (&accumulator)[Config::kAccumulators], int box,
                        unsigned char* words) {
  const StorePlace place;
  const int row = place.row % Config::kWarpgroupM, chunk = place.column / 8;
  const bool is_odd = row % 2 != 0;
  MOK_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Word4 left = RoundedColumns<Config>(accumulator, 2 * box, half);
    const Word4 right = RoundedColumns<Config>(accumulator, 2 * box + 1, half);
    const int first = is_odd ? chunk + 4 : chunk;
    *BoxWords(words, row + 8 * half, first) = Select(is_odd, right, left);
    *BoxWords(words, row + 8 * half, first ^ 4) = Select(is_odd, left, right);
  }
}

// Copies the valid ones of a warp's rows from the boxes, of a warpgroup whose rows are not all
// valid: a tensor store would write the others, too.
template <class Config>
MOK_DEVICE void StoreFilledRows(const GemmTask& task, const ValidPart<Config>& valid,
                                const HeldConsumer<Config>& consumer) {
  constexpr int kChunks = Config::kTileK / 8;  // of a row of a box
  const int thread = static_cast<int>(ThreadIndex().x);
  const int first = thread / 32 * 16, rest = valid.rows - first, rows = rest < 16 ? rest : 16;
  SyncWarp();
  MOK_NO_UNROLL
  for (int i = thread % 32; i < rows * Config::kHeldBoxes * kChunks; i += 32) {
    const int chunk = i % kChunks, box = i / kChunks % Config::kHeldBoxes;
    const int row = first + i / (kChunks * Config::kHeldBoxes);
    const int column = box * Config::kTileK + chunk * 8;
    if (column >= valid.columns) continue;
    const Word4 value = *BoxWords(consumer.Box(box), row % Config::kWarpgroupM, chunk);
    Store8(task.out, row * task.out_stride + column, value);
  }
}

// The columns that the boxes have no room for.
template <class Config>
MOK_DEVICE void StoreOtherColumns(const GemmTask& task, const ValidPart<Config>& valid,
                                  const float (&accumulator)[Config::kAccumulators]) {
  const StorePlace place;
  BFloat16* out = task.out + place.row * task.out_stride + place.column;
  MOK_UNROLL
  for (int group = Config::kHeldColumns / 32; group < Config::kTileN / 32; ++group) {
    MOK_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Word4 value = RoundedColumns<Config>(accumulator, group, half);
      if (valid.Contains(place.row + 8 * half, place.column + 32 * group)) {
        Store8(out, 8 * half * task.out_stride + 32 * group, value);
      }
    }
  }
}

}  // namespace gemm_internal

// C, rounded to bf16; after MainLoop<true>. The columns without room go first: behind the others
// they would compete with the producer's stores.
template <class Config>
MOK_DEVICE void EpilogueStoreThroughStage(const GemmTask& task,
                                          const float (&accumulator)[Config::kAccumulators],
                                          HeldConsumer<Config>& consumer) {
  using namespace gemm_internal;
  const ValidPart<Config> valid(task);
  StoreOtherColumns<Config>(task, valid, accumulator);
  consumer.Hold(task);
  MOK_UNROLL
  for (int box = 0; box < Config::kHeldBoxes; ++box) {
    if (box * Config::kTileK < task.columns) {
      FillBox<Config>(accumulator, box, consumer.Box(box));
    }
  }
  const int warpgroup = static_cast<int>(ThreadIndex().x) / 128;
  if (valid.rows < (warpgroup + 1) * Config::kWarpgroupM) {
    StoreFilledRows<Config>(task, valid, consumer);
  }
  consumer.HandOver();
}

}  // namespace mok
