// Twin of mok_core/ptx/warp.h.
#pragma once

#include <type_traits>

#include "mok_core/emulator/twins/compiler.h"

namespace mok {

template <class T>
MOK_DEVICE T EmulatedShuffle(T value, emulator::ShuffleKind kind, int argument, uint32_t mask) {
  static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulator::Shuffle(mask, bits, kind, argument);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
MOK_DEVICE T Shuffle(T value, int source_lane, uint32_t mask = 0xFFFFFFFFu) {
  return EmulatedShuffle(value, emulator::ShuffleKind::kIndex, source_lane, mask);
}
template <class T>
MOK_DEVICE T ShuffleXor(T value, int lane_mask, uint32_t mask = 0xFFFFFFFFu) {
  return EmulatedShuffle(value, emulator::ShuffleKind::kXor, lane_mask, mask);
}
template <class T>
MOK_DEVICE T ShuffleUp(T value, unsigned delta, uint32_t mask = 0xFFFFFFFFu) {
  return EmulatedShuffle(value, emulator::ShuffleKind::kUp, static_cast<int>(delta), mask);
}
template <class T>
MOK_DEVICE T ShuffleDown(T value, unsigned delta, uint32_t mask = 0xFFFFFFFFu) {
  return EmulatedShuffle(value, emulator::ShuffleKind::kDown, static_cast<int>(delta), mask);
}
template <class T>
MOK_DEVICE T Uniform(T value) {
  static_assert((std::is_integral_v<T> || std::is_enum_v<T>) && sizeof(T) <= sizeof(int32_t));
  MOK_EXPECT(Shuffle(value, 0) == value);  // the same in all lanes
  return value;
}
MOK_DEVICE uint32_t Ballot(bool predicate, uint32_t mask = 0xFFFFFFFFu) {
  return emulator::Ballot(mask, predicate);
}
MOK_DEVICE bool ElectOne() { return emulator::ElectOne(); }

}  // namespace mok
