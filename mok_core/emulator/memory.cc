// Device memory with owners, red zones and initialisation bits; addresses of shared memory; the
// constant bank.
#include "mok_core/emulator/engine.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace mok::emulator {
namespace {

constexpr size_t kHeapBytes = size_t{4} << 30;  // address space per device, and for the host
constexpr size_t kRedZone = 4096;
constexpr size_t kParameterBytes = 1 << 20;
constexpr int kNumHeaps = kMaxDevices + 1;  // the last is the host's

char* g_heaps = nullptr;
size_t g_heap_top[kNumHeaps];
// By base address.
std::map<uintptr_t, Allocation> g_allocations;
Allocation* g_last_allocation = nullptr;
bool g_peer_access[kMaxDevices][kMaxDevices];
char* g_parameters = nullptr;
size_t g_parameters_top = 0;

char* MapPages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    std::perror("emulator: cannot map memory");
    std::abort();
  }
  return static_cast<char*>(pages);
}

void* Allocate(int heap, size_t bytes, const std::string& name) {
  if (g_heaps == nullptr) g_heaps = MapPages(kHeapBytes * kNumHeaps);
  size_t& top = g_heap_top[heap];
  top = (top + kRedZone + 255) & ~size_t{255};
  if (top + bytes + kRedZone > kHeapBytes) return nullptr;
  char* base = g_heaps + heap * kHeapBytes + top;
  top += bytes;
  std::memset(base, 0xFF, bytes);
  Allocation allocation;
  allocation.base = base;
  allocation.bytes = bytes;
  allocation.name = name;
  allocation.device = heap == kMaxDevices ? -1 : heap;
  allocation.initialized.assign((bytes + 3) / 4, 0);
  g_allocations[reinterpret_cast<uintptr_t>(base)] = std::move(allocation);
  return base;
}

// The allocation at or before the pointer, live or not; null if none.
Allocation* Nearest(const void* pointer) {
  auto it = g_allocations.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  return it == g_allocations.begin() ? nullptr : &std::prev(it)->second;
}

bool Holds(const Allocation* allocation, const void* pointer, size_t bytes) {
  const auto* p = static_cast<const char*>(pointer);
  return allocation != nullptr && p >= allocation->base &&
         p + bytes <= allocation->base + allocation->bytes;
}

Allocation* Find(const void* pointer, size_t bytes) {
  if (!Holds(g_last_allocation, pointer, bytes)) g_last_allocation = Nearest(pointer);
  return Holds(g_last_allocation, pointer, bytes) ? g_last_allocation : nullptr;
}

// The mask of bytes of 4-byte word `word` that [begin, begin + bytes) covers.
uint8_t WordMask(size_t word, size_t begin, size_t bytes) {
  uint8_t mask = 0;
  for (size_t i = 0; i < 4; ++i) {
    const size_t byte = word * 4 + i;
    if (byte >= begin && byte < begin + bytes) mask |= 1 << i;
  }
  return mask;
}

}  // namespace

void* AllocateDevice(int device, size_t bytes, const std::string& name) {
  if (device < 0 || device >= kMaxDevices) return nullptr;
  return Allocate(device, bytes, name);
}

void* AllocateHost(size_t bytes, const std::string& name) {
  return Allocate(kMaxDevices, bytes, name);
}

bool Free(void* pointer) {
  auto it = g_allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == g_allocations.end() || !it->second.live) return false;
  it->second.live = false;
  it->second.shadow.clear();
  return true;
}

void FreeAll() {
  for (int heap = 0; heap < kNumHeaps; ++heap) {
    if (g_heap_top[heap] > 0) {
      madvise(g_heaps + heap * kHeapBytes, g_heap_top[heap] + kRedZone, MADV_DONTNEED);
    }
    g_heap_top[heap] = 0;
  }
  g_allocations.clear();
  g_last_allocation = nullptr;
  std::memset(g_peer_access, 0, sizeof g_peer_access);
}

void MarkInitialized(const void* pointer, size_t bytes) {
  if (Allocation* allocation = Find(pointer, bytes)) SetInitialized(allocation, pointer, bytes);
}

void EnablePeerAccess(int device, int peer) { g_peer_access[device][peer] = true; }

int DeviceOfFiber(const Fiber* fiber) { return fiber->block->grid->options.device; }

bool IsGlobalPointer(const void* pointer) {
  const auto* p = static_cast<const char*>(pointer);
  return g_heaps != nullptr && p >= g_heaps && p < g_heaps + kHeapBytes * kNumHeaps;
}

Allocation* CheckGlobal(const void* pointer, size_t bytes, const char* what) {
  Allocation* allocation = Find(pointer, bytes);
  if (allocation == nullptr) {
    Fail("oob", "%s of %zu bytes outside every global allocation: %s", what, bytes,
         DescribeGlobal(pointer).c_str());
  }
  if (!allocation->live) {
    Fail("oob", "%s of freed memory: %s", what, DescribeGlobal(pointer).c_str());
  }
  if (g_current != nullptr && allocation->device >= 0) {
    const int device = DeviceOfFiber(g_current);
    if (allocation->device != device && !g_peer_access[device][allocation->device]) {
      Fail("peer", "%s of %s on device %d by device %d, which has not mapped it", what,
           DescribeGlobal(pointer).c_str(), allocation->device, device);
    }
  }
  return allocation;
}

