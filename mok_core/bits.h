// Integer and bit helpers; every function is constexpr and runs on host and device.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"

namespace mok {

// The object representation of `from` read as a To of the same size (std::bit_cast, which device
// code may not call without a compiler switch).
template <class To, class From>
MOK_HOST_DEVICE constexpr To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "BitCast needs types of one size");
  return __builtin_bit_cast(To, from);
}

// ceil(value / divisor) for value >= 0 and divisor > 0.
template <class Integer>
MOK_HOST_DEVICE constexpr Integer CeilDiv(Integer value, Integer divisor) {
  return static_cast<Integer>(value / divisor + (value % divisor != 0 ? 1 : 0));
}

// The smallest multiple of `multiple` that is >= value, for value >= 0 and multiple > 0.
template <class Integer>
MOK_HOST_DEVICE constexpr Integer RoundUp(Integer value, Integer multiple) {
  return static_cast<Integer>(CeilDiv(value, multiple) * multiple);
}

// The lowest `num_bits` bits (0 to 32) of `value` in opposite order; higher bits are dropped.
// ReverseBits(0b001, 3) == 0b100.
MOK_HOST_DEVICE constexpr uint32_t ReverseBits(uint32_t value, int num_bits) {
  if (num_bits == 0) return 0;
  value = ((value >> 1) & 0x55555555u) | ((value & 0x55555555u) << 1);
  value = ((value >> 2) & 0x33333333u) | ((value & 0x33333333u) << 2);
  value = ((value >> 4) & 0x0F0F0F0Fu) | ((value & 0x0F0F0F0Fu) << 4);
  value = ((value >> 8) & 0x00FF00FFu) | ((value & 0x00FF00FFu) << 8);
  value = (value >> 16) | (value << 16);
  return value >> (32 - num_bits);
}

// The smallest b with 2^b >= value, for value >= 1; 0 for value <= 1. The number of bits that hold
// every id in [0, value).
MOK_HOST_DEVICE constexpr int CeilLog2(uint64_t value) {
  int bits = 0;
  while (bits < 64 && value > (uint64_t{1} << bits)) ++bits;
  return bits;
}

}  // namespace mok
