// Exchange inside a warp. All lanes of `mask` call together; T has at most 8 bytes.
#pragma once

#include <type_traits>

#include "mok_core/ptx/compiler.h"

namespace mok {

// PTX ISA 8.8 section 9.7.9, shfl.sync.idx.
template <class T>
MOK_DEVICE T Shuffle(T value, int source_lane, uint32_t mask = 0xFFFFFFFFu) {
  return __shfl_sync(mask, value, source_lane);
}

// A value that all lanes have: lane 0's, of which the compiler then knows that it is the same in
// all. Where it branches on such a value it keeps no code for warps that have diverged behind the
// branch, which is half of an epilogue that exchanges values between lanes, and fewer registers.
template <class T>
MOK_DEVICE T Uniform(T value) {
  static_assert((std::is_integral_v<T> || std::is_enum_v<T>) && sizeof(T) <= sizeof(int32_t));
  return static_cast<T>(Shuffle(static_cast<int32_t>(value), 0));
}

// PTX ISA 8.8 section 9.7.9, shfl.sync.bfly.
template <class T>
MOK_DEVICE T ShuffleXor(T value, int lane_mask, uint32_t mask = 0xFFFFFFFFu) {
  return __shfl_xor_sync(mask, value, lane_mask);
}

// PTX ISA 8.8 section 9.7.9, shfl.sync.up: lanes below `delta` keep their own value.
template <class T>
MOK_DEVICE T ShuffleUp(T value, unsigned delta, uint32_t mask = 0xFFFFFFFFu) {
  return __shfl_up_sync(mask, value, delta);
}

// PTX ISA 8.8 section 9.7.9, shfl.sync.down: the last `delta` lanes keep their own value.
template <class T>
MOK_DEVICE T ShuffleDown(T value, unsigned delta, uint32_t mask = 0xFFFFFFFFu) {
  return __shfl_down_sync(mask, value, delta);
}

// PTX ISA 8.8 section 9.7.13, vote.sync.ballot.
MOK_DEVICE uint32_t Ballot(bool predicate, uint32_t mask = 0xFFFFFFFFu) {
  return __ballot_sync(mask, predicate);
}

// PTX ISA 8.8 section 9.7.13, elect.sync over the whole warp: true in one lane, which may be any.
MOK_DEVICE bool ElectOne() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace mok
