// The inner kernel of all products. Include only from kernels_<isa>.cc, after the ISA's Simd.
#pragma once

#include <cstdint>

#include "mok_gemm/host/kernel_table.h"

namespace mok {

// A kRows x (kVectors * lanes) block of c in registers.
template <class Simd, class Units, int kRows, int kVectors>
struct RegisterBlock {
  using Float = typename Simd::Float;

  // Rows are reached from every third one at +0, +1 and +2 strides: x86 addresses hold
  // base + stride and base + 2 * stride, so 13 rows take 5 address registers.
  static constexpr int kBases = (kRows + 2) / 3;

  static void Run(const MultiplyArguments& args) {
    Float acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = args.accumulate ? Simd::LoadAll(args.c + r * args.c_stride + v * Simd::kLanes)
                                    : Simd::Zero();
      }
    }
    Accumulate(args, acc);
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
                                                Float (&acc)[kRows][kVectors]) {
    const char* base[kBases];
#pragma GCC unroll 8
    for (int i = 0; i < kBases; ++i) {
      base[i] = static_cast<const char*>(args.rows) + 3 * i * args.row_stride;
    }
    const float* panel = args.panels;
    const int64_t row_stride = args.row_stride;
    for (int64_t unit = 0; unit < args.units; ++unit) {
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

// KernelTable::multiply: register blocks over all rows and columns.
template <class Simd, class Units>
struct MultiplyKernel {
  static constexpr int kPanelColumns = 2 * Simd::kLanes;
  static constexpr int kGroupRows = Simd::kGroupRows;

  static void Run(const MultiplyArguments& args) {
    // Rows are dealt to groups evenly: 128 rows as 13, 13, .. 12 keep more accumulators busy than
    // 13, .. 13, 11 would.
    const int num_groups = (args.num_rows + kGroupRows - 1) / kGroupRows;
    int first_row = 0;
    for (int group = 0; group < num_groups; ++group) {
      const int rows = (args.num_rows - first_row) / (num_groups - group);
      for (int first_column = 0, panel = 0; first_column < args.num_columns;
           first_column += kPanelColumns, ++panel) {
        MultiplyArguments block = args;
        block.rows = static_cast<const char*>(args.rows) + first_row * args.row_stride;
        block.panels = args.panels + panel * args.panel_pitch;
        block.c = args.c + first_row * args.c_stride + first_column;
        RunBlock<kGroupRows>(rows, args.num_columns - first_column > Simd::kLanes, block);
      }
      first_row += rows;
    }
  }

 private:
  // Picks the compiled block of `rows` (1 .. kRows) rows.
  template <int kRows>
  static void RunBlock(int rows, bool two_vectors, const MultiplyArguments& block) {
    if constexpr (kRows > 1) {
      if (rows < kRows) return RunBlock<kRows - 1>(rows, two_vectors, block);
    }
    if (two_vectors) {
      RegisterBlock<Simd, Units, kRows, 2>::Run(block);
    } else {
      RegisterBlock<Simd, Units, kRows, 1>::Run(block);
    }
  }
};

}  // namespace mok
