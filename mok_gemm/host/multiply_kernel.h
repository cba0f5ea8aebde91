// The inner kernel of all products. Include only from kernels_<isa>.cc, after the ISA's Simd.
#pragma once

#include <cstdint>

#include "mok_gemm/host/kernel_table.h"
#include "mok_gemm/host/store_kernel.h"

namespace mok {

// Units between two prefetch steps.
inline constexpr int64_t kPrefetchUnits = 32;

// Walks the cache lines of the prefetch ranges, a few at a time: a burst would fill the core's miss
// queue and stall the loads behind it.
template <class Simd>
class PrefetchCursor {
 public:
  PrefetchCursor(const PrefetchList& list, int64_t num_steps)
      : range_(list.ranges), end_(list.ranges + PrefetchList::kSize) {
    int64_t num_lines = 0;
    for (const PrefetchRange& range : list.ranges) {
      num_lines += range.num_rows * ((range.row_bytes + kLineBytes - 1) / kLineBytes);
    }
    lines_per_step_ = (num_lines + num_steps - 1) / num_steps;
  }

  // Asks for the lines of one step.
  [[gnu::always_inline]] void Step() {
    for (int64_t count = lines_per_step_; count > 0; --count) {
      if (line_ >= row_end_ && !NextRow()) return;
      __builtin_prefetch(line_, /*rw=*/0, /*locality=*/2);
      line_ += kLineBytes;
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;

  // Moves on to the next row, if need be of the next range; false after the last.
  [[gnu::always_inline]] bool NextRow() {
    while (range_ < end_ && row_ == range_->num_rows) {
      row_ = 0;
      ++range_;
    }
    if (range_ == end_) return false;
    line_ = static_cast<const char*>(range_->first) + row_ * range_->stride;
    row_end_ = line_ + range_->row_bytes;
    ++row_;
    return true;
  }

  const PrefetchRange* range_;
  const PrefetchRange* end_;
  int64_t lines_per_step_ = 0;
  int64_t row_ = 0;  // of *range_, to come
  const char* line_ = nullptr;
  const char* row_end_ = nullptr;
};

// Reads the vector operand from a packed panel.
template <class Simd, class Units, int kVectors>
class PackedColumns {
 public:
  explicit PackedColumns(const MultiplyArguments& args) : panel_(args.panel) {}

  [[gnu::always_inline]] void Next(typename Simd::Float (&column)[kVectors]) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) column[v] = Simd::LoadAll(panel_ + v * Simd::kLanes);
    panel_ += 2 * Simd::kLanes;
  }

 private:
  const float* panel_;
};

// Reads the vector operand where it lies, K-major, and leaves it packed for the rows that follow:
// the memory accesses of packing hide behind the multiplications.
template <class Simd, class Units, int kVectors>
class ColumnsToPack {
 public:
  using Element = typename Units::Element;

  explicit ColumnsToPack(const MultiplyArguments& args)
      : panel_(args.panel),
        source_(static_cast<const Element*>(args.to_pack.source)),
        stride_(args.to_pack.stride),
        depth_(args.to_pack.depth),
        count_(args.to_pack.count) {}

  [[gnu::always_inline]] void Next(typename Simd::Float (&column)[kVectors]) {
    typename Simd::Float units[2];
    Units::LoadAlongColumns(source_, stride_, depth_, count_, units);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      column[v] = units[v];
      Simd::StoreAll(panel_ + v * Simd::kLanes, units[v]);
    }
    panel_ += 2 * Simd::kLanes;
    source_ += Units::kElements * stride_;
    depth_ -= Units::kElements;
  }

 private:
  float* panel_;
  const Element* source_;
  int64_t stride_;
  int64_t depth_;  // elements left along K
  int count_;
};

// A kRows x (kVectors * lanes) block of the product in registers.
template <class Simd, class Units, int kRows, class Columns, int kVectors>
struct RegisterBlock {
  using Float = typename Simd::Float;

  // Rows are reached from every third one at +0, +1 and +2 strides: x86 addresses hold
  // base + stride and base + 2 * stride, so 13 rows take 5 address registers.
  static constexpr int kBases = (kRows + 2) / 3;

