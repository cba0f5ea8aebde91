#include "mok_megakernel/scratch_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mok {

ScratchMemory::~ScratchMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Status ScratchMemory::Reserve(size_t bytes) {
  if (bytes <= bytes_) return OkStatus();
  bytes = std::max(bytes, bytes_ + bytes_ / 4);
  // Unmapped first: old and new contents are never needed at once.
  if (data_ != nullptr) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return ResourceExhaustedError("scratch memory of ", bytes, " bytes: ", std::strerror(errno));
  }
  data_ = static_cast<std::byte*>(mapped);
  bytes_ = bytes;
  return OkStatus();
}

}  // namespace mok
