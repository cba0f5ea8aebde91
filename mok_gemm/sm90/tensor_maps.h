// Tensor maps of the GEMM worker's operands.
#pragma once

#include <cstdint>

#include "mok_core/device/runtime.h"
#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_gemm/sm90/gemm_config.h"

namespace mok {

// A: bf16 [rows, k] with row_stride elements from row to row (a multiple of 8). One load moves 64
// rows by 64 columns. Also C, with its width as k, for tensor stores (held_stage.h). Errors name
// the field: k not a multiple of 8, rows < 1, ...
StatusOr<runtime::TensorMapSpec> ActivationMapSpec(const BFloat16* base, int64_t rows, int64_t k,
                                                   int64_t row_stride);

// B: bf16 [experts, n, k], contiguous. One load moves Config::kHalfN (`half_columns`) rows by 64
// columns. n and k are multiples of 8; kPermuted: n a multiple of 32.
struct WeightMatrix {
  const BFloat16* base;
  int64_t experts, n, k;
};
StatusOr<runtime::TensorMapSpec> WeightMapSpec(const WeightMatrix& matrix, ColumnOrder order,
                                               int half_columns);

// The same weights where a product sums over their rows (K = matrix.n, N = matrix.k): MN-major
// operands of the backward. One load moves 64 rows by 64 columns of one expert; n and k are
// multiples of 8.
StatusOr<runtime::TensorMapSpec> ContractedWeightMapSpec(const WeightMatrix& matrix);

// The order that all widths allow: kPermuted if each is a multiple of 32.
constexpr ColumnOrder SelectColumnOrder(int64_t width, int64_t other_width = 32) {
  return width % 32 == 0 && other_width % 32 == 0 ? ColumnOrder::kPermuted : ColumnOrder::kNatural;
}

}  // namespace mok