void CheckInitialized(const Allocation* allocation, const void* pointer, size_t bytes,
                      const char* what) {
  if (!g_engine.options.check_races) return;
  const size_t begin = static_cast<const char*>(pointer) - allocation->base;
  for (size_t word = begin / 4; word * 4 < begin + bytes; ++word) {
    const uint8_t mask = WordMask(word, begin, bytes);
    if ((allocation->initialized[word] & mask) == mask) continue;
    Fail("uninit", "%s reads global %s, which was never written", what,
         DescribeGlobal(allocation->base + word * 4).c_str());
  }
}

void SetInitialized(Allocation* allocation, const void* pointer, size_t bytes) {
  if (bytes == 0) return;
  const size_t begin = static_cast<const char*>(pointer) - allocation->base;
  const size_t first = begin / 4, last = (begin + bytes - 1) / 4;
  allocation->initialized[first] |= WordMask(first, begin, bytes);
  allocation->initialized[last] |= WordMask(last, begin, bytes);
  if (last > first + 1) std::memset(&allocation->initialized[first + 1], 0xF, last - first - 1);
}

Cell& GlobalCell(Allocation* allocation, size_t word) {
  if (allocation->shadow.empty()) {
    allocation->shadow.resize(allocation->bytes / 4 / kShadowPage + 1);
  }
  std::unique_ptr<Cell[]>& page = allocation->shadow[word / kShadowPage];
  if (page == nullptr) page = std::make_unique<Cell[]>(kShadowPage);
  return page[word % kShadowPage];
}

void ResetGlobalShadow() {
  for (auto& [base, allocation] : g_allocations) allocation.shadow.clear();
}

std::string DescribeGlobal(const void* pointer) {
  const Allocation* allocation = Nearest(pointer);
  if (allocation == nullptr) return Format("%p", pointer);
  return Format("%s+%ld (of %zu bytes, device %d)", allocation->name.c_str(),
                static_cast<long>(static_cast<const char*>(pointer) - allocation->base),
                allocation->bytes, allocation->device);
}

const void* StoreParameters(const void* parameters, size_t bytes) {
  if (g_parameters == nullptr) g_parameters = MapPages(kParameterBytes);
  g_parameters_top = (g_parameters_top + 127) & ~size_t{127};
  char* place = g_parameters + g_parameters_top;
  g_parameters_top += bytes;
  if (g_parameters_top > kParameterBytes) {
    std::fprintf(stderr, "emulator: kernel parameters exceed the constant bank\n");
    std::abort();
  }
  std::memcpy(place, parameters, bytes);
  return place;
}

void ResetParameters() { g_parameters_top = 0; }

bool IsParameterPointer(const void* pointer) {
  const auto* p = static_cast<const char*>(pointer);
  return g_parameters != nullptr && p >= g_parameters && p < g_parameters + kParameterBytes;
}

bool IsSharedPointer(const void* pointer) {
  const auto* p = static_cast<const char*>(pointer);
  return g_engine.slots != nullptr && p >= g_engine.slots &&
         p < g_engine.slots + g_engine.num_slots * kSlotBytes;
}

Block* BlockOfAddress(uint32_t address) {
  const auto& blocks = g_current->block->cluster->blocks;
  const uint32_t rank = address >> 24;
  if (rank >= blocks.size()) {
    Fail("oob", "shared::cluster address 0x%x names rank %u of a cluster of %zu", address, rank,
         blocks.size());
  }
  return blocks[rank];
}

void CheckSharedOffset(const Block* block, uint32_t offset, size_t bytes, const char* what) {
  if (offset >= kReservedShared && offset + bytes <= block->shared_end) return;
  Fail("oob", "%s: shared 0x%x + %zu bytes is outside the block's shared memory [0x%x, 0x%x)", what,
       offset, bytes, kReservedShared, block->shared_end);
}

Block* CheckShared(uint32_t address, size_t bytes, const char* what) {
  Block* block = BlockOfAddress(address);
  CheckSharedOffset(block, address & kOffsetMask, bytes, what);
  return block;
}

ThreadContext* CurrentThread() { return g_current->context; }

void* SharedStorage() { return g_current->block->shared + kReservedShared; }

uint32_t SharedAddress(const void* pointer) {
  if (IsSharedPointer(pointer)) {
    const size_t distance = static_cast<const char*>(pointer) - g_engine.slots;
    const Block* block = g_engine.slot_block[distance / kSlotBytes];
    if (block != nullptr && block->cluster == g_current->block->cluster) {
      return block->rank << 24 | static_cast<uint32_t>(distance % kSlotBytes);
    }
  }
  Fail("usage", "%p is not in the shared memory of this cluster", pointer);
}

uint32_t MapToClusterRank(uint32_t address, uint32_t rank) {
  const size_t size = g_current->block->cluster->blocks.size();
  if (rank >= size) Fail("oob", "mapa: rank %u of a cluster of %zu", rank, size);
  return (address & kOffsetMask) | rank << 24;
}

void* SharedPointer(uint32_t address) {
  return BlockOfAddress(address)->shared + (address & kOffsetMask);
}

void NameSharedMemory(const void* pointer, const char* name, int index) {
  const uint32_t address = SharedAddress(pointer);
  BlockOfAddress(address)->names[address & kOffsetMask] =
      index >= 0 ? Format("%s[%d]", name, index) : std::string(name);
}

}  // namespace mok::emulator
