// AVX-512 vectors (F, BW, VL, DQ; with __AVX512BF16__ also the bf16 pair dot product).
//
// Include only from kernels_<isa>.cc. Code compiled for a wide instruction set must not share a
// function with the rest of the program: the linker keeps one copy of an inline function, and if it
// keeps the wide one, a small machine dies on it. Hence `Simd` lives in an unnamed namespace, so
// that all templates over it are local to their object file, and these files call no inline
// function from elsewhere, the standard library included. kernels_isolation_test checks it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "mok_core/dtype.h"

namespace mok {
namespace {

struct Simd {
  using Float = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kGroupRows = 13;  // x 2 vectors: 26 accumulators of 32 registers
#ifdef __AVX512BF16__
  static constexpr bool kHasPairDot = true;
#else
  static constexpr bool kHasPairDot = false;
#endif

  static __mmask16 First(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static Float Zero() { return _mm512_setzero_ps(); }
  static Float Set(float value) { return _mm512_set1_ps(value); }

  // Loads and stores of the first n lanes (1 .. kLanes); the others load as zero.
  static Float Load(const float* from, int n) { return _mm512_maskz_loadu_ps(First(n), from); }
  static Float Load(const BFloat16* from, int n) {
    return Widen(_mm256_maskz_loadu_epi16(First(n), from));
  }
  // A masked store costs several plain ones.
  static void Store(float* to, Float x, int n) {
    if (n == kLanes) {
      _mm512_storeu_ps(to, x);
    } else {
      _mm512_mask_storeu_ps(to, First(n), x);
    }
  }
  static void Store(BFloat16* to, Float x, int n) {
    const __m512i high = _mm512_srli_epi32(RoundedBits(x), 16);
    const __m256i bits = _mm512_cvtepi32_epi16(high);
    if (n == kLanes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
    } else {
      _mm256_mask_storeu_epi16(to, First(n), bits);
    }
  }
  static Float LoadAll(const float* from) { return _mm512_loadu_ps(from); }
  static void StoreAll(float* to, Float x) { _mm512_storeu_ps(to, x); }

  // The nearest bf16 value (ties to even, a NaN made quiet), as RoundToBFloat16 does.
  static Float RoundToBf16(Float x) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(RoundedBits(x), upper));
  }

  static Float Add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float Multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float MultiplyAdd(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float Divide(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float NegativeAbs(Float x) { return _mm512_or_ps(x, _mm512_set1_ps(-0.0f)); }
  static Float Nearest(Float x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // A NaN in x is kept: MINPS and MAXPS return their second operand then.
  static Float Min(Float bound, Float x) { return _mm512_min_ps(bound, x); }
  static Float Max(Float bound, Float x) { return _mm512_max_ps(bound, x); }
  // a > b ? if_true : if_false, per lane; false for a NaN.
  static Float SelectGreater(Float a, Float b, Float if_true, Float if_false) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), if_false, if_true);
  }
  // 2^n for integral n in [-126, 127].
  static Float PowerOfTwo(Float n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  // The lanes added as a binary tree.
  static float Sum(Float x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }

  // Rows and columns of a kLanes x kLanes block exchanged.
  [[gnu::always_inline]] static void Transpose(Float (&x)[kLanes]) {
    Float t[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {  // pairs: 2 x 2 blocks of floats
      t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {  // 4 x 4 blocks: column i of lane l is element 4 l + i
      x[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      x[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
      x[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      x[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {  // 128-bit lanes 0, 2 and 1, 3 of two quadruples of rows
      t[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xDD);
      t[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      x[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
      x[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
      x[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xDD);
    }
  }

#ifdef __AVX512BF16__
  // acc + a.odd * b.odd + a.even * b.even per lane; a, b hold two bf16 values a lane.
  static Float MultiplyAddPairs(Float a, Float b, Float acc) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  // The first n bf16 values (1 .. 2 * kLanes) as they lie, two a lane; the others are zero.
  static Float LoadPairs(const BFloat16* from, int n) {
    const auto first = static_cast<__mmask32>((uint64_t{1} << n) - 1u);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first, from));
  }
  // Lane j of out[0], out[1] = (even[j], odd[j]), (even[16 + j], odd[16 + j]).
  static void InterleavePairs(Float even, Float odd, Float (&out)[2]) {
    const __m512i first =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    const __m512i e = _mm512_castps_si512(even), o = _mm512_castps_si512(odd);
    out[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(e, first, o));
    out[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(e, second, o));
  }
  // Stores 2 * kLanes values of which none is denormal: the conversion would make it zero.
  static void StoreNormalPair(BFloat16* to, Float first, Float second) {
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
  }
  // The same, and x becomes what was stored.
  static void RoundAndStoreNormalPair(BFloat16* to, Float (&x)[2]) {
    const auto bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x[1], x[0]));
    _mm512_storeu_si512(to, bits);
    x[0] = Widen(_mm512_castsi512_si256(bits));
    x[1] = Widen(_mm512_extracti64x4_epi64(bits, 1));
  }
  // Store of 2 * kLanes values.
  static void StorePair(BFloat16* to, Float first, Float second) {
    const __m512i upper_halves =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(
        to, _mm512_permutex2var_epi16(RoundedBits(first), upper_halves, RoundedBits(second)));
  }
#endif

 private:
  static Float Widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  // The upper half of each lane is its nearest bf16 value.
  static __m512i RoundedBits(Float x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(_mm512_add_epi32(bits, bias), nan, bits,
                                _mm512_set1_epi32(0x400000));
  }
};

}  // namespace
}  // namespace mok
