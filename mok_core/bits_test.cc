#include "mok_core/bits.h"

#include <gtest/gtest.h>

namespace mok {
namespace {

TEST(BitsTest, CeilDivAndRoundUp) {
  EXPECT_EQ(CeilDiv(0, 128), 0);
  EXPECT_EQ(CeilDiv(1, 128), 1);
  EXPECT_EQ(CeilDiv(128, 128), 1);
  EXPECT_EQ(CeilDiv(129, 128), 2);
  EXPECT_EQ(RoundUp(0, 8), 0);
  EXPECT_EQ(RoundUp(9, 8), 16);
  // No overflow in between, right up to the end of the type.
  EXPECT_EQ(CeilDiv<int64_t>(INT64_MAX, 2), int64_t{1} << 62);
  EXPECT_EQ(CeilDiv<uint64_t>(UINT64_MAX, UINT64_MAX), 1u);
  static_assert(RoundUp<int64_t>((int64_t{1} << 40) + 1, 128) == (int64_t{1} << 40) + 128);
}

TEST(BitsTest, ReverseBitsOfEveryWidth) {
  for (int num_bits = 0; num_bits <= 32; ++num_bits) {
    for (int bit = 0; bit < 32; ++bit) {
      const uint32_t expected = bit < num_bits ? 1u << (num_bits - 1 - bit) : 0;
      EXPECT_EQ(ReverseBits(1u << bit, num_bits), expected) << num_bits << " " << bit;
    }
  }
  static_assert(ReverseBits(0b0011, 4) == 0b1100);
}

TEST(BitsTest, ReverseBitsIsAnInvolution) {
  for (uint32_t value = 0; value < (1u << 12); ++value) {
    EXPECT_EQ(ReverseBits(ReverseBits(value, 12), 12), value);
  }
}

TEST(BitsTest, CeilLog2) {
  EXPECT_EQ(CeilLog2(0), 0);
  EXPECT_EQ(CeilLog2(1), 0);
  EXPECT_EQ(CeilLog2(2), 1);
  EXPECT_EQ(CeilLog2(3), 2);
  for (int bits = 2; bits < 64; ++bits) {
    EXPECT_EQ(CeilLog2(uint64_t{1} << bits), bits);
    EXPECT_EQ(CeilLog2((uint64_t{1} << bits) - 1), bits);
    EXPECT_EQ(CeilLog2((uint64_t{1} << bits) + 1), bits + 1);
  }
  EXPECT_EQ(CeilLog2(UINT64_MAX), 64);
}

TEST(BitsTest, BitCast) {
  static_assert(BitCast<uint32_t>(1.0f) == 0x3F800000u);
  static_assert(BitCast<float>(0x40000000u) == 2.0f);
}

}  // namespace
}  // namespace mok
