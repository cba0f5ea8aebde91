#include "mok_core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace mok {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

uint32_t Bits(float value) { return BitCast<uint32_t>(value); }
float FromBits(uint32_t bits) { return BitCast<float>(bits); }

// Floats that matter to a rounding with few mantissa bits: every pattern of the upper half, with
// the lower half zero, one, around the tie, and full; then a stride through all 2^32 patterns.
template <class Visit>
void ForEachInterestingFloat(Visit visit) {
  for (uint32_t upper = 0; upper < 0x10000u; ++upper) {
    for (const uint32_t lower : {0x0u, 0x1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      visit(FromBits((upper << 16) | lower));
    }
  }
  constexpr uint64_t kStride = 2017;  // prime: all mantissa tails appear with all exponents
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStride) {
    visit(FromBits(static_cast<uint32_t>(bits)));
  }
}

TEST(DTypeTest, SizesAndNames) {
  EXPECT_EQ(ElementBytes(DType::kBf16), 2);
  EXPECT_EQ(ElementBytes(DType::kFp32), 4);
  EXPECT_EQ(ElementBytes(DType::kE4m3), 1);
  EXPECT_EQ(ElementBytes(DType::kE8m0), 1);
  EXPECT_EQ(ElementBytes(static_cast<DType>(9)), 0);
  EXPECT_STREQ(DTypeName(DType::kBf16), "bf16");
  EXPECT_STREQ(DTypeName(DType::kFp32), "fp32");
  EXPECT_STREQ(DTypeName(DType::kE4m3), "e4m3");
  EXPECT_STREQ(DTypeName(DType::kE8m0), "e8m0");
  EXPECT_STREQ(DTypeName(static_cast<DType>(9)), "unknown");
  static_assert(sizeof(BFloat16) == 2 && sizeof(Float8E4M3) == 1 && sizeof(Float8E8M0) == 1);
}

// The value of a bf16 from its fields, by arithmetic rather than by shifting bits.
double BFloat16Value(uint16_t bits) {
  const double sign = (bits >> 15) != 0 ? -1 : 1;
  const int exponent = (bits >> 7) & 0xFF;
  const int mantissa = bits & 0x7F;
  if (exponent == 0) return sign * std::ldexp(mantissa, -126 - 7);
  return sign * std::ldexp(128 + mantissa, exponent - 127 - 7);
}

TEST(BFloat16Test, AllValuesRoundTrip) {
  for (uint32_t code = 0; code < 0x10000u; ++code) {
    const BFloat16 value{static_cast<uint16_t>(code)};
    const float wide = ToFloat(value);
    if (IsNan(value)) {
      EXPECT_TRUE(std::isnan(wide));
      // Quiet on the way back, otherwise unchanged.
      EXPECT_EQ(RoundToBFloat16(wide).bits, code | 0x40u);
      continue;
    }
    EXPECT_EQ(RoundToBFloat16(wide), value);
    EXPECT_EQ(std::signbit(wide), (code & 0x8000u) != 0);
    if ((code & 0x7FFFu) == 0x7F80u) {
      EXPECT_TRUE(std::isinf(wide));
    } else {
      EXPECT_EQ(static_cast<double>(wide), BFloat16Value(value.bits));
    }
  }
}

// Nearest of the two neighbours of |value|, in exact double arithmetic; the even one on a tie. The
// code after the largest finite one stands for 2^128, which is read as Inf.
uint16_t NearestBFloat16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value)) return sign | 0x7F80;
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto below = static_cast<uint16_t>(Bits(std::fabs(value)) >> 16);
  const auto above = static_cast<uint16_t>(below + 1);
  const double to_below = magnitude - BFloat16Value(below);
  const double to_above = BFloat16Value(above) - magnitude;
  if (to_below == to_above) return sign | ((below & 1) == 0 ? below : above);
  return sign | (to_below < to_above ? below : above);
}

TEST(BFloat16Test, RoundsToNearestEven) {
  int64_t mismatches = 0;
  ForEachInterestingFloat([&](float value) {
    const BFloat16 rounded = RoundToBFloat16(value);
    if (std::isnan(value)) {
      // Still a NaN of the same sign, and a quiet one.
      const bool good = IsNan(rounded) && (rounded.bits & 0x40u) != 0 &&
                        (rounded.bits >> 15) == (Bits(value) >> 31);
      mismatches += good ? 0 : 1;
    } else {
      mismatches += rounded.bits == NearestBFloat16(value) ? 0 : 1;
    }
  });
  EXPECT_EQ(mismatches, 0);
}

