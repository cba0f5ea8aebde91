// Bulk and tensor copies. Checks happen at issue, with what the issuing thread knows; effects
// happen later, when the scheduler lets them.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "mok_core/emulator/engine.h"
#include "mok_core/emulator/tensor_map.h"

namespace mok::emulator {
namespace {

constexpr uint32_t kMaxRanks = 16;

// Accesses of a transfer are on its barrier's clock: known to whoever sees the phase complete.
Access TransferAccess(const Barrier& barrier) {
  return {barrier.phase + 1, barrier.agent, AccessKind::kAsync, 0xF};
}

void CheckAlignment(const void* global, uint32_t shared, uint32_t bytes) {
  if (((reinterpret_cast<uintptr_t>(global) | shared | bytes) & 15) != 0) {
    Fail("usage", "cp.async.bulk: addresses and size are multiples of 16 (%p, 0x%x, %u)", global,
         shared, bytes);
  }
}

const TensorMapContents& CheckMap(const void* map, int rank) {
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) Fail("usage", "tensor map not 64-byte aligned");
  const auto& contents = *static_cast<const TensorMapContents*>(map);
  if (contents.magic != kTensorMapMagic) Fail("usage", "not a tensor map");
  if (contents.rank != rank) {
    Fail("usage", "tensor map of rank %d used with %d coordinates", contents.rank, rank);
  }
  return contents;
}

// Calls visit(row number, address of the row's first element, first valid, end valid): elements
// [first, end) of the box's innermost dimension are inside the tensor. Rows outside: first = end.
template <class Visit>
void ForEachBoxRow(const TensorMapContents& map, const std::array<int, 5>& coordinates,
                   Visit visit) {
  const int64_t extent = map.box[0];
  const int64_t begin = std::clamp<int64_t>(-int64_t{coordinates[0]}, 0, extent);
  const int64_t inside = static_cast<int64_t>(map.dimensions[0]) - coordinates[0];
  const int64_t end = std::clamp<int64_t>(inside, begin, extent);
  for (size_t row = 0; row < BoxRows(map); ++row) {
    size_t rest = row;
    bool valid = true;
    char* address = map.base + int64_t{coordinates[0]} * map.element_bytes;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t position = coordinates[i] + static_cast<int64_t>(rest % map.box[i]);
      rest /= map.box[i];
      valid = valid && position >= 0 && position < static_cast<int64_t>(map.dimensions[i]);
      address += position * static_cast<int64_t>(map.strides[i - 1]);
    }
    visit(row, address, begin, valid ? end : begin);
  }
}

std::array<int, 5> Coordinates(const int* coordinates, int rank) {
  std::array<int, 5> result{};
  std::copy(coordinates, coordinates + rank, result.begin());
  return result;
}

void ReadBox(const TensorMapContents& map, const std::array<int, 5>& coordinates, Block* block,
             uint32_t offset) {
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  std::vector<char> row_buffer(row_bytes);
  ForEachBoxRow(map, coordinates, [&](size_t row, char* address, int64_t begin, int64_t end) {
    std::fill(row_buffer.begin(), row_buffer.end(), 0);
    const int64_t size = map.element_bytes;
    if (end > begin) {
      std::memcpy(&row_buffer[begin * size], address + begin * size, (end - begin) * size);
    }
    for (uint32_t k = 0; k < row_bytes; k += 16) {
      const uint32_t place = static_cast<uint32_t>(offset + row * row_bytes + k);
      std::memcpy(block->shared + SwizzleOffset(place, map.swizzle), &row_buffer[k], 16);
    }
  });
}

void LoadIntoBlock(const TensorMapContents& map, const std::array<int, 5>& coordinates,
                   uint32_t shared, uint32_t barrier_address) {
  const uint32_t bytes = BoxBytes(map);
  Block* block = CheckShared(shared, bytes, "tensor load");
  Barrier* barrier = &BarrierAt(barrier_address, "tensor load");
  TouchBarrier(*barrier, AccessKind::kAsync);
  BeginTransfer(*barrier, bytes);
  const uint32_t offset = shared & kOffsetMask;
  const Access access = TransferAccess(*barrier);
  RecordAccess(true, {block, offset, nullptr, bytes}, g_current->clock, access,
               "tensor load (write)");
  ForEachBoxRow(map, coordinates, [&](size_t, char* address, int64_t begin, int64_t end) {
    if (end <= begin) return;
    const size_t size = map.element_bytes;
    const MemoryRange range{nullptr, 0, address + begin * size, (end - begin) * size};
    CheckGlobal(range.pointer, range.bytes, "tensor load");
    RecordAccess(false, range, g_current->clock, access, "tensor load (read)");
  });
  AddAsync([=] {
    ReadBox(map, coordinates, block, offset);
    CompleteTransfer(*barrier, bytes);
    return true;
  });
}

