#include "mok_gemm/sm90/tensor_maps.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "mok_gemm/sm90/gemm_task.h"

namespace mok {
namespace {

using runtime::TensorMapSpec;

const auto* const kBase = reinterpret_cast<const BFloat16*>(0x1000);

// Matrix rows, in the order in which a load of the box at `coordinate` (of the outermost dimension)
// leaves them in shared memory.
std::vector<int64_t> RowsOfBox(const TensorMapSpec& spec, int64_t coordinate) {
  const auto row_bytes = static_cast<int64_t>(spec.dimensions[0]) * 2;
  std::vector<int64_t> rows = {coordinate * static_cast<int64_t>(spec.strides[spec.rank - 2]) /
                               row_bytes};
  for (int i = 1; i < spec.rank; ++i) {  // dimension 1 varies fastest: build from it outwards
    std::vector<int64_t> grown;
    for (uint32_t at = 0; at < spec.box[i]; ++at) {
      for (int64_t row : rows) {
        grown.push_back(row + at * static_cast<int64_t>(spec.strides[i - 1]) / row_bytes);
      }
    }
    rows = grown;
  }
  return rows;
}

TEST(TensorMapsTest, PermutedBoxHoldsRowsInTheDocumentedOrder) {
  const auto spec = WeightMapSpec({kBase, 3, 160, 72}, ColumnOrder::kPermuted, 128);
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(runtime::ValidateTensorMapSpec(*spec), OkStatus());
  constexpr int kExpert = 2, kColumn = 32;
  const WeightCoordinate at = WeightTileCoordinate(ColumnOrder::kPermuted, kExpert, kColumn, 160);
  EXPECT_EQ(at.expert, 0);
  const std::vector<int64_t> rows = RowsOfBox(*spec, at.row);
  ASSERT_EQ(rows.size(), 128u);
  for (int row = 0; row < 128; ++row) {
    const int g = row / 32, j = row / 8 % 4, q = row / 2 % 4, b = row % 2;
    EXPECT_EQ(rows[row], kExpert * 160 + kColumn + 32 * g + 8 * q + 2 * j + b);
  }
}

TEST(TensorMapsTest, PermutedMapCoversEveryRowOnce) {
  const auto spec = WeightMapSpec({kBase, 2, 96, 64}, ColumnOrder::kPermuted, 32).value();
  std::multiset<int64_t> seen;
  for (uint64_t g = 0; g < spec.dimensions[4]; ++g) {
    for (int64_t row : RowsOfBox(spec, static_cast<int64_t>(g))) seen.insert(row);
  }
  ASSERT_EQ(seen.size(), 192u);
  int64_t expected = 0;
  for (int64_t row : seen) EXPECT_EQ(row, expected++);
}

TEST(TensorMapsTest, NaturalMapHasExpertsAsADimension) {
  const auto spec = WeightMapSpec({kBase, 5, 136, 200}, ColumnOrder::kNatural, 128).value();
  ASSERT_EQ(runtime::ValidateTensorMapSpec(spec), OkStatus());
  EXPECT_EQ(spec.rank, 3);
  EXPECT_EQ(spec.dimensions[1], 136u);
  EXPECT_EQ(spec.dimensions[2], 5u);
  EXPECT_EQ(spec.strides[1], 136u * 200 * 2);
  EXPECT_EQ(spec.box[1], 128u);
  EXPECT_EQ(spec.box[2], 1u);
  const WeightCoordinate at = WeightTileCoordinate(ColumnOrder::kNatural, 4, 128, 136);
  EXPECT_EQ(at.expert, 4);
  EXPECT_EQ(at.row, 128);
}

TEST(TensorMapsTest, ActivationMapMovesTheRowsOfOneWarpgroup) {
  const auto spec = ActivationMapSpec(kBase, 77, 200, 208).value();
  ASSERT_EQ(runtime::ValidateTensorMapSpec(spec), OkStatus());
  EXPECT_EQ(spec.dimensions[0], 200u);
  EXPECT_EQ(spec.dimensions[1], 77u);
  EXPECT_EQ(spec.strides[0], 416u);
  using Config = DefaultSm90GemmConfig<ColumnOrder::kNatural>;
  EXPECT_EQ(spec.box[0] * spec.box[1] * 2, Config::kABoxBytes);
  EXPECT_EQ(spec.box[1], static_cast<uint32_t>(Config::kWarpgroupM));
}

void ExpectError(const StatusOr<TensorMapSpec>& spec, const char* text) {
  ASSERT_FALSE(spec.ok());
  EXPECT_EQ(spec.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(spec.status().message().find(text), std::string::npos) << spec.status();
}

TEST(TensorMapsTest, ErrorsNameTheFieldAndItsValue) {
  ExpectError(ActivationMapSpec(kBase, 0, 64, 64), "rows = 0");
  ExpectError(ActivationMapSpec(kBase, 1, 63, 64), "k = 63");
  ExpectError(ActivationMapSpec(kBase, 1, 64, 68), "row_stride = 68");
  ExpectError(ActivationMapSpec(kBase, 1, 64, 56), "less than k = 64");
  const auto natural = ColumnOrder::kNatural;
  ExpectError(WeightMapSpec({kBase, 0, 64, 64}, natural, 128), "experts = 0");
  ExpectError(WeightMapSpec({kBase, 1, 60, 64}, natural, 128), "n = 60");
  ExpectError(WeightMapSpec({kBase, 1, 64, 12}, natural, 128), "k = 12");
  ExpectError(WeightMapSpec({kBase, 1 << 20, 1 << 12, 64}, natural, 128), "experts * n");
  ExpectError(WeightMapSpec({kBase, 1, 40, 64}, ColumnOrder::kPermuted, 128), "n = 40");
}

TEST(TensorMapsTest, PermutedOrderNeedsEveryWidth) {
  EXPECT_EQ(SelectColumnOrder(2048, 7168), ColumnOrder::kPermuted);
  EXPECT_EQ(SelectColumnOrder(2048, 7176), ColumnOrder::kNatural);
  EXPECT_EQ(SelectColumnOrder(8), ColumnOrder::kNatural);
}

TEST(TensorMapsTest, ContractedWeightsAreBoxesOfOneExpert) {
  const auto spec = ContractedWeightMapSpec({kBase, 3, 72, 40});
  ASSERT_TRUE(spec.ok());
  ASSERT_EQ(spec->rank, 3);
  const uint64_t dimensions[] = {40, 72, 3}, strides[] = {40 * 2, 72 * 40 * 2};
  const uint32_t box[] = {64, 64, 1};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(spec->dimensions[i], dimensions[i]);
    EXPECT_EQ(spec->box[i], box[i]);
    if (i > 0) {
      EXPECT_EQ(spec->strides[i - 1], strides[i - 1]);
    }
  }
  EXPECT_TRUE(runtime::ValidateTensorMapSpec(*spec).ok());
  EXPECT_FALSE(ContractedWeightMapSpec({kBase, 3, 71, 40}).ok());
  EXPECT_FALSE(ContractedWeightMapSpec({kBase, 3, 72, 41}).ok());
  EXPECT_FALSE(ContractedWeightMapSpec({kBase, 0, 72, 40}).ok());
}

}  // namespace
}  // namespace mok
