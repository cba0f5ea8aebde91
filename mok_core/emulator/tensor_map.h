// What an emulated TensorMap holds.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mok::emulator {

constexpr uint64_t kTensorMapMagic = 0x7E450A9;

struct TensorMapContents {
  uint64_t magic;
  char* base;
  uint64_t dimensions[5];  // elements, innermost first
  uint64_t strides[4];     // bytes, of dimensions 1 and up
  uint16_t box[5];         // elements
  uint8_t rank, element_bytes;
  int16_t swizzle;  // span in bytes, 0: none
};
static_assert(sizeof(TensorMapContents) <= 128);

inline size_t BoxRows(const TensorMapContents& map) {
  size_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  return rows;
}

inline uint32_t BoxBytes(const TensorMapContents& map) {
  return static_cast<uint32_t>(BoxRows(map) * map.box[0] * map.element_bytes);
}

// Where the 16-byte chunk of a shared-memory offset lies under a swizzle: the chunk's number inside
// its 128-byte line is combined with the line's number (address bits 7 and up).
inline uint32_t SwizzleOffset(uint32_t offset, int swizzle) {
  switch (swizzle) {
    case 128:
      return offset ^ (offset >> 3 & 0x70);
    case 64:
      return offset ^ (offset >> 3 & 0x30);
    case 32:
      return offset ^ (offset >> 3 & 0x10);
    default:
      return offset;
  }
}

}  // namespace mok::emulator
