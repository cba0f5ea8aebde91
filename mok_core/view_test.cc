#include "mok_core/view.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace mok {
namespace {

TEST(ViewTest, IndexesRowMajorWithAStride) {
  std::vector<int> data(5 * 7);
  std::iota(data.begin(), data.end(), 0);
  const MatrixView<int> view{data.data(), 5, 4, 7};
  EXPECT_EQ(view(0, 0), 0);
  EXPECT_EQ(view(2, 3), 17);
  EXPECT_EQ(view.Row(4), data.data() + 28);
  EXPECT_FALSE(view.IsContiguous());
  view(1, 1) = -1;
  EXPECT_EQ(data[8], -1);
}

TEST(ViewTest, BlockOfABlock) {
  std::vector<int> data(6 * 10);
  std::iota(data.begin(), data.end(), 0);
  const MatrixView<int> view = ContiguousMatrix(data.data(), 6, 10);
  EXPECT_TRUE(view.IsContiguous());
  const MatrixView<int> block = view.Block(1, 4, 2, 6).Block(1, 2, 3, 2);
  EXPECT_EQ(block.rows, 2);
  EXPECT_EQ(block.columns, 2);
  EXPECT_EQ(block.row_stride, 10);
  EXPECT_EQ(block(0, 0), 25);
  EXPECT_EQ(block(1, 1), 36);
}

TEST(ViewTest, WritableConvertsToReadOnly) {
  float value = 2;
  const MatrixView<const float> view = ContiguousMatrix(&value, 1, 1);
  EXPECT_EQ(view(0, 0), 2);
  static_assert(!std::is_convertible_v<MatrixView<const float>, MatrixView<float>>);
  static_assert(!std::is_convertible_v<ConstUntypedMatrix, UntypedMatrix>);
}

TEST(ViewTest, OffsetsBeyond32Bits) {
  // Nothing is accessed: only addresses are compared.
  constexpr uintptr_t kBase = 0x10000;
  const MatrixView<BFloat16> view{reinterpret_cast<BFloat16*>(kBase), int64_t{1} << 20,
                                  int64_t{1} << 14, int64_t{1} << 14};
  const auto address = reinterpret_cast<uintptr_t>(view.Row((int64_t{1} << 20) - 1));
  EXPECT_EQ(address - kBase, ((uintptr_t{1} << 20) - 1) << 15);
}

TEST(UntypedMatrixTest, AddressesByDtype) {
  std::vector<uint8_t> bytes(4096);
  for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kE4m3, DType::kE8m0}) {
    const UntypedMatrix matrix{bytes.data(), 4, 8, 10, dtype};
    const auto* origin = reinterpret_cast<std::byte*>(bytes.data());
    EXPECT_EQ(matrix.At(2, 3) - origin, 23 * ElementBytes(dtype));
    EXPECT_EQ(matrix.row_bytes(), 8 * ElementBytes(dtype));
    const ConstUntypedMatrix block = matrix.Block(1, 2, 5, 3);
    EXPECT_EQ(block.At(0, 0), matrix.At(1, 5));
    EXPECT_EQ(block.columns, 3);
    EXPECT_EQ(block.dtype, dtype);
  }
}

TEST(UntypedMatrixTest, TypedViewIsTheSameMatrix) {
  std::vector<float> data(20);
  std::iota(data.begin(), data.end(), 0.0f);
  const UntypedMatrix matrix{data.data(), 4, 3, 5, DType::kFp32};
  const MatrixView<float> view = matrix.As<float>();
  EXPECT_EQ(view(3, 2), 17.0f);
  const ConstUntypedMatrix read_only = matrix;
  static_assert(std::is_same_v<decltype(read_only.As<float>()), MatrixView<const float>>);
  EXPECT_EQ(read_only.As<float>()(1, 1), 6.0f);
}

}  // namespace
}  // namespace mok
