// Plain types shared by device code, its host emulation and host code.
#pragma once

#include <cstdint>

namespace mok {

// Coordinates or extents of threads, blocks, clusters.
struct Index3 {
  uint32_t x = 1, y = 1, z = 1;
};

// 8 bytes in one load or store.
struct alignas(8) Word2 {
  uint32_t x, y;
};

// 16 bytes, the widest load or store of one thread.
struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};

// Operands of a block-scaled matrix multiply: shared-memory descriptors, and the tensor-memory
// addresses of the scales.
struct BlockScaledOperands {
  uint64_t descriptor_a, descriptor_b;
  uint32_t scales_a, scales_b;
};

// A TMA descriptor, opaque: runtime::EncodeTensorMap fills it. Passed to kernels inside their one
// parameter.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Permutation of 16-byte chunks inside rows of shared memory; the value is the span in bytes.
enum class Swizzle : int { kNone = 0, k32 = 32, k64 = 64, k128 = 128 };

}  // namespace mok
