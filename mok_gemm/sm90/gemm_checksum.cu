#include "mok_gemm/sm90/gemm_checksum.h"

#include "mok_core/device/device.h"

namespace mok::testing {
namespace {

// The sum over all words of a mix of value and position; integers, so that no order matters.
MOK_KERNEL(kChecksumThreads, 1)
Checksum(MOK_GRID_CONSTANT(ChecksumParams) p) {
  const uint64_t step = uint64_t{GridDimensions().x} * kChecksumThreads;
  uint64_t sum = 0;
  for (uint64_t i = uint64_t{BlockIndex().x} * kChecksumThreads + ThreadIndex().x; i < p.count;
       i += step) {
    const uint64_t mixed = (i << 32 | p.words[i]) * 0x9E3779B97F4A7C15u;
    sum += mixed ^ mixed >> 29;
  }
  AtomicAddRelaxedGpu(p.sum, sum);
}

}  // namespace

const void* ChecksumKernel() { return reinterpret_cast<const void*>(&Checksum); }

}  // namespace mok::testing
