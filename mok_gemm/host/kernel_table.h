// The functions compiled once per instruction set, reached through one table of pointers.
//
// How a product is taken apart. A *unit* is 4 bytes of an operand along K: one fp32 value or, for
// VDPBF16PS, two consecutive bf16 values. Of the two operands one is the *vector operand*, packed
// into panels of panel_columns columns, [unit][panel_columns] units, zero beyond the last column
// and the last element of K. The other is the *broadcast operand*: unit u of row r is read at r *
// row_stride + u * unit_stride bytes, where the matrix lies if it already consists of units, else
// in a packed copy. One inner kernel holds group_rows x panel_columns accumulators in registers and
// runs over all units of a K block; the accumulators continue in the fp32 scratch `c`, so K
// blocking does not change a bit. A panel is packed, used by all rows and forgotten while it sits
// in the L1 cache.
//
// This header is included by code of every instruction set: nothing in it, or in what it includes,
// may need a function body at run time (see simd_avx512.h).
#pragma once

#include <cstdint>

#include "mok_core/dtype.h"
#include "mok_gemm/host/tiles.h"

namespace mok {

// A K block of an operand to be packed.
struct PackArguments {
  const void* source = nullptr;  // first element; of the table's dtype
  int64_t stride = 0;            // elements from one stored row to the next
  int64_t depth = 0;             // elements along K
  int count = 0;                 // rows of the operand, seen with K along its columns
  float* packed = nullptr;       // out, 64-byte aligned
  int64_t pitch = 0;             // floats between rows (pack_rows) or units (pack_interleaved)
};

// Memory that will be needed soon: num_rows stretches of row_bytes bytes.
struct PrefetchRange {
  const void* first = nullptr;
  int64_t stride = 0;  // bytes
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
};

// What is fetched during one multiplication; ranges without rows are skipped.
struct PrefetchList {
  static constexpr int kSize = 6;
  PrefetchRange ranges[kSize];
};

// Where a finished product goes: out[r, j] = round(acc[r, j]), or round(out[r, j] + acc[r, j]).
struct Destination {
  void* data = nullptr;        // null: nowhere, the product stays in fp32 scratch
  int64_t stride = 0;          // elements
  DType dtype = DType::kBf16;  // kBf16 or kFp32
  bool accumulate = false;
};

// The broadcast operand times one panel or several: acc[r, j] = (c[r, j] or 0) + sum over units.
struct MultiplyArguments {
  int64_t units;
  const void* rows;     // broadcast operand, first unit
  int64_t row_stride;   // bytes from one row to the next
  int64_t unit_stride;  // bytes from one unit to the next
  int num_rows;
  float* panel;          // vector operand, first unit of the first panel
  int num_columns;       // of all panels, each but the last full
  int64_t panel_stride;  // floats from one panel to the next
  PackArguments
      to_pack;       // source null: all is packed; else the first rows pack one panel on the way
  float* c;          // [num_rows, num_columns rounded up to lanes]
  int64_t c_stride;  // floats
  bool accumulate;   // start from c, not from zero
  Destination destination;  // of acc; without data, acc goes to c
  PrefetchList prefetch;    // brought into the L2 cache bit by bit while multiplying
};

// destination = c.
struct StoreArguments {
  const float* c;  // [rows, columns]; for store_transposed [columns, rows], and readable up to the
                   // next multiple of lanes in both directions
  int64_t c_stride;
  int rows;
  int columns;
  Destination destination;
};

// The two products that the SwiGLU epilogue reads, x Wg^T and x Wu^T: [rows, columns] or, if
// transposed, [columns, rows] and then readable up to the next multiple of lanes in both
// directions.
struct GateUpAccumulators {
  const float* gate;
  const float* up;
  int64_t stride;
  bool transposed;
};

// The dhu that the SwiGLU backward epilogue reads.
struct DownGradAccumulators {
  const float* d_hidden;  // [rows, columns]: d_out Wd
  int64_t stride;
};

// The code of one (ISA, operand dtype).
struct KernelTable {
  DType dtype;
  int lanes;              // fp32 values of a vector
  int panel_columns;      // columns of a panel
  int elements_per_unit;  // 1 or 2
  bool rows_are_units;    // a K-contiguous matrix can be a broadcast operand where it lies

  // K-contiguous rows, source [count, depth], into a panel.
  void (*pack_transposed)(const PackArguments&);
  // K-major, source [depth, count], into [unit][count] units.
  void (*pack_interleaved)(const PackArguments&);
  // K-contiguous rows, source [count, depth], into rows of units.
  void (*pack_rows)(const PackArguments&);
  void (*multiply)(const MultiplyArguments&);
  void (*store)(const StoreArguments&);
  void (*store_transposed)(const StoreArguments&);
  void (*swiglu_forward)(const GateUpTile&, const GateUpAccumulators&);
  void (*swiglu_backward)(const DownGradTile&, const DownGradAccumulators&);
  void (*token_reduce)(const TokenReduceTile&);
};

// One per ISA, in kernels_<isa>.cc. `dtype` is kBf16 or kFp32.
const KernelTable& PortableKernels(DType dtype);
const KernelTable& Avx2Kernels(DType dtype);
const KernelTable& Avx512Kernels(DType dtype);
const KernelTable& Avx512Bf16Kernels(DType dtype);

}  // namespace mok
