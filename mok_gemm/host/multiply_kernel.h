// The inner kernel of all products. Include only from kernels_<isa>.cc, after the ISA's Simd.
#pragma once

#include <cstdint>

#include "mok_gemm/host/kernel_table.h"

namespace mok {

// Units between two prefetch steps.
inline constexpr int64_t kPrefetchUnits = 32;

// Walks the cache lines of the prefetch ranges, a few at a time: a burst would fill the core's miss
// queue and stall the loads behind it.
template <class Simd>
class PrefetchCursor {
 public:
  PrefetchCursor(const PrefetchRange (&ranges)[2], int64_t num_steps)
      : range_(ranges), end_(ranges + 2) {
    int64_t num_lines = 0;
    for (const PrefetchRange& range : ranges) {
      num_lines += range.num_rows * ((range.row_bytes + kLineBytes - 1) / kLineBytes);
    }
    lines_per_step_ = (num_lines + num_steps - 1) / num_steps;
  }

  // Asks for the lines of one step.
  [[gnu::always_inline]] void Step() {
    for (int64_t count = lines_per_step_; count > 0 && range_ < end_;) {
      if (row_ == range_->num_rows) {
        row_ = 0;
        ++range_;
        continue;
      }
      const char* line = static_cast<const char*>(range_->first) + row_ * range_->stride + offset_;
      __builtin_prefetch(line, /*rw=*/0, /*locality=*/2);
      --count;
      offset_ += kLineBytes;
      if (offset_ >= range_->row_bytes) {
        offset_ = 0;
        ++row_;
      }
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;

  const PrefetchRange* range_;
  const PrefetchRange* end_;
  int64_t lines_per_step_ = 0;
  int row_ = 0;         // of *range_
  int64_t offset_ = 0;  // in that row
};

// A kRows x (kVectors * lanes) block of c in registers.
template <class Simd, class Units, int kRows, int kVectors>
struct RegisterBlock {
  using Float = typename Simd::Float;

  // Rows are reached from every third one at +0, +1 and +2 strides: x86 addresses hold
  // base + stride and base + 2 * stride, so 13 rows take 5 address registers.
  static constexpr int kBases = (kRows + 2) / 3;

  // Not inlined: each block gets the whole register file, whatever surrounds it.
  [[gnu::noinline]] static void Run(const MultiplyArguments& args, PrefetchCursor<Simd>& prefetch) {
    Float acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = args.accumulate ? Simd::LoadAll(args.c + r * args.c_stride + v * Simd::kLanes)
                                    : Simd::Zero();
      }
    }
    Accumulate(args, prefetch, acc);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Simd::StoreAll(args.c + r * args.c_stride + v * Simd::kLanes, acc[r][v]);
      }
    }
  }

 private:
  [[gnu::always_inline]] static void Accumulate(const MultiplyArguments& args,
                                                PrefetchCursor<Simd>& prefetch,
                                                Float (&acc)[kRows][kVectors]) {
    const char* base[kBases];
#pragma GCC unroll 8
    for (int i = 0; i < kBases; ++i) {
      base[i] = static_cast<const char*>(args.rows) + 3 * i * args.row_stride;
    }
    const float* panel = args.panel;
    const int64_t row_stride = args.row_stride;
    for (int64_t unit = 0; unit < args.units; ++unit) {
      if (unit % kPrefetchUnits == 0) prefetch.Step();
      Float column[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) column[v] = Simd::LoadAll(panel + v * Simd::kLanes);
      panel += 2 * Simd::kLanes;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float value;
        __builtin_memcpy(&value, base[r / 3] + (r % 3) * row_stride, sizeof(value));
        const Float row = Simd::Set(value);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          acc[r][v] = Units::MultiplyAdd(row, column[v], acc[r][v]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kBases; ++i) base[i] += args.unit_stride;
    }
  }
};

// KernelTable::multiply: register blocks over all rows.
template <class Simd, class Units>
struct MultiplyKernel {
  static constexpr int kGroupRows = Simd::kGroupRows;

  static void Run(const MultiplyArguments& args) {
    // Rows are dealt to groups evenly: 128 rows as 13, 13, .. 12 keep more accumulators busy than
    // 13, .. 13, 11 would.
    const int num_groups = (args.num_rows + kGroupRows - 1) / kGroupRows;
    const int64_t steps_per_group = (args.units + kPrefetchUnits - 1) / kPrefetchUnits;
    PrefetchCursor<Simd> prefetch(args.prefetch, num_groups * steps_per_group);
    int first_row = 0;
    for (int group = 0; group < num_groups; ++group) {
      const int rows = (args.num_rows - first_row) / (num_groups - group);
      MultiplyArguments block = args;
      block.rows = static_cast<const char*>(args.rows) + first_row * args.row_stride;
      block.c = args.c + first_row * args.c_stride;
      RunBlock<kGroupRows>(rows, block, prefetch);
      first_row += rows;
    }
  }

 private:
  // Picks the compiled block of `rows` (1 .. kRows) rows.
  template <int kRows>
  static void RunBlock(int rows, const MultiplyArguments& block, PrefetchCursor<Simd>& prefetch) {
    if constexpr (kRows > 1) {
      if (rows < kRows) return RunBlock<kRows - 1>(rows, block, prefetch);
    }
    if (block.num_columns > Simd::kLanes) {
      RegisterBlock<Simd, Units, kRows, 2>::Run(block, prefetch);
    } else {
      RegisterBlock<Simd, Units, kRows, 1>::Run(block, prefetch);
    }
  }
};

}  // namespace mok