  // The block starts at args.rows and args.c and is stored to `result`. Not inlined: it gets the
  // whole register file, whatever surrounds it.
  [[gnu::noinline]] static void Run(const MultiplyArguments& args, float* result,
                                    int64_t result_stride, PrefetchCursor<Simd>& prefetch) {
    Float acc[kRows][kVectors];
    const float* c = args.c;
    const int64_t c_stride = args.c_stride;
    const bool accumulate = args.accumulate;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = accumulate ? Simd::LoadAll(c + r * c_stride + v * Simd::kLanes) : Simd::Zero();
      }
    }
    Accumulate(args, prefetch, acc);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Simd::StoreAll(result + r * result_stride + v * Simd::kLanes, acc[r][v]);
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
    Columns columns(args);
    const int64_t row_stride = args.row_stride;
    for (int64_t unit = 0; unit < args.units; ++unit) {
      if (unit % kPrefetchUnits == 0) prefetch.Step();
      Float column[kVectors];
      columns.Next(column);
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

// KernelTable::multiply: register blocks over all rows and panels.
template <class Simd, class Units>
struct MultiplyKernel {
  static constexpr int kGroupRows = Simd::kGroupRows;
  static constexpr int kPanelColumns = 2 * Simd::kLanes;

  static void Run(const MultiplyArguments& args) {
    // Rows are dealt to groups evenly: 128 rows as 13, 13, .. 12 keep more accumulators busy than
    // 13, .. 13, 11 would.
    const int num_groups = (args.num_rows + kGroupRows - 1) / kGroupRows;
    const int num_panels = (args.num_columns + kPanelColumns - 1) / kPanelColumns;
    const int64_t steps_per_block = (args.units + kPrefetchUnits - 1) / kPrefetchUnits;
    PrefetchCursor<Simd> prefetch(args.prefetch, num_groups * num_panels * steps_per_block);
    MultiplyArguments group = args;
    for (int first_row = 0, index = 0; index < num_groups; ++index) {
      group.num_rows = (args.num_rows - first_row) / (num_groups - index);
      group.rows = static_cast<const char*>(args.rows) + first_row * args.row_stride;
      for (int panel = 0; panel < num_panels; ++panel) {
        const int first_column = panel * kPanelColumns;
        const int columns_left = args.num_columns - first_column;
        group.panel = args.panel + panel * args.panel_stride;
        group.num_columns = columns_left < kPanelColumns ? columns_left : kPanelColumns;
        group.c = args.c + first_row * args.c_stride + first_column;
        RunAndStore(group, first_row, first_column, prefetch);
      }
      group.to_pack.source = nullptr;
      first_row += group.num_rows;
    }
  }

 private:
  // One group of rows times one panel, which begin at (row, column) of the destination.
  static void RunAndStore(const MultiplyArguments& group, int row, int column,
                          PrefetchCursor<Simd>& prefetch) {
    if (group.destination.data == nullptr) {
      RunGroup<kGroupRows>(group, group.c, group.c_stride, prefetch);
      return;
    }
    // Finished values go out through a buffer of a few cache lines.
    alignas(64) float finished[kGroupRows * kPanelColumns];
    const StoreArguments store = {
        .c = finished,
        .c_stride = kPanelColumns,
        .rows = group.num_rows,
        .columns = group.num_columns,
        .destination = StoreKernel<Simd>::From(group.destination, row, column)};
    FetchDestination(store);
    RunGroup<kGroupRows>(group, finished, kPanelColumns, prefetch);
    StoreKernel<Simd>::template StoreSums<Units>(store);
  }

  // The lines that will be written come in while their values are computed.
  static void FetchDestination(const StoreArguments& store) {
    constexpr int kFloatsPerLine = 64 / sizeof(float);
    for (int row = 0; row < store.rows; ++row) {
      for (int column = 0; column < store.columns; column += kFloatsPerLine) {
        const void* line = StoreKernel<Simd>::From(store.destination, row, column).data;
        __builtin_prefetch(line, /*rw=*/1, /*locality=*/3);
      }
    }
  }

  // Picks the compiled block of group.num_rows (1 .. kRows) rows.
  template <int kRows>
  static void RunGroup(const MultiplyArguments& group, float* result, int64_t result_stride,
                       PrefetchCursor<Simd>& prefetch) {
    if constexpr (kRows > 1) {
      if (group.num_rows < kRows) {
        return RunGroup<kRows - 1>(group, result, result_stride, prefetch);
      }
    }
    if (group.num_columns > Simd::kLanes) {
      RunVectors<kRows, 2>(group, result, result_stride, prefetch);
    } else {
      RunVectors<kRows, 1>(group, result, result_stride, prefetch);
    }
  }

  template <int kRows, int kVectors>
  static void RunVectors(const MultiplyArguments& group, float* result, int64_t result_stride,
                         PrefetchCursor<Simd>& prefetch) {
    if (group.to_pack.source != nullptr) {
      using Columns = ColumnsToPack<Simd, Units, kVectors>;
      RegisterBlock<Simd, Units, kRows, Columns, kVectors>::Run(group, result, result_stride,
                                                                prefetch);
    } else {
      using Columns = PackedColumns<Simd, Units, kVectors>;
      RegisterBlock<Simd, Units, kRows, Columns, kVectors>::Run(group, result, result_stride,
                                                                prefetch);
    }
  }
};

}  // namespace mok
