// AVX2 + FMA vectors. Include only from kernels_avx2.cc; simd_avx512.h says why, and documents the
// operations.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "mok_core/dtype.h"

namespace mok {
namespace {

struct Simd {
  using Float = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kGroupRows = 6;  // x 2 vectors: 12 accumulators of 16 registers
  static constexpr bool kHasPairDot = false;

  static Float Zero() { return _mm256_setzero_ps(); }
  static Float Set(float value) { return _mm256_set1_ps(value); }

  static Float Load(const float* from, int n) {
    return n == kLanes ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, First(n));
  }
  static Float Load(const BFloat16* from, int n) {
    __m128i bits = _mm_setzero_si128();
    __builtin_memcpy(&bits, from, n == kLanes ? sizeof(bits) : n * sizeof(*from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static void Store(float* to, Float x, int n) {
    if (n == kLanes) {
      _mm256_storeu_ps(to, x);
    } else {
      _mm256_maskstore_ps(to, First(n), x);
    }
  }
  static void Store(BFloat16* to, Float x, int n) {
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(RoundToBf16(x)), 16);
    const __m128i bits =
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    __builtin_memcpy(to, &bits, n == kLanes ? sizeof(bits) : n * sizeof(*to));
  }
  static Float LoadAll(const float* from) { return _mm256_loadu_ps(from); }
  static void StoreAll(float* to, Float x) { _mm256_storeu_ps(to, x); }

  static Float RoundToBf16(Float x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_add_epi32(bits, bias);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const Float nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const Float kept =
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    return _mm256_and_ps(kept,
                         _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

  static Float Add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float Multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float MultiplyAdd(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float Divide(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float NegativeAbs(Float x) { return _mm256_or_ps(x, _mm256_set1_ps(-0.0f)); }
  static Float Nearest(Float x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Float Min(Float bound, Float x) { return _mm256_min_ps(bound, x); }
  static Float Max(Float bound, Float x) { return _mm256_max_ps(bound, x); }
  static Float SelectGreater(Float a, Float b, Float if_true, Float if_false) {
    return _mm256_blendv_ps(if_false, if_true, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
  }
  static Float PowerOfTwo(Float n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static float Sum(Float x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  [[gnu::always_inline]] static void Transpose(Float (&x)[kLanes]) {
    Float t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      x[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
      x[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      x[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      const Float low = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
      x[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
      x[i] = low;
    }
  }

 private:
  // A mask of the first n lanes.
  static __m256i First(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

}  // namespace
}  // namespace mok