// A store's reads and writes complete separately; both wake the thread that may wait for them.
void AddStore(std::function<void()> read, std::function<void()> write) {
  Fiber* fiber = g_current;
  auto operation = std::make_shared<BulkOperation>();
  fiber->bulk_open.push_back(operation);
  AddAsync([=] {
    const bool reading = !operation->read_done;
    if (reading) {
      read();
      operation->read_done = true;
    } else {
      write();
      operation->write_done = true;
    }
    const bool waits = std::strncmp(fiber->operation.name, "cp.async.bulk.wait", 18) == 0;
    if (fiber->state == FiberState::kBlocked && waits) MakeReady(fiber);
    return !reading;
  });
}

// The next bulk group's accesses, on the clocks of the thread's two bulk agents.
Access BulkAccess(bool write) {
  Fiber* fiber = g_current;
  if (!g_engine.options.check_races) return {};
  if (fiber->bulk_read_agent < 0) {
    fiber->bulk_read_agent = NewAsyncAgent(Agent::Kind::kBulkRead, fiber->block, fiber);
    fiber->bulk_write_agent = NewAsyncAgent(Agent::Kind::kBulkWrite, fiber->block, fiber);
  }
  const int agent = write ? fiber->bulk_write_agent : fiber->bulk_read_agent;
  return {static_cast<uint32_t>(fiber->bulk_groups.size() + 1), static_cast<uint16_t>(agent),
          AccessKind::kAsync, 0xF};
}

// An H200 clips stores at 16-byte units of the innermost dimension, so that a box writes past an
// extent that ends inside a unit. It stops with an illegal instruction when a box begins before the
// tensor in that dimension; boxes that begin inside a unit are refused with them. Loads have no
// such limits.
void CheckStoreGranularity(const TensorMapContents& contents, int coordinate) {
  const int64_t begin = int64_t{coordinate} * contents.element_bytes;
  const uint64_t extent = contents.dimensions[0] * contents.element_bytes;
  if (begin % 16 != 0) {
    Fail("usage", "tensor store of a box that begins at byte %lld, not a multiple of 16",
         static_cast<long long>(begin));
  }
  if (begin < 0) {
    Fail("usage", "tensor store of a box that begins at byte %lld, before its tensor",
         static_cast<long long>(begin));
  }
  if (extent % 16 != 0) {
    Fail("usage", "tensor store into rows of %llu bytes, not a multiple of 16",
         static_cast<unsigned long long>(extent));
  }
}

}  // namespace

void TensorLoad(uint32_t shared, const void* map, uint32_t barrier, const int* coordinates,
                int rank, uint16_t cta_mask) {
  Enter("cp.async.bulk.tensor", barrier, shared);
  const TensorMapContents& contents = CheckMap(map, rank);
  if (shared % 128 != 0) Fail("usage", "tensor load to 0x%x, not 128-byte aligned", shared);
  g_engine.report.tensor_bytes += BoxBytes(contents);
  const std::array<int, 5> place = Coordinates(coordinates, rank);
  if (cta_mask == 0) {
    LoadIntoBlock(contents, place, shared, barrier);
  } else {
    for (uint32_t to = 0; to < kMaxRanks; ++to) {
      if ((cta_mask >> to & 1) == 0) continue;
      LoadIntoBlock(contents, place, (shared & kOffsetMask) | to << 24,
                    (barrier & kOffsetMask) | to << 24);
    }
  }
  ++g_engine.progress;
}

void TensorStore(const void* map, uint32_t shared, const int* coordinates, int rank) {
  Enter("cp.async.bulk.tensor.store", shared);
  const TensorMapContents contents = CheckMap(map, rank);
  if (shared % 128 != 0) Fail("usage", "tensor store from 0x%x, not 128-byte aligned", shared);
  CheckStoreGranularity(contents, coordinates[0]);
  const uint32_t bytes = BoxBytes(contents);
  Block* block = CheckShared(shared, bytes, "tensor store");
  const uint32_t offset = shared & kOffsetMask;
  const std::array<int, 5> place = Coordinates(coordinates, rank);
  RecordAccess(false, {block, offset, nullptr, bytes}, g_current->clock, BulkAccess(false),
               "tensor store (read)");
  const Access write = BulkAccess(true);
  const size_t size = contents.element_bytes;
  ForEachBoxRow(contents, place, [&](size_t, char* address, int64_t begin, int64_t end) {
    if (end <= begin) return;
    const MemoryRange range{nullptr, 0, address + begin * size, (end - begin) * size};
    SetInitialized(CheckGlobal(range.pointer, range.bytes, "tensor store"), range.pointer,
                   range.bytes);
    RecordAccess(true, range, g_current->clock, write, "tensor store (write)");
  });
  auto data = std::make_shared<std::vector<char>>(bytes);
  const uint32_t row_bytes = contents.box[0] * contents.element_bytes;
  AddStore(
      [=] {
        for (uint32_t k = 0; k < bytes; k += 16) {
          const uint32_t place_in_shared = SwizzleOffset(offset + k, contents.swizzle);
          std::memcpy(data->data() + k, block->shared + place_in_shared, 16);
        }
      },
      [=] {
        ForEachBoxRow(contents, place, [&](size_t row, char* address, int64_t begin, int64_t end) {
          if (end <= begin) return;
          std::memcpy(address + begin * size, data->data() + row * row_bytes + begin * size,
                      (end - begin) * size);
        });
      });
}

