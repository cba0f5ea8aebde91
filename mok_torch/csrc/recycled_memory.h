// Memory for the large tensors that every step makes anew: rings and gradients of weights.
//
// Fresh memory costs page faults, clearing included, and cold caches: a tenth of a small forward,
// and several times that when threads touch the same new huge page together. So memory that has
// been given back is handed out again, as it is.
#ifndef MOK_TORCH_CSRC_RECYCLED_MEMORY_H_
#define MOK_TORCH_CSRC_RECYCLED_MEMORY_H_

#include <cstddef>

namespace mok {

// One block of uninitialised memory. All functions are called with the GIL, which guards the list
// of free blocks.
//
// The blocks in use and the free ones together never exceed what was in use at once before, and the
// system may take free ones back when it runs short of memory (MADV_FREE).
class RecycledMemory {
 public:
  // Begins at a page; at a huge page, and on huge pages where the system has any, if half of one or
  // more is asked for. Throws std::bad_alloc.
  explicit RecycledMemory(size_t bytes);
  ~RecycledMemory();
  RecycledMemory(const RecycledMemory&) = delete;
  RecycledMemory& operator=(const RecycledMemory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Bytes of blocks in use and of free ones.
  static size_t BytesInUse();
  static size_t FreeBytes();

 private:
  void* data_;
  size_t bytes_;  // of the block: what was asked for, rounded up
};

}  // namespace mok

#endif  // MOK_TORCH_CSRC_RECYCLED_MEMORY_H_
