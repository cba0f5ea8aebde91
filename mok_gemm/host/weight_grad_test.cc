// TileWorker::WeightGrad: reference, carries, output dtypes, accumulation, no rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "mok_gemm/host/test_matrix.h"
#include "mok_gemm/host/tile_worker.h"

namespace mok {
namespace {

struct Extents {
  int64_t rows;
  int m, n;
};

class WeightGradTest : public testing::TestWithParam<IsaAndDType> {
 protected:
  TestMatrix Random(int64_t rows, int64_t columns, uint32_t seed) const {
    TestMatrix matrix(GetParam().dtype, rows, columns);
    matrix.FillNormal(seed);
    return matrix;
  }

  // The tile of all rows of a and b into out.
  static WeightGradTile Tile(const TestMatrix& a, const TestMatrix& b, const TestMatrix& out) {
    WeightGradTile tile;
    tile.a = a.at();
    tile.a_stride = a.stride();
    tile.b = b.at();
    tile.b_stride = b.stride();
    tile.rows = a.rows();
    tile.m = static_cast<int>(a.columns());
    tile.n = static_cast<int>(b.columns());
    tile.out = out.at();
    tile.out_stride = out.stride();
    tile.out_dtype = out.dtype();
    return tile;
  }

  static Reference Expected(const TestMatrix& a, const TestMatrix& b) {
    Reference expected(a.columns(), b.columns());
    AddProductNt(Transposed(Reference(a)), Transposed(Reference(b)), expected);
    return expected;
  }

