#include "mok_gemm/sm90/tensor_maps.h"

namespace mok {
namespace {

using runtime::TensorMapSpec;

constexpr int64_t kMaxExtent = int64_t{1} << 31;  // coordinates are int32

Status CheckExtent(const char* name, int64_t value, int64_t multiple) {
  if (value < 1 || value >= kMaxExtent || value % multiple != 0) {
    return InvalidArgumentError(name, " = ", value, ": expected a multiple of ", multiple,
                                " in 1 to 2^31 - 1");
  }
  return OkStatus();
}

TensorMapSpec Bf16Map(const BFloat16* base) {
  TensorMapSpec spec{};
  spec.base = const_cast<BFloat16*>(base);  // a map does not write
  spec.element_bytes = ElementBytes(DType::kBf16);
  spec.swizzle = Swizzle::k128;
  return spec;
}

constexpr uint32_t kBoxColumns = 64;  // Sm90GemmConfig::kTileK: one swizzle span
constexpr uint32_t kBoxRows = 64;     // Sm90GemmConfig::kWarpgroupM

Status CheckWeights(const WeightMatrix& matrix, int64_t multiple_of_n) {
  MOK_RETURN_IF_ERROR(CheckExtent("weight experts", matrix.experts, 1));
  MOK_RETURN_IF_ERROR(CheckExtent("weight n", matrix.n, multiple_of_n));
  MOK_RETURN_IF_ERROR(CheckExtent("weight k", matrix.k, 8));
  if (matrix.experts * matrix.n >= kMaxExtent) {
    return InvalidArgumentError("weight experts * n = ", matrix.experts * matrix.n,
                                ": expected less than 2^31");
  }
  return OkStatus();
}

// [experts, n, k] as it lies in memory; the box is one expert's, kBoxColumns wide.
TensorMapSpec WeightMap(const WeightMatrix& matrix, uint32_t box_rows) {
  const uint64_t row_bytes = static_cast<uint64_t>(matrix.k) * sizeof(BFloat16);
  TensorMapSpec spec = Bf16Map(matrix.base);
  spec.rank = 3;
  spec.dimensions[0] = static_cast<uint64_t>(matrix.k);
  spec.dimensions[1] = static_cast<uint64_t>(matrix.n);
  spec.dimensions[2] = static_cast<uint64_t>(matrix.experts);
  spec.strides[0] = row_bytes;
  spec.strides[1] = static_cast<uint64_t>(matrix.n) * row_bytes;
  spec.box[0] = kBoxColumns;
  spec.box[1] = box_rows;
  spec.box[2] = 1;
  return spec;
}

}  // namespace

StatusOr<TensorMapSpec> ActivationMapSpec(const BFloat16* base, int64_t rows, int64_t k,
                                          int64_t row_stride) {
  MOK_RETURN_IF_ERROR(CheckExtent("activation rows", rows, 1));
  MOK_RETURN_IF_ERROR(CheckExtent("activation k", k, 8));
  MOK_RETURN_IF_ERROR(CheckExtent("activation row_stride", row_stride, 8));
  if (row_stride < k) {
    return InvalidArgumentError("activation row_stride = ", row_stride, " is less than k = ", k);
  }
  TensorMapSpec spec = Bf16Map(base);
  spec.rank = 2;
  spec.dimensions[0] = static_cast<uint64_t>(k);
  spec.dimensions[1] = static_cast<uint64_t>(rows);
  spec.strides[0] = static_cast<uint64_t>(row_stride) * sizeof(BFloat16);
  spec.box[0] = kBoxColumns;
  spec.box[1] = kBoxRows;
  return spec;
}

StatusOr<TensorMapSpec> WeightMapSpec(const WeightMatrix& matrix, ColumnOrder order,
                                      int half_columns) {
  const bool permuted = order == ColumnOrder::kPermuted;
  MOK_RETURN_IF_ERROR(CheckWeights(matrix, permuted ? 32 : 8));
  MOK_RETURN_IF_ERROR(CheckExtent("weight half_columns", half_columns, 32));
  const auto half = static_cast<uint32_t>(half_columns);
  if (!permuted) return WeightMap(matrix, half);
  const uint64_t row_bytes = static_cast<uint64_t>(matrix.k) * sizeof(BFloat16);
  const auto n = static_cast<uint64_t>(matrix.n), experts = static_cast<uint64_t>(matrix.experts);
  TensorMapSpec spec = Bf16Map(matrix.base);
  spec.dimensions[0] = static_cast<uint64_t>(matrix.k);
  spec.box[0] = kBoxColumns;
  // Dimensions 1 to 4 are b, q, j and g of ColumnOrder::kPermuted: the box is written to shared
  // memory in the order b, q, j, g, and reads rows 32 g + 8 q + 2 j + b.
  const uint64_t extents[] = {2, 4, 4, experts * n / 32};
  const uint64_t rows_apart[] = {1, 8, 2, 32};
  const uint32_t boxes[] = {2, 4, 4, half / 32};
  spec.rank = 5;
  for (int i = 0; i < 4; ++i) {
    spec.dimensions[i + 1] = extents[i];
    spec.strides[i] = rows_apart[i] * row_bytes;
    spec.box[i + 1] = boxes[i];
  }
  return spec;
}

StatusOr<TensorMapSpec> ContractedWeightMapSpec(const WeightMatrix& matrix) {
  MOK_RETURN_IF_ERROR(CheckWeights(matrix, 8));
  return WeightMap(matrix, kBoxRows);
}

}  // namespace mok
