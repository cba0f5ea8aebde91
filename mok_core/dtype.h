// Element types and their conversions. Everything is constexpr and runs on host and device; the
// tests visit every bf16 value and every code of the 8-bit types.
//
// Formats: bf16 = upper half of an IEEE binary32; E4M3 and E8M0 as in the OCP Microscaling Formats
// (MX) Specification v1.0, sections 5.3.1 and 5.4.1.
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/macros.h"

namespace mok {

// The values are part of the C API: append, never renumber.
enum class DType : int32_t { kBf16 = 0, kFp32 = 1, kE4m3 = 2, kE8m0 = 3 };

// Bytes of one element; 0 for a value that is no DType.
MOK_HOST_DEVICE constexpr int64_t ElementBytes(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return 2;
    case DType::kFp32:
      return 4;
    case DType::kE4m3:
    case DType::kE8m0:
      return 1;
  }
  return 0;
}

// "bf16", "fp32", "e4m3", "e8m0"; "unknown" for a value that is no DType.
constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "bf16";
    case DType::kFp32:
      return "fp32";
    case DType::kE4m3:
      return "e4m3";
    case DType::kE8m0:
      return "e8m0";
  }
  return "unknown";
}

// 1 sign, 8 exponent, 7 mantissa bits; Inf and NaN as in binary32.
struct BFloat16 {
  uint16_t bits;
  friend constexpr bool operator==(BFloat16, BFloat16) = default;  // of bits, not of values
};

// 1 sign, 4 exponent (bias 7), 3 mantissa bits; no Inf; 0x7F and 0xFF are NaN; largest 448,
// smallest normal 2^-6, smallest subnormal 2^-9.
struct Float8E4M3 {
  uint8_t bits;
  friend constexpr bool operator==(Float8E4M3, Float8E4M3) = default;
};

// An unsigned power of two, 2^(bits - 127); 0xFF is NaN; there is no zero.
struct Float8E8M0 {
  uint8_t bits;
  friend constexpr bool operator==(Float8E8M0, Float8E8M0) = default;
};

inline constexpr float kFloat8E4M3Max = 448.0f;
inline constexpr Float8E8M0 kFloat8E8M0Nan{0xFF};

// Exact.
MOK_HOST_DEVICE constexpr float ToFloat(float value) { return value; }

// Exact; a NaN keeps its sign and payload.
MOK_HOST_DEVICE constexpr float ToFloat(BFloat16 value) {
  return BitCast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Exact; both NaN codes give a quiet NaN of their sign.
MOK_HOST_DEVICE constexpr float ToFloat(Float8E4M3 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 24;
  const uint32_t exponent = (value.bits >> 3) & 0xFu;
  const uint32_t mantissa = value.bits & 0x7u;
  if (exponent == 0xF && mantissa == 0x7) return BitCast<float>(sign | 0x7FC00000u);
  if (exponent == 0) {  // subnormal: mantissa * 2^-9; keeps the sign of zero
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return BitCast<float>(sign | BitCast<uint32_t>(magnitude));
  }
  return BitCast<float>(sign | ((exponent + 127 - 7) << 23) | (mantissa << 20));
}

// Exact: 2^(bits - 127), whose smallest value 2^-127 is a subnormal float; quiet NaN for 0xFF.
MOK_HOST_DEVICE constexpr float ToFloat(Float8E8M0 value) {
  if (value.bits == 0xFF) return BitCast<float>(0x7FC00000u);
  if (value.bits == 0) return BitCast<float>(0x00400000u);
  return BitCast<float>(static_cast<uint32_t>(value.bits) << 23);
}

// Round to nearest, ties to even; overflow gives Inf; a NaN stays a NaN of its sign, made quiet.
MOK_HOST_DEVICE constexpr BFloat16 RoundToBFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    // Rounding could carry a NaN into Inf or drop the payload to zero: cut it and set the quiet
    // bit.
    return {static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  }
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

// Round to nearest, ties to even, saturating: |value| > 448, including Inf, gives +-448, and every
// NaN gives 0x7F. This is PTX cvt.rn.satfinite.e4m3x2.f32, so that host and device agree bit for
// bit.
MOK_HOST_DEVICE constexpr Float8E4M3 RoundToFloat8E4M3(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7F800000u) return {0x7F};
  if (magnitude >= 0x43E00000u) return {static_cast<uint8_t>(sign | 0x7Eu)};  // >= 448
  const uint32_t exponent = magnitude >> 23;
  if (exponent >= 121) {  // a normal E4M3: keep 3 of 23 mantissa bits, rebias 127 -> 7
    const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
    return {static_cast<uint8_t>(sign | ((rounded >> 20) - ((127u - 7u) << 3)))};
  }
  // Subnormal: units of 2^-9. Below 2^-10 everything rounds to zero (2^-10 itself ties to even 0).
  if (exponent < 117) return {static_cast<uint8_t>(sign)};
  const uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
  const uint32_t shift = 141u - exponent;  // significand * 2^(exponent - 150) in units of 2^-9
  const uint32_t half = (1u << (shift - 1)) - 1u;
  const uint32_t rounded = (significand + half + ((significand >> shift) & 1u)) >> shift;
  return {static_cast<uint8_t>(sign | rounded)};  // 8 is the smallest normal, 0x08
}

// The smallest power of two >= value, hence exact for a power of two in range. Values below 2^-127,
// zero included, give 2^-127. NaN, Inf, negative values and values above 2^127 give NaN (0xFF):
// no code could stand for them.
MOK_HOST_DEVICE constexpr Float8E8M0 RoundUpToFloat8E8M0(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  if (bits == 0x80000000u) return {0};                  // -0
  if (bits > 0x7F000000u) return kFloat8E8M0Nan;        // > 2^127, Inf, NaN, or negative
  if (bits <= 0x00400000u) return {0};                  // <= 2^-127
  const uint32_t up = (bits & 0x7FFFFFu) != 0 ? 1 : 0;  // 2^-127 < subnormal < 2^-126 too
  return {static_cast<uint8_t>((bits >> 23) + up)};
}

MOK_HOST_DEVICE constexpr bool IsNan(BFloat16 value) { return (value.bits & 0x7FFFu) > 0x7F80u; }
MOK_HOST_DEVICE constexpr bool IsNan(Float8E4M3 value) { return (value.bits & 0x7Fu) == 0x7Fu; }
MOK_HOST_DEVICE constexpr bool IsNan(Float8E8M0 value) { return value.bits == 0xFFu; }

}  // namespace mok
