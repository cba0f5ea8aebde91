// Descriptors of matrix operands in shared memory and of tensor-core instructions, built from what
// they mean. Checked against CuTe in descriptor_test.cu.
#pragma once

#include <cstdint>

#include "mok_core/device/types.h"
#include "mok_core/macros.h"

namespace mok {

// Which dimension of an operand is contiguous in shared memory.
enum class OperandMajor : uint32_t { kK = 0, kMn = 1 };

// How an operand tile lies in shared memory. Atoms of 8 rows by one swizzle span (K-major), or of
// one span by 8 (MN-major), are repeated at these distances:
//   K-major:  stride_bytes between atoms along M or N; leading_bytes unused when swizzled,
//             between 16-byte columns when not.
//   MN-major: leading_bytes between atoms along M or N, stride_bytes between atoms along K.
// (PTX ISA 8.8 section 9.7.15, canonical layouts; section 9.7.16 for sm_100.)
struct OperandLayout {
  Swizzle swizzle;
  uint32_t leading_bytes, stride_bytes;
};

// A K-major tile whose rows are one swizzle span long and follow each other without gaps, as a
// tensor load of such a box leaves them.
MOK_HOST_DEVICE constexpr OperandLayout KMajorLayout(Swizzle swizzle) {
  return {swizzle, 16, 8 * static_cast<uint32_t>(swizzle)};
}

// An MN-major tile of boxes that are one swizzle span along M or N and `depth` along K, box after
// box along M or N, as tensor loads leave them. One step of 16 along K is 16 spans.
MOK_HOST_DEVICE constexpr OperandLayout MnMajorLayout(Swizzle swizzle, uint32_t depth) {
  const auto span = static_cast<uint32_t>(swizzle);
  return {swizzle, depth * span, 8 * span};
}

// Start address, to be added to the other fields. `shared_address` is 16-byte aligned.
MOK_HOST_DEVICE constexpr uint64_t DescriptorAddress(uint32_t shared_address) {
  return (shared_address & 0x3FFFF) >> 4;
}

namespace descriptor_internal {
MOK_HOST_DEVICE constexpr uint64_t Offsets(const OperandLayout& layout) {
  return static_cast<uint64_t>(layout.leading_bytes >> 4 & 0x3FFF) << 16 |
         static_cast<uint64_t>(layout.stride_bytes >> 4 & 0x3FFF) << 32;
}
}  // namespace descriptor_internal

// Everything of an sm_90 (wgmma) descriptor except the start address.
MOK_HOST_DEVICE constexpr uint64_t OperandDescriptorSm90(const OperandLayout& layout) {
  const uint64_t type = layout.swizzle == Swizzle::k128  ? 1
                        : layout.swizzle == Swizzle::k64 ? 2
                        : layout.swizzle == Swizzle::k32 ? 3
                                                         : 0;
  return descriptor_internal::Offsets(layout) | type << 62;
}

// Everything of an sm_100 (tcgen05) descriptor except the start address.
MOK_HOST_DEVICE constexpr uint64_t OperandDescriptorSm100(const OperandLayout& layout) {
  const uint64_t type = layout.swizzle == Swizzle::k128  ? 2
                        : layout.swizzle == Swizzle::k64 ? 4
                        : layout.swizzle == Swizzle::k32 ? 6
                                                         : 0;
  return descriptor_internal::Offsets(layout) | uint64_t{1} << 46 | type << 61;
}

// Moves the start address on, for example to the next 32 bytes of K inside a swizzle span.
MOK_HOST_DEVICE constexpr uint64_t AdvanceDescriptor(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Shape of one tcgen05 multiply; m of the pair for cta_group::2.
struct InstructionShape {
  uint32_t m, n;
  OperandMajor major_a = OperandMajor::kK, major_b = OperandMajor::kK;
};

namespace descriptor_internal {
MOK_HOST_DEVICE constexpr uint32_t ShapeBits(const InstructionShape& shape) {
  return static_cast<uint32_t>(shape.major_a) << 15 | static_cast<uint32_t>(shape.major_b) << 16 |
         shape.n / 8 << 17 | shape.m / 16 << 24;
}
}  // namespace descriptor_internal

// tcgen05 kind::f16 with bf16 operands and fp32 accumulation.
MOK_HOST_DEVICE constexpr uint32_t InstructionDescriptorBf16(const InstructionShape& shape) {
  return 1u << 4 | 1u << 7 | 1u << 10 | descriptor_internal::ShapeBits(shape);
}

// tcgen05 kind::mxf8f6f4 with E4M3 operands and E8M0 scales. scale_a, scale_b: which byte of the
// scales' words this instruction uses, 0 to 3.
MOK_HOST_DEVICE constexpr uint32_t InstructionDescriptorMxf8(const InstructionShape& shape,
                                                             uint32_t scale_a, uint32_t scale_b) {
  return 1u << 23 | scale_b << 4 | scale_a << 29 | descriptor_internal::ShapeBits(shape);
}

}  // namespace mok
