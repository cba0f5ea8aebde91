// Test support: operand matrices that show every access outside, a float64 reference, error norms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "mok_core/dtype.h"
#include "mok_gemm/host/isa.h"

namespace mok {

// A [rows, columns] matrix of bf16 or fp32 inside poisoned memory: every element between and before
// its rows is NaN, and the byte after its last element is on a page without access.
class TestMatrix {
 public:
  // Rows are columns + `gap` elements apart.
  TestMatrix(DType dtype, int64_t rows, int64_t columns, int64_t gap = 3);
  ~TestMatrix();
  TestMatrix(TestMatrix&& other) noexcept { *this = std::move(other); }
  TestMatrix& operator=(TestMatrix&& other) noexcept;

  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t stride() const { return columns_ + gap_; }
  // Address of an element; of the first one without arguments.
  void* at(int64_t row = 0, int64_t column = 0) const;

  double Get(int64_t row, int64_t column) const;
  void Set(int64_t row, int64_t column, double value);  // rounded to the dtype
  // Normal values, mean 0.
  TestMatrix& FillNormal(uint32_t seed, double deviation = 1.0);
  TestMatrix& Fill(double value);
  TestMatrix& MakePositive();

  // Whether no byte outside the rows has changed.
  bool SurroundingsIntact() const;
  // The elements' bytes, row after row.
  std::string Bits() const;

 private:
  DType dtype_ = DType::kBf16;
  int64_t rows_ = 0, columns_ = 0, gap_ = 0;
  std::byte* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
};

// A float64 matrix.
struct Reference {
  Reference(int64_t rows, int64_t columns)
      : rows(rows), columns(columns), values(rows * columns, 0.0) {}
  explicit Reference(const TestMatrix& matrix);

  double& operator()(int64_t row, int64_t column) { return values[row * columns + column]; }
  double operator()(int64_t row, int64_t column) const { return values[row * columns + column]; }

  int64_t rows, columns;
  std::vector<double> values;
};

Reference Transposed(const Reference& a);
// a b^T for a [m, k], b [n, k], added to `sum` [m, n].
void AddProductNt(const Reference& a, const Reference& b, Reference& sum);

// |actual - expected| / |expected| in the Euclidean norm: of the whole matrix and of the worst row.
struct RelativeError {
  double whole, worst_row;
};
RelativeError Compare(const TestMatrix& actual, const Reference& expected);

// The accepted errors. bf16: one rounding of the result, 2^-9 at most and about 1.7e-3 in the norm,
// and for SwiGLU up to three more of the saved g, u and h. fp32: K-long sums of fp32 roundings,
// which grow as sqrt(K) eps; measured below 1e-6.
struct Tolerance {
  double whole, row;
};
constexpr Tolerance ToleranceFor(DType dtype) {
  return dtype == DType::kBf16 ? Tolerance{4e-3, 2e-2} : Tolerance{1e-5, 1e-5};
}

// A gtest predicate: within ToleranceFor(actual.dtype()), surroundings intact. Returns an empty
// text or what is wrong.
std::string Mismatch(const TestMatrix& actual, const Reference& expected);

// Every (ISA, operand dtype) of this machine, and its name for gtest.
struct IsaAndDType {
  Isa isa;
  DType dtype;
};
std::vector<IsaAndDType> AllIsasAndDTypes();
std::string TestName(const IsaAndDType& parameter);

}  // namespace mok
