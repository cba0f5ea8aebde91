#include "mok_core/emulator/tensor_memory.h"

#include <cstring>

namespace mok::emulator {
namespace {

constexpr uint32_t kPoison = 0x7FC0DEAD;

bool IsLate(const Access& access, const Clock& clock) {
  return access.kind != AccessKind::kNone && access.clock > clock.happened[access.agent];
}

// Handed over between threads without tcgen05 fences. The tensor core's own work needs none: its
// commit orders it.
bool IsUnfenced(const Access& access, const Access& by, const Clock& clock) {
  return access.kind != AccessKind::kNone && access.agent != by.agent &&
         g_engine.agents[access.agent].kind != Agent::Kind::kTensorCore &&
         access.clock > clock.tensor[access.agent];
}

// First-fit place for `columns` columns, aligned to their number; -1: none.
int FindColumns(const Block* block, int columns) {
  for (int base = 0; base + columns <= kTensorColumns; base += columns) {
    bool free = true;
    for (int i = 0; i < columns; ++i) free = free && block->tensor_owner[base + i] == 0;
    if (free) return base;
  }
  return -1;
}

}  // namespace

void EnsureTensorMemory(Block* block) {
  if (!block->tensor_memory.empty()) return;
  block->tensor_memory.assign(kTensorLanes * kTensorColumns, kPoison);
  block->tensor_owner.assign(kTensorColumns, 0);
  block->tensor_pending.assign(kTensorColumns, 0);
  block->tensor_shadow.resize(kQuadrants * kTensorColumns);
  if (g_engine.options.check_races) {
    block->tensor_agent = NewAsyncAgent(Agent::Kind::kTensorCore, block, block);
  }
}

void CheckTensorColumns(const Block* block, uint32_t column, int count, const char* what) {
  if (block->tensor_memory.empty() || column + count > kTensorColumns) {
    Fail("oob", "%s: tensor-memory columns %u to %u", what, column, column + count);
  }
  for (int i = 0; i < count; ++i) {
    if (block->tensor_owner[column + i] == 0) {
      Fail("oob", "%s: tensor-memory column %u is not allocated", what, column + i);
    }
  }
}

void RecordTensorAccess(bool write, Block* block, int quadrant, int column, const Clock& clock,
                        Access access, const char* what) {
  if (!g_engine.options.check_races) return;
  Cell& cell = block->tensor_shadow[quadrant * kTensorColumns + column];
  auto where = [&] { return Format("tensor-memory column %d lanes %d..", column, quadrant * 32); };
  if (IsLate(cell.write, clock)) FailRace("race", "data race", where(), what, cell.write, true);
  if (!write) {
    Access* slot = nullptr;
    for (Access& read : cell.reads) {
      if (read.kind != AccessKind::kNone && read.agent == access.agent) slot = &read;
    }
    for (int i = 0; i < 3 && slot == nullptr; ++i) {
      if (!IsLate(cell.reads[i], clock)) slot = &cell.reads[i];
    }
    *(slot != nullptr ? slot : &cell.reads[Random() % 3]) = access;
    return;
  }
  for (const Access& read : cell.reads) {
    if (IsLate(read, clock)) FailRace("race", "data race", where(), what, read, false);
    if (IsUnfenced(read, access, clock)) {
      FailRace("tc-fence", "missing tcgen05.fence::before_thread_sync", where(), what, read, false);
    }
  }
  cell.write = access;
  for (Access& read : cell.reads) read.kind = AccessKind::kNone;
}

void RecordTensorColumns(bool write, Block* block, uint32_t column, int count, const Clock& clock,
                         Access access, const char* what) {
  for (int quadrant = 0; quadrant < kQuadrants; ++quadrant) {
    for (int i = 0; i < count; ++i) {
      RecordTensorAccess(write, block, quadrant, static_cast<int>(column) + i, clock, access, what);
    }
  }
}

int TensorQueue(const Block* block) { return block->slot; }

void CheckTensorFence(const char* what) {
  if (!g_current->tensor_needs_fence) return;
  Fail("tc-fence", "%s after a synchronisation without tcgen05.fence::after_thread_sync", what);
}

TensorIssue IssueTensorOperation(Block* block) {
  TensorIssue issue;
  issue.sequence = ++block->tensor_sequence;
  g_current->tensor_last = issue.sequence;
  issue.clock = std::make_shared<Clock>(g_current->clock);
  if (!g_engine.options.check_races) return issue;
  const auto sequence = static_cast<uint32_t>(issue.sequence);
  const auto agent = static_cast<uint16_t>(block->tensor_agent);
  issue.access = {sequence, agent, AccessKind::kAsync, 0xF};
  issue.clock->happened.Raise(agent, sequence);
  issue.clock->async_shared.Raise(agent, sequence);
  return issue;
}

void TensorMemoryAllocate(uint32_t shared_result, uint32_t columns) {
  Enter("tcgen05.alloc", columns);
  Block* block = g_current->block;
  EnsureTensorMemory(block);
  if (columns < 32 || columns > kTensorColumns || (columns & (columns - 1)) != 0) {
    Fail("usage", "tcgen05.alloc of %u columns", columns);
  }
  RunCollective("tcgen05.alloc", ~0u, columns, false, [](Collective&) {});
  if (!block->tensor_permit) Fail("usage", "tcgen05.alloc after relinquish_alloc_permit");
  if (g_current->lane == 0) {
    int base = FindColumns(block, static_cast<int>(columns));
    while (base < 0) {
      block->tensor_waiters.push_back(g_current);
      BlockFiber();
      base = FindColumns(block, static_cast<int>(columns));
    }
    for (uint32_t i = 0; i < columns; ++i) {
      block->tensor_owner[base + i] = static_cast<int>(columns);
    }
    ++block->tensor_allocations;
    Block* target = CheckShared(shared_result, 4, "tcgen05.alloc");
    const uint32_t offset = shared_result & kOffsetMask;
    std::memcpy(target->shared + offset, &base, 4);
    RecordAccess(true, {target, offset, nullptr, 4}, g_current->clock,
                 FiberAccess(AccessKind::kGeneric), "tcgen05.alloc");
  }
  RunCollective("tcgen05.alloc", ~0u, columns, true, [](Collective&) {});
}

void TensorMemoryFree(uint32_t address, uint32_t columns) {
  RunCollective("tcgen05.dealloc", ~0u, address, false, [](Collective&) {});
  if (g_current->lane != 0) return;
  Block* block = g_current->block;
  const uint32_t base = address & 0xFFFF;
  if (block->tensor_memory.empty() || base + columns > kTensorColumns ||
      block->tensor_owner[base] != static_cast<int>(columns)) {
    Fail("usage", "tcgen05.dealloc of 0x%x, %u columns, which were not allocated", address,
         columns);
  }
  for (uint32_t i = 0; i < columns; ++i) {
    if (block->tensor_pending[base + i] != 0) {
      Fail("usage", "tcgen05.dealloc while multiplies are in flight");
    }
    block->tensor_owner[base + i] = 0;
  }
  --block->tensor_allocations;
  Wake(block->tensor_waiters);
}

void TensorMemoryRelinquish() {
  RunCollective("tcgen05.relinquish", ~0u, 0, false, [](Collective&) {});
  g_current->block->tensor_permit = false;
}

void Tcgen05Commit(uint32_t barrier_address) {
  Enter("tcgen05.commit", barrier_address);
  Barrier* barrier = &BarrierAt(barrier_address, "tcgen05.commit");
  TouchBarrier(*barrier, AccessKind::kAsync);
  Block* block = g_current->block;
  EnsureTensorMemory(block);
  const auto sequence = static_cast<uint32_t>(g_current->tensor_last);
  auto clock = std::make_shared<Clock>(g_current->clock);
  Tick(g_current);
  AddAsync(
      [=] {
        if (barrier->pending == 0) {
          Fail("usage", "tcgen05.commit: too many arrivals on mbarrier %s",
               DescribeShared(barrier->block, barrier->offset).c_str());
        }
        --barrier->pending;
        if (g_engine.options.check_races) {
          barrier->arriving.Join(*clock);
          barrier->arriving.happened.Raise(block->tensor_agent, sequence);
        }
        ++g_engine.progress;
        CompletePhaseIfDone(*barrier);
        return true;
      },
      TensorQueue(block));
}

void Tcgen05CommitPair(uint32_t barrier, uint16_t cta_mask) {
  for (uint32_t rank = 0; rank < 16; ++rank) {
    if ((cta_mask >> rank & 1) != 0) Tcgen05Commit((barrier & kOffsetMask) | rank << 24);
  }
}

void Tcgen05Load(uint32_t address, uint32_t* registers, int columns) {
  Enter("tcgen05.ld", address);
  Fiber* fiber = g_current;
  Block* block = fiber->block;
  CheckTensorFence("tcgen05.ld");
  const int quadrant = fiber->warp % kQuadrants;
  if (address >> 16 != static_cast<uint32_t>(quadrant) * 32) {
    Fail("oob", "tcgen05.ld: warp %d may only access tensor-memory lanes %d.., address 0x%x",
         fiber->warp, quadrant * 32, address);
  }
  const uint32_t column = address & 0xFFFF;
  CheckTensorColumns(block, column, columns, "tcgen05.ld");
  for (int i = 0; i < columns; ++i) {
    if (block->tensor_pending[column + i] != 0) {
      Fail("race", "tcgen05.ld of column %u while a multiply that writes it is in flight",
           column + i);
    }
    RecordTensorAccess(false, block, quadrant, static_cast<int>(column) + i, fiber->clock,
                       FiberAccess(AccessKind::kAsync), "tcgen05.ld");
    registers[i] = kPoison;  // until the wait
  }
  fiber->tensor_loads.push_back({address, registers, columns});
}

void Tcgen05WaitLoad() {
  Enter("tcgen05.wait::ld");
  Fiber* fiber = g_current;
  for (const TensorLoadRequest& load : fiber->tensor_loads) {
    const uint32_t lane = (load.address >> 16) + fiber->lane;
    for (int i = 0; i < load.columns; ++i) {
      load.registers[i] =
          fiber->block->tensor_memory[lane * kTensorColumns + (load.address & 0xFFFF) + i];
    }
  }
  fiber->tensor_loads.clear();
}

void Tcgen05Fence(bool after) {
  Enter(after ? "tcgen05.fence::after_thread_sync" : "tcgen05.fence::before_thread_sync");
  if (after) {
    g_current->tensor_needs_fence = false;
  } else if (g_engine.options.check_races) {
    g_current->clock.tensor = g_current->clock.happened;
    Tick(g_current);
  }
}

}  // namespace mok::emulator
