// Arithmetic whose rounding is the instruction's, not the compiler's choice.
#pragma once

#include "mok_core/ptx/compiler.h"

namespace mok {

// PTX ISA 8.8 section 9.7.3, ex2.approx.ftz.f32: 2^x within 2 ulp, subnormal results are 0.
MOK_DEVICE float ExponentialBase2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// PTX ISA 8.8 section 9.7.3, rcp.approx.ftz.f32: 1/x within 1 ulp, subnormal results are 0.
MOK_DEVICE float Reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// PTX ISA 8.8 section 9.7.3, fma.rn.f32: a * b + c rounded once.
MOK_DEVICE float MultiplyAdd(float a, float b, float c) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

// PTX ISA 8.8 section 9.7.3, mul.rn.f32: never fused with an addition.
MOK_DEVICE float Multiply(float a, float b) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// PTX ISA 8.8 section 9.7.3, min.NaN.f32: a NaN if one of them is NaN.
MOK_DEVICE float MinimumOrNan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// PTX ISA 8.8 section 9.7.3, max.NaN.f32: a NaN if one of them is NaN.
MOK_DEVICE float MaximumOrNan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// PTX ISA 8.8 section 9.7.9, cvt.rn.bf16x2.f32: two bf16, `low` in the low half.
MOK_DEVICE uint32_t PackBFloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// PTX ISA 8.8 section 9.7.9, mov.b32 between register types.
MOK_DEVICE float BitsToFloat(uint32_t bits) {
  float value;
  asm("mov.b32 %0, %1;" : "=f"(value) : "r"(bits));
  return value;
}

// PTX ISA 8.8 section 9.7.9, mov.b32 between register types.
MOK_DEVICE uint32_t FloatToBits(float value) {
  uint32_t bits;
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// PTX ISA 8.8 section 9.7.1, popc.b32.
MOK_DEVICE int PopulationCount(uint32_t bits) {
  int count;
  asm("popc.b32 %0, %1;" : "=r"(count) : "r"(bits));
  return count;
}

}  // namespace mok
