// How operand elements become units (see kernel_table.h): the part of the kernels that varies by
// dtype. Include only from kernels_<isa>.cc, after the ISA's Simd.
#pragma once

#include <cstdint>

#include "mok_core/dtype.h"

namespace mok {

// One fp32 unit per element: fp32 as it lies, bf16 widened exactly.
template <class Simd, class ElementType>
struct SingleUnits {
  using Element = ElementType;
  using Float = typename Simd::Float;
  static constexpr int kElements = 1;
  static constexpr bool kRowsAreUnits = sizeof(Element) == sizeof(float);
  static constexpr bool kSumsAreNormal = false;  // accumulators may be denormal

  static Float MultiplyAdd(Float a, Float b, Float acc) { return Simd::MultiplyAdd(a, b, acc); }

  // The units of the first n consecutive elements of a row (1 .. kLanes), the others zero.
  static Float LoadAlongDepth(const Element* from, int n) { return Simd::Load(from, n); }

  // The units of one panel row: columns [0, n) (1 .. 2 * kLanes) of `depth` (1 .. kElements)
  // consecutive rows, the others zero.
  static void LoadAlongColumns(const Element* from, int64_t /*stride*/, int64_t /*depth*/, int n,
                               Float (&out)[2]) {
    constexpr int kLanes = Simd::kLanes;
    out[0] = Simd::Load(from, n < kLanes ? n : kLanes);
    out[1] = n > kLanes ? Simd::Load(from + kLanes, n - kLanes) : Simd::Zero();
  }
};

// Two bf16 elements per unit, for the pair dot product.
template <class Simd>
struct PairUnits {
  using Element = BFloat16;
  using Float = typename Simd::Float;
  static constexpr int kElements = 2;
  static constexpr bool kRowsAreUnits = true;
  static constexpr bool kSumsAreNormal = true;  // the instruction flushes denormals

  static Float MultiplyAdd(Float a, Float b, Float acc) {
    return Simd::MultiplyAddPairs(a, b, acc);
  }
  static Float LoadAlongDepth(const Element* from, int n) { return Simd::LoadPairs(from, n); }
  static void LoadAlongColumns(const Element* from, int64_t stride, int64_t depth, int n,
                               Float (&out)[2]) {
    const Float odd = depth > 1 ? Simd::LoadPairs(from + stride, n) : Simd::Zero();
    Simd::InterleavePairs(Simd::LoadPairs(from, n), odd, out);
  }
};

}  // namespace mok
