// A checksum of device memory, computed on the device: tests compare many runs bit by bit with it.
#pragma once

#include <cstdint>

namespace mok::testing {

struct ChecksumParams {
  const uint32_t* words;
  uint64_t count;
  uint64_t* sum;  // zero before the launch
};

inline constexpr uint32_t kChecksumThreads = 256;

// The address of the kernel: any grid, kChecksumThreads threads, no shared memory.
const void* ChecksumKernel();

}  // namespace mok::testing
