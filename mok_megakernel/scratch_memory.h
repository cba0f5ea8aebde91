// Zeroed anonymous memory that grows by replacement: scratch of one rank, reused by every pass.
#pragma once

#include <cstddef>

#include "mok_core/status.h"

namespace mok {

// Pages are committed by the kernel when they are first written, so that room for padding rows,
// which nobody touches, costs address space only.
class ScratchMemory {
 public:
  ScratchMemory() = default;
  ~ScratchMemory();
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;

  // At least `bytes` from now on; grows by a quarter or more. Growing loses the contents and moves
  // data(). kResourceExhausted names the bytes.
  Status Reserve(size_t bytes);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace mok