TEST(BFloat16Test, RandomFloatsRoundToNearestEven) {
  std::mt19937 random(20240101);
  for (int i = 0; i < 2'000'000; ++i) {
    const float value = FromBits(static_cast<uint32_t>(random()));
    if (std::isnan(value)) continue;
    ASSERT_EQ(RoundToBFloat16(value).bits, NearestBFloat16(value)) << std::hexfloat << value;
  }
}

TEST(BFloat16Test, EdgeCases) {
  static_assert(RoundToBFloat16(1.0f).bits == 0x3F80);
  static_assert(ToFloat(BFloat16{0x3F80}) == 1.0f);
  EXPECT_EQ(RoundToBFloat16(0.0f).bits, 0x0000);
  EXPECT_EQ(RoundToBFloat16(-0.0f).bits, 0x8000);
  EXPECT_EQ(RoundToBFloat16(kInf).bits, 0x7F80);
  EXPECT_EQ(RoundToBFloat16(-kInf).bits, 0xFF80);
  EXPECT_EQ(RoundToBFloat16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(RoundToBFloat16(FromBits(0x7F7F7FFFu)).bits, 0x7F7F);  // just below the overflow tie
  EXPECT_EQ(RoundToBFloat16(FromBits(0x7F7F8000u)).bits, 0x7F80);
  EXPECT_EQ(RoundToBFloat16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  EXPECT_EQ(RoundToBFloat16(FromBits(0x00008000u)).bits, 0x0000);  // tie to even zero
  EXPECT_EQ(RoundToBFloat16(FromBits(0x00008001u)).bits, 0x0001);
  EXPECT_EQ(RoundToBFloat16(FromBits(0x00018000u)).bits, 0x0002);  // tie to even two
  EXPECT_EQ(RoundToBFloat16(FromBits(0x7F800001u)).bits, 0x7FC0);  // signalling, low payload
  EXPECT_EQ(RoundToBFloat16(FromBits(0xFFFFFFFFu)).bits, 0xFFFF);
}

// The values of the 127 non-negative finite codes, from their fields.
std::vector<double> Float8E4M3Magnitudes() {
  std::vector<double> values;
  for (int code = 0; code < 0x7F; ++code) {
    const int exponent = code >> 3;
    const int mantissa = code & 7;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, -9)
                                   : std::ldexp(8 + mantissa, exponent - 7 - 3));
  }
  return values;
}

TEST(Float8E4M3Test, AllCodes) {
  const std::vector<double> magnitudes = Float8E4M3Magnitudes();
  for (int code = 0; code < 256; ++code) {
    const Float8E4M3 value{static_cast<uint8_t>(code)};
    const float wide = ToFloat(value);
    EXPECT_EQ(std::signbit(wide), code >= 128);
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(IsNan(value));
      EXPECT_TRUE(std::isnan(wide));
      EXPECT_EQ(RoundToFloat8E4M3(wide).bits, 0x7F);
      continue;
    }
    EXPECT_FALSE(IsNan(value));
    EXPECT_EQ(std::fabs(wide), magnitudes[static_cast<size_t>(code & 0x7F)]);
    EXPECT_EQ(RoundToFloat8E4M3(wide), value);
  }
  EXPECT_EQ(magnitudes.back(), kFloat8E4M3Max);
}

// Searches all magnitudes for the nearest; the even code on a tie, the largest beyond all.
uint8_t NearestFloat8E4M3(float value, const std::vector<double>& magnitudes) {
  const double magnitude = std::fabs(static_cast<double>(value));
  size_t best = 0;
  for (size_t code = 1; code < magnitudes.size(); ++code) {
    const double distance = std::fabs(magnitudes[code] - magnitude);
    const double best_distance = std::fabs(magnitudes[best] - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  if (std::isinf(value)) best = magnitudes.size() - 1;
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80u : 0u));
}

TEST(Float8E4M3Test, RoundsToNearestEvenAndSaturates) {
  const std::vector<double> magnitudes = Float8E4M3Magnitudes();
  int64_t mismatches = 0;
  ForEachInterestingFloat([&](float value) {
    const uint8_t expected = std::isnan(value) ? 0x7F : NearestFloat8E4M3(value, magnitudes);
    mismatches += RoundToFloat8E4M3(value).bits == expected ? 0 : 1;
  });
  EXPECT_EQ(mismatches, 0);
}