  TileWorker worker_{GetParam().isa, GetParam().dtype};
};

INSTANTIATE_TEST_SUITE_P(AllIsas, WeightGradTest, testing::ValuesIn(AllIsasAndDTypes()),
                         [](const auto& info) { return TestName(info.param); });

TEST_P(WeightGradTest, MatchesReference) {
  std::vector<Extents> sizes;
  for (int64_t rows = 1; rows <= 130; ++rows) sizes.push_back({rows, 18, 34});
  for (int m = 1; m <= kHostGradTileRows; m += 3) sizes.push_back({17, m, 33});
  for (int n = 32; n <= kHostGradTileColumns; ++n) sizes.push_back({9, 20, n});
  for (const int64_t rows : {255, 511, 512, 513, 1025, 2049}) sizes.push_back({rows, 37, 65});
  sizes.push_back({700, kHostGradTileRows, kHostGradTileColumns});
  for (const Extents& size : sizes) {
    SCOPED_TRACE(testing::Message() << size.rows << " rows, " << size.m << " x " << size.n);
    const TestMatrix a = Random(size.rows, size.m, 1), b = Random(size.rows, size.n, 2);
    for (const DType out_dtype : {DType::kBf16, DType::kFp32}) {
      const TestMatrix out(out_dtype, size.m, size.n);
      worker_.WeightGrad(Tile(a, b, out));
      ASSERT_EQ(Mismatch(out, Expected(a, b)), "");
    }
  }
}

// Narrow results, on operands that do not cancel.
TEST_P(WeightGradTest, NarrowTilesMatchReference) {
  for (int n = 1; n < 32; ++n) {
    SCOPED_TRACE(n);
    TestMatrix a = Random(11, n == 7 ? 1 : 15, 1), b = Random(11, n, 2);
    a.MakePositive();
    b.MakePositive();
    const TestMatrix out(GetParam().dtype, a.columns(), n);
    worker_.WeightGrad(Tile(a, b, out));
    ASSERT_EQ(Mismatch(out, Expected(a, b)), "");
  }
}

// The carry continues the accumulation exactly: pieces give the bits of one run.
TEST_P(WeightGradTest, CarriedPiecesGiveTheBitsOfOneRun) {
  for (const int64_t rows : {256, 385, 640, 1291}) {
    const TestMatrix a = Random(rows, 70, 1), b = Random(rows, 45, 2);
    const TestMatrix whole(DType::kBf16, 70, 45), whole_fp32(DType::kFp32, 70, 45);
    worker_.WeightGrad(Tile(a, b, whole));
    worker_.WeightGrad(Tile(a, b, whole_fp32));
    for (const int64_t piece : {int64_t{kHostGradSplitRows}, int64_t{128}, int64_t{384}}) {
      SCOPED_TRACE(testing::Message() << rows << " rows in pieces of " << piece);
      const TestMatrix out(DType::kBf16, 70, 45), out_fp32(DType::kFp32, 70, 45);
      const TestMatrix carry(DType::kFp32, 70, 45);
      for (int64_t first = 0; first < rows; first += piece) {
        WeightGradTile tile = Tile(a, b, out);
        tile.a = a.at(first);
        tile.b = b.at(first);
        tile.rows = std::min(piece, rows - first);
        tile.carry_in = first > 0 ? static_cast<const float*>(carry.at()) : nullptr;
        tile.carry_stride = carry.stride();
        if (first + piece < rows) {
          tile.carry_out = static_cast<float*>(carry.at());
        } else {
          WeightGradTile last = tile;
          last.out = out_fp32.at();
          last.out_stride = out_fp32.stride();
          last.out_dtype = DType::kFp32;
          worker_.WeightGrad(last);
        }
        worker_.WeightGrad(tile);
      }
      ASSERT_EQ(out.Bits(), whole.Bits());
      ASSERT_EQ(out_fp32.Bits(), whole_fp32.Bits());
      ASSERT_TRUE(carry.SurroundingsIntact());
      ASSERT_TRUE(out.SurroundingsIntact());
    }
  }
}

// out += acc is one fp32 addition and one rounding.
TEST_P(WeightGradTest, AccumulatesOnceIntoOut) {
  const TestMatrix a = Random(129, 40, 1), b = Random(129, 50, 2);
  const TestMatrix acc(DType::kFp32, 40, 50);
  worker_.WeightGrad(Tile(a, b, acc));
  for (const DType out_dtype : {DType::kBf16, DType::kFp32}) {
    TestMatrix out(out_dtype, 40, 50), expected(out_dtype, 40, 50);
    out.FillNormal(3, 10.0);
    for (int r = 0; r < 40; ++r) {
      for (int c = 0; c < 50; ++c) {
        expected.Set(r, c, static_cast<float>(out.Get(r, c)) + static_cast<float>(acc.Get(r, c)));
      }
    }
    WeightGradTile tile = Tile(a, b, out);
    tile.accumulate = true;
    worker_.WeightGrad(tile);
    EXPECT_EQ(out.Bits(), expected.Bits());
    EXPECT_TRUE(out.SurroundingsIntact());
  }
}

TEST_P(WeightGradTest, NoRowsWriteZerosOrNothing) {
  for (const DType out_dtype : {DType::kBf16, DType::kFp32}) {
    TestMatrix out(out_dtype, 40, 50), zeros(out_dtype, 40, 50);
    zeros.Fill(0.0);
    const std::string poison = out.Bits();
    WeightGradTile tile;
    tile.m = 40;
    tile.n = 50;
    tile.out = out.at();
    tile.out_stride = out.stride();
    tile.out_dtype = out_dtype;
    tile.accumulate = true;
    worker_.WeightGrad(tile);
    EXPECT_EQ(out.Bits(), poison);
    tile.accumulate = false;
    worker_.WeightGrad(tile);
    EXPECT_EQ(out.Bits(), zeros.Bits());
    EXPECT_TRUE(out.SurroundingsIntact());
    // With accumulate, no rows still finish a carry.
    TestMatrix carry(DType::kFp32, 40, 50);
    carry.Fill(3.0);
    tile.carry_in = static_cast<const float*>(carry.at());
    tile.carry_stride = carry.stride();
    tile.accumulate = true;
    out.Fill(1.0);
    worker_.WeightGrad(tile);
    EXPECT_EQ(out.Bits(), zeros.Fill(4.0).Bits());
  }
}

// The address range of out may be read-only when accumulation has nothing to add.
TEST_P(WeightGradTest, NoRowsDoNotTouchOutWhenAccumulating) {
  WeightGradTile tile;
  tile.m = kHostGradTileRows;
  tile.n = kHostGradTileColumns;
  tile.out = nullptr;
  tile.out_stride = tile.n;
  tile.accumulate = true;
  worker_.WeightGrad(tile);
}

}  // namespace
}  // namespace mok
