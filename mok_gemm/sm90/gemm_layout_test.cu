// The worker's operand tiles and accumulator fragments against CuTe's.
#include <gtest/gtest.h>

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "mok_core/device/descriptor.h"
#include "mok_gemm/sm90/gemm_config.h"

namespace mok {
namespace {

using cute::Int;
using Config = DefaultSm90GemmConfig<ColumnOrder::kPermuted>;

// Byte offsets of the corners at which wgmma descriptors point, in a tile of kRows rows as CuTe
// lays it out.
template <int kRows>
void ExpectDescriptorSteps(uint32_t warpgroup_bytes) {
  using Atom = cute::GMMA::Layout_K_SW128_Atom<cute::bfloat16_t>;
  const auto layout = cute::as_position_independent_swizzle_layout(
      cute::tile_to_shape(Atom{}, cute::make_shape(Int<kRows>{}, Int<Config::kTileK>{})));
  for (int warpgroup = 0; warpgroup * Config::kWarpgroupM < kRows; ++warpgroup) {
    for (int step = 0; step < Config::kTileK / 16; ++step) {
      const auto bytes =
          static_cast<uint32_t>(layout(warpgroup * Config::kWarpgroupM, step * 16)) * 2;
      EXPECT_EQ(bytes, warpgroup * warpgroup_bytes + step * 32);
    }
  }
  EXPECT_EQ(static_cast<uint32_t>(cute::cosize(layout)) * 2, kRows * Config::kTileK * 2);
}

TEST(GemmLayoutTest, TilesAndKStepsLieAsCuteLaysThem) {
  ExpectDescriptorSteps<Config::kTileM>(Config::kABoxBytes);
  // Second half of B: 128 rows on, two warpgroups' worth of rows.
  ExpectDescriptorSteps<Config::kTileN>(Config::kBBoxBytes / 2);
  EXPECT_EQ(Config::kBBoxBytes, Config::kHalfN * 128u);
}

// MN-major operands: boxes of 64 columns by kTileK rows of K, box after box; the corners at which
// descriptors point for each step of K, and the boxes that their leading offset steps over.
TEST(GemmLayoutTest, MnMajorBoxesAndKStepsLieAsCuteLaysThem) {
  using Atom = cute::GMMA::Layout_MN_SW128_Atom<cute::bfloat16_t>;
  const auto layout = cute::as_position_independent_swizzle_layout(
      cute::tile_to_shape(Atom{}, cute::make_shape(Int<Config::kTileN>{}, Int<Config::kTileK>{}),
                          cute::Step<cute::_2, cute::_1>{}));
  const OperandLayout ours = MnMajorLayout(Swizzle::k128, Config::kTileK);
  EXPECT_EQ(ours.leading_bytes, Config::kABoxBytes);  // of one warpgroup of A
  EXPECT_EQ(Config::kTileN / 64 * ours.leading_bytes, Config::kBBytes);
  for (int box = 0; box < Config::kTileN / 64; ++box) {
    for (int step = 0; step < Config::kTileK / 16; ++step) {
      const auto bytes = static_cast<uint32_t>(layout(box * 64, step * 16)) * 2;
      EXPECT_EQ(bytes, box * ours.leading_bytes + step * 16 * 128);
    }
  }
}

struct Element {
  int row, column;
};

// What register i of a thread holds, according to CuTe: its layouts number a 64 x N tile by
// columns.
template <class Layout>
Element CuteElement(const Layout& layout, int thread, int i) {
  const int index = static_cast<int>(layout(thread, i));
  return {index % 64, index / 64};
}

// What epilogue.h takes it for.
Element OurElement(int thread, int i) {
  const int lane = thread % 32, j = i / 4, half = i / 2 % 2, b = i % 2;
  return {thread / 32 * 16 + lane / 4 + 8 * half, 8 * j + 2 * (lane % 4) + b};
}

template <class Layout>
void ExpectFragment(const Layout& layout, int registers) {
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < registers; ++i) {
      const Element want = CuteElement(layout, thread, i), got = OurElement(thread, i);
      ASSERT_EQ(got.row, want.row) << thread << " " << i;
      ASSERT_EQ(got.column, want.column) << thread << " " << i;
    }
  }
}

TEST(GemmLayoutTest, FragmentsAreThoseOfCute) {
  ExpectFragment(cute::SM90::GMMA::CLayout_64x256{}, 128);
  ExpectFragment(cute::SM90::GMMA::CLayout_64x128{}, 64);
  ExpectFragment(cute::SM90::GMMA::CLayout_64x64{}, 32);
}

// Shared-memory row n of a permuted tile holds this matrix row (ColumnOrder::kPermuted).
int PermutedColumn(int n) { return n / 32 * 32 + n / 2 % 4 * 8 + n / 8 % 4 * 2 + n % 2; }

TEST(GemmLayoutTest, PermutedTilesGiveThreadsAdjacentColumns) {
  for (int thread = 0; thread < 128; ++thread) {
    for (int group = 0; group < Config::kTileN / 32; ++group) {
      for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < 8; ++k) {  // in the order in which PackColumns takes them
          const int i = 16 * group + 4 * (k / 2) + 2 * half + k % 2;
          const int column = PermutedColumn(OurElement(thread, i).column);
          EXPECT_EQ(column, 32 * group + thread % 4 * 8 + k);
        }
      }
    }
  }
}

}  // namespace
}  // namespace mok
