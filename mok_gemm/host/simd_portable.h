// 128-bit vectors of the compiler (GCC and Clang vector extensions): SSE2, NEON, whatever the
// target's baseline has. Include only from kernels_portable.cc; simd_avx512.h documents the
// operations. Compiled with -ffp-contract=off, so that MultiplyAdd rounds twice everywhere.
#pragma once

#include <cstdint>

#include "mok_core/dtype.h"

namespace mok {
namespace {

struct Simd {
  typedef float Float __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kGroupRows = 4;  // x 2 vectors, with temporaries in 16 registers
  static constexpr bool kHasPairDot = false;

  static Float Zero() { return Float{}; }
  static Float Set(float value) { return Float{value, value, value, value}; }

  static Float Load(const float* from, int n) {
    Float x = {};
    __builtin_memcpy(&x, from, n == kLanes ? sizeof(x) : n * sizeof(*from));
    return x;
  }
  static Float Load(const BFloat16* from, int n) {
    Bits bits = {};
    for (int i = 0; i < n; ++i) bits[i] = uint32_t{from[i].bits} << 16;
    return reinterpret_cast<Float>(bits);
  }
  static void Store(float* to, Float x, int n) {
    __builtin_memcpy(to, &x, n == kLanes ? sizeof(x) : n * sizeof(*to));
  }
  static void Store(BFloat16* to, Float x, int n) {
    const Bits bits = reinterpret_cast<Bits>(RoundToBf16(x));
    for (int i = 0; i < n; ++i) to[i].bits = static_cast<uint16_t>(bits[i] >> 16);
  }
  static Float LoadAll(const float* from) { return Load(from, kLanes); }
  static void StoreAll(float* to, Float x) { Store(to, x, kLanes); }

  static Float RoundToBf16(Float x) {
    const Bits bits = reinterpret_cast<Bits>(x);
    const Bits rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    const Bits nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return reinterpret_cast<Float>(Blend(nan, bits | 0x400000u, rounded) & 0xFFFF0000u);
  }

  static Float Add(Float a, Float b) { return a + b; }
  static Float Multiply(Float a, Float b) { return a * b; }
  static Float MultiplyAdd(Float a, Float b, Float c) { return a * b + c; }
  static Float Divide(Float a, Float b) { return a / b; }
  static Float NegativeAbs(Float x) {
    return reinterpret_cast<Float>(reinterpret_cast<Bits>(x) | 0x80000000u);
  }
  // For |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bit.
  static Float Nearest(Float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
  static Float Min(Float bound, Float x) { return SelectGreater(x, bound, bound, x); }
  static Float Max(Float bound, Float x) { return SelectGreater(bound, x, bound, x); }
  static Float SelectGreater(Float a, Float b, Float if_true, Float if_false) {
    const Bits greater = reinterpret_cast<Bits>(a > b);
    return reinterpret_cast<Float>(
        Blend(greater, reinterpret_cast<Bits>(if_true), reinterpret_cast<Bits>(if_false)));
  }
  // Once 1.5 * 2^23 is added, the integer stands in the low mantissa bits.
  static Float PowerOfTwo(Float n) {
    const Bits shifted = reinterpret_cast<Bits>(n + 0x1.8p23f);
    return reinterpret_cast<Float>((shifted - reinterpret_cast<Bits>(Set(0x1.8p23f)) + 127u) << 23);
  }
  static float Sum(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }

  [[gnu::always_inline]] static void Transpose(Float (&x)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = i + 1; j < kLanes; ++j) {
        const float kept = x[i][j];
        x[i][j] = x[j][i];
        x[j][i] = kept;
      }
    }
  }

 private:
  static Bits Blend(Bits mask, Bits if_true, Bits if_false) {
    return (mask & if_true) | (~mask & if_false);
  }
};

}  // namespace
}  // namespace mok
