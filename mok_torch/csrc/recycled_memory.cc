#include "mok_torch/csrc/recycled_memory.h"

#include <pybind11/pybind11.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <new>

#include "mok_torch/csrc/bindings.h"

namespace mok {
namespace {

namespace py = pybind11;

constexpr size_t kPageBytes = size_t{1} << 12;
constexpr size_t kHugePageBytes = size_t{1} << 21;  // of x86

struct Block {
  void* data;
  size_t bytes;
};

// Free blocks, the latest at the back. Leaked: tensors may outlive static objects.
struct FreeList {
  std::deque<Block> blocks;
  size_t bytes = 0;
  size_t bytes_in_use = 0;
  size_t most_in_use = 0;
};

FreeList& Free() {
  static FreeList* const list = new FreeList;
  return *list;
}

bool IsHuge(size_t bytes) { return bytes >= kHugePageBytes / 2; }

size_t RoundedBytes(size_t bytes) {
  const size_t unit = IsHuge(bytes) ? kHugePageBytes : kPageBytes;
  return std::max(unit, (bytes + unit - 1) / unit * unit);
}

// A new mapping that begins at a multiple of its unit: what lies around it is unmapped again.
void* Map(size_t bytes) {
  const size_t unit = IsHuge(bytes) ? kHugePageBytes : kPageBytes;
  const size_t spare = unit - kPageBytes;
  void* mapping = mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       /*fd=*/-1, /*offset=*/0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  const auto begin = reinterpret_cast<uintptr_t>(mapping);
  const uintptr_t data = (begin + unit - 1) / unit * unit;
  if (data > begin) munmap(mapping, data - begin);
  if (spare > data - begin) {
    munmap(reinterpret_cast<void*>(data + bytes), spare - (data - begin));
  }
  // Fails where the system has no huge pages: small ones do.
  if (unit == kHugePageBytes) madvise(reinterpret_cast<void*>(data), bytes, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(data);
}

// The latest free block of that size, whose pages are the likeliest to be in a cache.
bool TakeFree(size_t bytes, Block* taken) {
  FreeList& list = Free();
  const auto found = std::find_if(list.blocks.rbegin(), list.blocks.rend(),
                                  [bytes](const Block& block) { return block.bytes == bytes; });
  if (found == list.blocks.rend()) return false;
  *taken = *found;
  list.blocks.erase(std::next(found).base());
  list.bytes -= bytes;
  return true;
}

// Gives the oldest free blocks to the system until no more is held than was ever in use.
void Trim() {
  FreeList& list = Free();
  while (!list.blocks.empty() && list.bytes_in_use + list.bytes > list.most_in_use) {
    munmap(list.blocks.front().data, list.blocks.front().bytes);
    list.bytes -= list.blocks.front().bytes;
    list.blocks.pop_front();
  }
}

}  // namespace

RecycledMemory::RecycledMemory(size_t bytes) : bytes_(RoundedBytes(bytes)) {
  Block block{nullptr, bytes_};
  if (!TakeFree(bytes_, &block)) block.data = Map(bytes_);
  data_ = block.data;
  FreeList& list = Free();
  list.bytes_in_use += bytes_;
  list.most_in_use = std::max(list.most_in_use, list.bytes_in_use);
  Trim();
}

RecycledMemory::~RecycledMemory() {
  FreeList& list = Free();
  list.bytes_in_use -= bytes_;
  // Only marks the pages; they stay where they are until memory runs short.
  madvise(data_, bytes_, MADV_FREE);
  list.blocks.push_back({data_, bytes_});
  list.bytes += bytes_;
}

size_t RecycledMemory::BytesInUse() { return Free().bytes_in_use; }
size_t RecycledMemory::FreeBytes() { return Free().bytes; }

void BindMemory(py::module_& module) {
  py::class_<RecycledMemory>(module, "RecycledMemory", py::buffer_protocol())
      .def(py::init<size_t>(), py::arg("num_bytes"))
      .def_buffer([](const RecycledMemory& memory) {
        return py::buffer_info(static_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.bytes()));
      })
      .def_static("bytes_in_use", &RecycledMemory::BytesInUse)
      .def_static("free_bytes", &RecycledMemory::FreeBytes);
}

}  // namespace mok
