#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "mok_comm/symmetric_heap.h"

namespace mok {
namespace {

// The memory of all virtual ranks: one anonymous mapping, zeroed, pages taken at first touch.
class Storage {
 public:
  Storage(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  ~Storage() { munmap(data_, bytes_); }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

 private:
  void* const data_;
  const size_t bytes_;
};

class InProcessHeap : public SymmetricHeap {
 public:
  InProcessHeap(int rank, size_t bytes, std::vector<std::byte*> bases,
                std::shared_ptr<Storage> storage)
      : SymmetricHeap(rank, bytes, std::move(bases)), storage_(std::move(storage)) {}

 private:
  const std::shared_ptr<Storage> storage_;
};

}  // namespace

StatusOr<std::vector<std::unique_ptr<SymmetricHeap>>> CreateInProcessHeaps(int size, size_t bytes) {
  if (size < 1) return InvalidArgumentError("symmetric heap: size is ", size, ", expected >= 1");
  if (bytes == 0) return InvalidArgumentError("symmetric heap: bytes is 0, expected >= 1");
  constexpr size_t kPageBytes = 4096;
  constexpr size_t kMaxBytes = size_t{1} << 47;  // of user address space
  const size_t rank_bytes = bytes < kMaxBytes ? RoundUp(bytes, kPageBytes) : kMaxBytes;
  void* data = MAP_FAILED;
  if (rank_bytes < kMaxBytes / static_cast<size_t>(size)) {
    data = mmap(nullptr, rank_bytes * static_cast<size_t>(size), PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  } else {
    errno = ENOMEM;
  }
  if (data == MAP_FAILED) {
    return ResourceExhaustedError("symmetric heap: cannot allocate ", size, " x ", bytes,
                                  " bytes: ", std::strerror(errno));
  }
  const size_t total_bytes = rank_bytes * static_cast<size_t>(size);
  // Rows are picked from all over the heap; large pages save most TLB misses. Only advice.
  madvise(data, total_bytes, MADV_HUGEPAGE);
  auto storage = std::make_shared<Storage>(data, total_bytes);
  std::vector<std::byte*> bases;
  for (int rank = 0; rank < size; ++rank) {
    bases.push_back(static_cast<std::byte*>(data) + static_cast<size_t>(rank) * rank_bytes);
  }
  std::vector<std::unique_ptr<SymmetricHeap>> heaps;
  for (int rank = 0; rank < size; ++rank) {
    heaps.push_back(std::make_unique<InProcessHeap>(rank, bytes, bases, storage));
  }
  return heaps;
}

}  // namespace mok