void PrefetchTensorMap(const void* map) {
  Enter("prefetch.tensormap");
  CheckMap(map, static_cast<const TensorMapContents*>(map)->rank);
}

void BulkLoad(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier_address) {
  Enter("cp.async.bulk.load", barrier_address, shared);
  CheckAlignment(global, shared, bytes);
  Block* block = CheckShared(shared, bytes, "cp.async.bulk");
  Allocation* allocation = CheckGlobal(global, bytes, "cp.async.bulk");
  CheckInitialized(allocation, global, bytes, "cp.async.bulk");
  Barrier* barrier = &BarrierAt(barrier_address, "cp.async.bulk");
  TouchBarrier(*barrier, AccessKind::kAsync);
  BeginTransfer(*barrier, bytes);
  const uint32_t offset = shared & kOffsetMask;
  const Access access = TransferAccess(*barrier);
  RecordAccess(true, {block, offset, nullptr, bytes}, g_current->clock, access,
               "cp.async.bulk (write)");
  RecordAccess(false, {nullptr, 0, global, bytes}, g_current->clock, access,
               "cp.async.bulk (read)");
  AddAsync([=] {
    std::memcpy(block->shared + offset, global, bytes);
    CompleteTransfer(*barrier, bytes);
    return true;
  });
  ++g_engine.progress;
}

void BulkStore(void* global, uint32_t shared, uint32_t bytes) {
  Enter("cp.async.bulk.store", shared);
  CheckAlignment(global, shared, bytes);
  Block* block = CheckShared(shared, bytes, "cp.async.bulk");
  SetInitialized(CheckGlobal(global, bytes, "cp.async.bulk store"), global, bytes);
  const uint32_t offset = shared & kOffsetMask;
  RecordAccess(false, {block, offset, nullptr, bytes}, g_current->clock, BulkAccess(false),
               "bulk store (read of shared)");
  RecordAccess(true, {nullptr, 0, global, bytes}, g_current->clock, BulkAccess(true),
               "bulk store (write of global)");
  auto data = std::make_shared<std::vector<char>>(bytes);
  AddStore([=] { std::memcpy(data->data(), block->shared + offset, bytes); },
           [=] { std::memcpy(global, data->data(), bytes); });
}

void BulkPrefetch(const void* global, uint32_t bytes) {
  Enter("cp.async.bulk.prefetch");
  CheckAlignment(global, 0, bytes);
  CheckGlobal(global, bytes, "cp.async.bulk.prefetch");
}

void BulkCommitGroup() {
  Enter("cp.async.bulk.commit_group");
  g_current->bulk_groups.push_back(std::move(g_current->bulk_open));
  g_current->bulk_open.clear();
}

void BulkWaitGroup(int pending, bool read_only) {
  Enter(read_only ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group");
  Fiber* fiber = g_current;
  const int groups = static_cast<int>(fiber->bulk_groups.size()) - pending;
  size_t& complete = fiber->bulk_complete[read_only ? 1 : 0];
  auto done = [&] {
    for (; static_cast<int>(complete) < groups; ++complete) {
      for (const auto& operation : fiber->bulk_groups[complete]) {
        if (!(read_only ? operation->read_done : operation->write_done)) return false;
      }
    }
    return true;
  };
  while (!done()) BlockFiber();
  if (!g_engine.options.check_races || fiber->bulk_read_agent < 0 || groups <= 0) return;
  fiber->clock.happened.Raise(fiber->bulk_read_agent, groups);
  if (!read_only) fiber->clock.happened.Raise(fiber->bulk_write_agent, groups);
}

void CheckFiberExit(Fiber* fiber) {
  if (!fiber->wgmma_inflight.empty()) {
    Fail("usage", "thread exits with wgmma results that it never waited for");
  }
  const uint64_t committed = fiber->wgmma_groups.empty() ? 0 : fiber->wgmma_groups.back();
  if (fiber->wgmma_issued > committed) Fail("usage", "thread exits with uncommitted wgmma");
  for (const BulkGroup& group : fiber->bulk_groups) {
    for (const auto& operation : group) {
      if (operation->read_done) continue;
      Fail("usage", "thread exits while a bulk store may still read its shared memory");
    }
  }
  if (!fiber->bulk_open.empty()) Fail("usage", "thread exits with an uncommitted bulk store");
}

}  // namespace mok::emulator
