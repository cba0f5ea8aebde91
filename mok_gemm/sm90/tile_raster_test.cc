#include "mok_gemm/sm90/tile_raster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace mok {
namespace {

using Half = std::tuple<int32_t, int32_t, int32_t, int32_t>;  // expert, block, tile, half

std::vector<TilePlace> AllPlaces(const TileRasterShape& shape) {
  TileRaster raster(shape);
  std::vector<TilePlace> places;
  TilePlace place;
  while (raster.Find(static_cast<int64_t>(places.size()), place)) places.push_back(place);
  return places;
}

std::multiset<Half> HalvesOf(const std::vector<TilePlace>& places) {
  std::multiset<Half> halves;
  for (const TilePlace& place : places) {
    for (int half = 0; half < 2; ++half) {
      const TilePart part = half == 0 ? TilePart::kFirstHalf : TilePart::kSecondHalf;
      if (place.part != TilePart::kWhole && place.part != part) continue;
      halves.insert({place.expert, place.row_block, place.column_tile, half});
    }
  }
  return halves;
}

TEST(TileRasterTest, VisitsEveryHalfTileOnce) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<int32_t> rows(1 + random() % 6);
    for (int32_t& count : rows)
      count = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 900);
    const TileRasterShape shape{rows.data(),
                                static_cast<int32_t>(rows.size()),
                                1 + static_cast<int32_t>(random() % 5),
                                random() % 2 == 0 ? 64 : 128,
                                1 + static_cast<int32_t>(random() % 5),
                                static_cast<int32_t>(random() % 9)};
    std::multiset<Half> expected;
    for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
      for (int32_t block = 0; block * shape.tile_rows < rows[expert]; ++block) {
        for (int32_t tile = 0; tile < shape.column_tiles; ++tile) {
          expected.insert({expert, block, tile, 0});
          expected.insert({expert, block, tile, 1});
        }
      }
    }
    EXPECT_EQ(HalvesOf(AllPlaces(shape)), expected);
  }
}

// A worker sees only every n-th index.
TEST(TileRasterTest, StridedWalksSeeWhatOneWalkSees) {
  const std::vector<int32_t> rows = {300, 0, 0, 1000, 64, 0};
  const TileRasterShape shape{rows.data(), 6, 3, 128, 4, 7};
  const std::vector<TilePlace> all = AllPlaces(shape);
  for (int64_t worker = 0; worker < 7; ++worker) {
    TileRaster raster(shape);
    TilePlace place;
    for (int64_t i = worker; raster.Find(i, place); i += 7) {
      ASSERT_LT(i, static_cast<int64_t>(all.size()));
      EXPECT_EQ(place.expert, all[i].expert);
      EXPECT_EQ(place.row_block, all[i].row_block);
      EXPECT_EQ(place.column_tile, all[i].column_tile);
      EXPECT_EQ(place.part, all[i].part);
    }
  }
}

TEST(TileRasterTest, ColumnTilesOuterAndRowBlocksInnerInPanelsOfOneExpert) {
  const std::vector<int32_t> rows = {5 * 128};  // panels of 3 and 2 blocks
  const std::vector<TilePlace> places = AllPlaces({rows.data(), 1, 2, 128, 3, 0});
  const std::vector<std::pair<int, int>> expected = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1},
                                                     {2, 1}, {3, 0}, {4, 0}, {3, 1}, {4, 1}};
  ASSERT_EQ(places.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(places[i].row_block, expected[i].first);
    EXPECT_EQ(places[i].column_tile, expected[i].second);
  }
}

TEST(TileRasterTest, SplitsTheLastWaveWhenHalfTilesFitInto) {
  const std::vector<int32_t> rows = {10 * 128};
  // 10 tiles: 8 workers leave 2, which become 4 halves; 7 leave 3; 6 leave 4, too many to split.
  auto halves = [&](int32_t workers) {
    const std::vector<TilePlace> places = AllPlaces({rows.data(), 1, 1, 128, 24, workers});
    return std::count_if(places.begin(), places.end(),
                         [](const TilePlace& p) { return p.part != TilePart::kWhole; });
  };
  EXPECT_EQ(halves(8), 4);
  EXPECT_EQ(halves(7), 6);
  EXPECT_EQ(halves(6), 0);
  EXPECT_EQ(halves(5), 0);
  EXPECT_EQ(halves(100), 20);
  EXPECT_EQ(halves(0), 0);
}

}  // namespace
}  // namespace mok
