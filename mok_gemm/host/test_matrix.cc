#include "mok_gemm/host/test_matrix.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "mok_core/bits.h"
#include "mok_core/status.h"

namespace mok {
namespace {

// All bits set is a NaN in bf16 and fp32.
constexpr int kPoison = 0xFF;
constexpr int64_t kRowsBefore = 2;

}  // namespace

TestMatrix::TestMatrix(DType dtype, int64_t rows, int64_t columns, int64_t gap)
    : dtype_(dtype), rows_(rows), columns_(columns), gap_(gap) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t bytes = ((rows + kRowsBefore) * stride() - gap) * ElementBytes(dtype);
  const size_t accessible = RoundUp<size_t>(bytes, page);
  mapping_bytes_ = accessible + page;
  void* mapping =
      mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  MOK_CHECK(mapping != MAP_FAILED) << "mmap of " << mapping_bytes_ << " bytes";
  mapping_ = static_cast<std::byte*>(mapping);
  std::memset(mapping_, kPoison, accessible);
  MOK_CHECK(mprotect(mapping_ + accessible, page, PROT_NONE) == 0) << "mprotect";
  data_ = mapping_ + accessible - (rows * stride() - gap) * ElementBytes(dtype);
}

TestMatrix::~TestMatrix() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

TestMatrix& TestMatrix::operator=(TestMatrix&& other) noexcept {
  std::swap(dtype_, other.dtype_);
  std::swap(rows_, other.rows_);
  std::swap(columns_, other.columns_);
  std::swap(gap_, other.gap_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(data_, other.data_);
  return *this;
}

void* TestMatrix::at(int64_t row, int64_t column) const {
  return data_ + (row * stride() + column) * ElementBytes(dtype_);
}

double TestMatrix::Get(int64_t row, int64_t column) const {
  if (dtype_ == DType::kBf16) {
    BFloat16 value;
    std::memcpy(&value, at(row, column), sizeof(value));
    return ToFloat(value);
  }
  float value;
  std::memcpy(&value, at(row, column), sizeof(value));
  return value;
}

void TestMatrix::Set(int64_t row, int64_t column, double value) {
  if (dtype_ == DType::kBf16) {
    const BFloat16 rounded = RoundToBFloat16(static_cast<float>(value));
    std::memcpy(at(row, column), &rounded, sizeof(rounded));
  } else {
    const auto rounded = static_cast<float>(value);
    std::memcpy(at(row, column), &rounded, sizeof(rounded));
  }
}

TestMatrix& TestMatrix::FillNormal(uint32_t seed, double deviation) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0.0, deviation);
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) Set(row, column, normal(generator));
  }
  return *this;
}

TestMatrix& TestMatrix::Fill(double value) {
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) Set(row, column, value);
  }
  return *this;
}

TestMatrix& TestMatrix::MakePositive() {
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      Set(row, column, std::abs(Get(row, column)));
    }
  }
  return *this;
}

bool TestMatrix::SurroundingsIntact() const {
  const auto poisoned = [](const std::byte* begin, const std::byte* end) {
    return std::all_of(begin, end, [](std::byte b) { return b == std::byte{kPoison}; });
  };
  if (!poisoned(mapping_, data_)) return false;
  for (int64_t row = 0; row + 1 < rows_; ++row) {
    const auto* end = static_cast<const std::byte*>(at(row, columns_));
    if (!poisoned(end, static_cast<const std::byte*>(at(row + 1)))) return false;
  }
  return true;
}

std::string TestMatrix::Bits() const {
  std::string bits;
  for (int64_t row = 0; row < rows_; ++row) {
    bits.append(static_cast<const char*>(at(row)), columns_ * ElementBytes(dtype_));
  }
  return bits;
}

Reference::Reference(const TestMatrix& matrix) : Reference(matrix.rows(), matrix.columns()) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      (*this)(row, column) = matrix.Get(row, column);
    }
  }
}

Reference Transposed(const Reference& a) {
  Reference result(a.columns, a.rows);
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t column = 0; column < a.columns; ++column) result(column, row) = a(row, column);
  }
  return result;
}

void AddProductNt(const Reference& a, const Reference& b, Reference& sum) {
  MOK_CHECK(a.columns == b.columns && sum.rows == a.rows && sum.columns == b.rows);
  for (int64_t row = 0; row < a.rows; ++row) {
    const double* left = &a.values[row * a.columns];
    for (int64_t column = 0; column < b.rows; ++column) {
      const double* right = &b.values[column * b.columns];
      double product = 0.0;
      for (int64_t k = 0; k < a.columns; ++k) product += left[k] * right[k];
      sum(row, column) += product;
    }
  }
}

RelativeError Compare(const TestMatrix& actual, const Reference& expected) {
  MOK_CHECK(actual.rows() == expected.rows && actual.columns() == expected.columns);
  RelativeError error = {0.0, 0.0};
  double all_errors = 0.0, all_values = 0.0;
  for (int64_t row = 0; row < expected.rows; ++row) {
    double row_errors = 0.0, row_values = 0.0;
    for (int64_t column = 0; column < expected.columns; ++column) {
      const double difference = actual.Get(row, column) - expected(row, column);
      row_errors += difference * difference;
      row_values += expected(row, column) * expected(row, column);
    }
    // Written so that a NaN becomes the result.
    const double relative = row_errors == 0.0 ? 0.0 : std::sqrt(row_errors / row_values);
    if (!(relative <= error.worst_row)) error.worst_row = relative;
    all_errors += row_errors;
    all_values += row_values;
  }
  error.whole = all_errors == 0.0 ? 0.0 : std::sqrt(all_errors / all_values);
  return error;
}

std::string Mismatch(const TestMatrix& actual, const Reference& expected) {
  const Tolerance tolerance = ToleranceFor(actual.dtype());
  const RelativeError error = Compare(actual, expected);
  std::string text;
  if (!(error.whole <= tolerance.whole)) {
    text += StrCat("relative error ", error.whole, ", accepted ", tolerance.whole, "; ");
  }
  if (!(error.worst_row <= tolerance.row)) {
    text += StrCat("worst row's error ", error.worst_row, ", accepted ", tolerance.row, "; ");
  }
  if (!actual.SurroundingsIntact()) text += "memory around the matrix was written; ";
  return text;
}

std::vector<IsaAndDType> AllIsasAndDTypes() {
  std::vector<IsaAndDType> all;
  for (const Isa isa : SupportedIsas()) {
    all.push_back({isa, DType::kBf16});
    all.push_back({isa, DType::kFp32});
  }
  return all;
}

std::string TestName(const IsaAndDType& parameter) {
  return StrCat(IsaName(parameter.isa), "_", DTypeName(parameter.dtype));
}

}  // namespace mok
