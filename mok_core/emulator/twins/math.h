// Twin of mok_core/ptx/math.h. The approximations are correctly rounded here, hence within the
// instructions' bounds but not their bits.
#pragma once

#include <cmath>

#include "mok_core/dtype.h"
#include "mok_core/emulator/twins/compiler.h"

namespace mok {

MOK_DEVICE float BitsToFloat(uint32_t bits) { return BitCast<float>(bits); }
MOK_DEVICE uint32_t FloatToBits(float value) { return BitCast<uint32_t>(value); }
// Subnormals become zeros of their sign.
MOK_DEVICE float EmulatedFlush(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
// Arithmetic instructions return one NaN, whatever their operands hold.
MOK_DEVICE float EmulatedResult(float x) { return std::isnan(x) ? BitsToFloat(0x7FFFFFFFu) : x; }
MOK_DEVICE float ExponentialBase2(float x) {
  const double exact = std::exp2(static_cast<double>(EmulatedFlush(x)));
  return EmulatedResult(EmulatedFlush(static_cast<float>(exact)));
}
MOK_DEVICE float Reciprocal(float x) {
  return EmulatedResult(EmulatedFlush(1.0f / EmulatedFlush(x)));
}
MOK_DEVICE float MultiplyAdd(float a, float b, float c) {
  return EmulatedResult(std::fma(a, b, c));
}
MOK_DEVICE float Multiply(float a, float b) { return EmulatedResult(a * b); }
MOK_DEVICE float MinimumOrNan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? EmulatedResult(NAN) : std::fmin(a, b);
}
MOK_DEVICE float MaximumOrNan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? EmulatedResult(NAN) : std::fmax(a, b);
}
// cvt gives the canonical NaN for every NaN.
MOK_DEVICE uint32_t EmulatedBFloat16(float value) {
  return std::isnan(value) ? 0x7FFFu : RoundToBFloat16(value).bits;
}
MOK_DEVICE uint32_t PackBFloat16(float low, float high) {
  return EmulatedBFloat16(low) | EmulatedBFloat16(high) << 16;
}
MOK_DEVICE int PopulationCount(uint32_t bits) { return __builtin_popcount(bits); }

}  // namespace mok