TEST(Float8E4M3Test, EveryTieAndItsNeighbours) {
  const std::vector<double> magnitudes = Float8E4M3Magnitudes();
  for (size_t code = 0; code + 1 < magnitudes.size(); ++code) {
    const auto tie = static_cast<float>((magnitudes[code] + magnitudes[code + 1]) / 2);
    const uint8_t even = static_cast<uint8_t>(code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(RoundToFloat8E4M3(tie).bits, even);
    EXPECT_EQ(RoundToFloat8E4M3(-tie).bits, even | 0x80);
    EXPECT_EQ(RoundToFloat8E4M3(std::nextafter(tie, 0.0f)).bits, code);
    EXPECT_EQ(RoundToFloat8E4M3(std::nextafter(tie, kInf)).bits, code + 1);
  }
}

TEST(Float8E4M3Test, EdgeCases) {
  static_assert(RoundToFloat8E4M3(1.0f).bits == 0x38);
  static_assert(ToFloat(Float8E4M3{0x01}) == 0x1p-9f);
  for (const float large : {448.0f, 449.0f, 463.9f, 464.0f, 480.0f, 1e30f, kInf}) {
    EXPECT_EQ(RoundToFloat8E4M3(large).bits, 0x7E);
    EXPECT_EQ(RoundToFloat8E4M3(-large).bits, 0xFE);
  }
  EXPECT_EQ(RoundToFloat8E4M3(-0.0f).bits, 0x80);
  EXPECT_EQ(RoundToFloat8E4M3(0x1p-10f).bits, 0x00);  // tie to even zero
  EXPECT_EQ(RoundToFloat8E4M3(std::nextafter(0x1p-10f, 1.0f)).bits, 0x01);
  EXPECT_EQ(RoundToFloat8E4M3(std::numeric_limits<float>::denorm_min()).bits, 0x00);
}

TEST(Float8E8M0Test, AllCodes) {
  for (int code = 0; code < 255; ++code) {
    const Float8E8M0 value{static_cast<uint8_t>(code)};
    EXPECT_FALSE(IsNan(value));
    EXPECT_EQ(static_cast<double>(ToFloat(value)), std::ldexp(1.0, code - 127));
    EXPECT_EQ(RoundUpToFloat8E8M0(ToFloat(value)), value);
  }
  EXPECT_TRUE(IsNan(kFloat8E8M0Nan));
  EXPECT_TRUE(std::isnan(ToFloat(kFloat8E8M0Nan)));
  EXPECT_EQ(RoundUpToFloat8E8M0(ToFloat(kFloat8E8M0Nan)), kFloat8E8M0Nan);
}

TEST(Float8E8M0Test, RoundsUp) {
  int64_t mismatches = 0;
  ForEachInterestingFloat([&](float value) {
    int expected = 255;
    if (value >= 0 && value <= 0x1p127f) {
      expected = 0;
      while (std::ldexp(1.0, expected - 127) < static_cast<double>(value)) ++expected;
    }
    mismatches += RoundUpToFloat8E8M0(value).bits == expected ? 0 : 1;
  });
  EXPECT_EQ(mismatches, 0);
}

TEST(Float8E8M0Test, EdgeCases) {
  EXPECT_EQ(RoundUpToFloat8E8M0(0.0f).bits, 0);
  EXPECT_EQ(RoundUpToFloat8E8M0(-0.0f).bits, 0);
  EXPECT_EQ(RoundUpToFloat8E8M0(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(RoundUpToFloat8E8M0(std::nextafter(0x1p-127f, 1.0f)).bits, 1);
  EXPECT_EQ(RoundUpToFloat8E8M0(1.0f).bits, 127);
  EXPECT_EQ(RoundUpToFloat8E8M0(std::nextafter(1.0f, 2.0f)).bits, 128);
  EXPECT_EQ(RoundUpToFloat8E8M0(0x1p127f).bits, 254);
  EXPECT_EQ(RoundUpToFloat8E8M0(std::nextafter(0x1p127f, kInf)).bits, 255);
  EXPECT_EQ(RoundUpToFloat8E8M0(kInf).bits, 255);
  EXPECT_EQ(RoundUpToFloat8E8M0(-1.0f).bits, 255);
}

}  // namespace
}  // namespace mok
