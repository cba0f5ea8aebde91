// mbarrier objects: arrivals, transactions, phases, and what each kind of arrival publishes.
#include <algorithm>
#include <cstring>

#include "mok_core/emulator/engine.h"

namespace mok::emulator {
namespace {

// Written into the barrier's eight bytes: a plain store over them is noticed.
constexpr uint64_t kMagic = 0xB0A2BA22DEADBEEFull;
constexpr int64_t kMaxTransactions = (1 << 20) - 1;  // PTX ISA, mbarrier: range of the tx-count

void Acquire(const Barrier& barrier, bool cluster_scope) {
  AcquireFrom(barrier.completed);
  if (cluster_scope) AcquireFrom(barrier.completed_remote);
  NoteSynchronized();
}

// A remote arrival without release orders only what asynchronous units have done, such as the
// reads of a freed stage; stores of threads stay unpublished.
void ReleaseAsyncOnly(Clock& clock) {
  if (!g_engine.options.check_races) return;
  clock.happened.Join(g_current->clock.happened, g_engine.first_async_chunk);
  Tick(g_current);
}

}  // namespace

Barrier& BarrierAt(uint32_t address, const char* what) {
  Block* block = CheckShared(address, 8, what);
  const uint32_t offset = address & kOffsetMask;
  auto it = block->barriers.find(offset);
  if (it == block->barriers.end()) {
    Fail("usage", "%s on %s: mbarrier not initialised", what,
         DescribeShared(block, offset).c_str());
  }
  uint64_t bytes;
  std::memcpy(&bytes, block->shared + offset, sizeof bytes);
  if (bytes != (kMagic ^ offset)) {
    Fail("oob", "mbarrier %s was overwritten", DescribeShared(block, offset).c_str());
  }
  return it->second;
}

void TouchBarrier(Barrier& barrier, AccessKind kind) {
  if (!g_engine.options.check_races) return;
  const MemoryRange where{barrier.block, barrier.offset, nullptr, 8};
  RecordCellAccess(false, barrier.block->shadow[barrier.offset / 4], where, g_current->clock,
                   FiberAccess(kind), "mbarrier use (initialise, fence and synchronise first)");
}

void CompletePhaseIfDone(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.transactions != 0) return;
  if (barrier.transfers != 0) {
    Fail("tx",
         "mbarrier %s phase %u completes while %d transfers (%ld bytes) are still in flight: "
         "expected transactions too few or announced too late",
         DescribeShared(barrier.block, barrier.offset).c_str(), barrier.phase, barrier.transfers,
         static_cast<long>(barrier.transfer_bytes));
  }
  ++barrier.phase;
  barrier.pending = barrier.count;
  if (g_engine.options.check_races) {
    barrier.completed.Join(barrier.arriving);
    barrier.completed.happened.Raise(barrier.agent, barrier.phase);
    barrier.completed_remote.Join(barrier.arriving_remote);
  }
  Wake(barrier.waiters);
  ++g_engine.progress;
}

void BeginTransfer(Barrier& barrier, uint32_t bytes) {
  ++barrier.transfers;
  barrier.last_transfer = barrier.phase + 1;
  barrier.transfer_bytes += bytes;
}

void CompleteTransfer(Barrier& barrier, uint32_t bytes) {
  --barrier.transfers;
  barrier.transfer_bytes -= bytes;
  barrier.transactions -= bytes;
  if (barrier.transactions < -kMaxTransactions) Fail("tx", "mbarrier transaction underflow");
  ++g_engine.progress;
  CompletePhaseIfDone(barrier);
}

void MbarrierInit(uint32_t address, uint32_t arrivals) {
  Enter("mbarrier.init", address);
  Block* block = CheckShared(address, 8, "mbarrier.init");
  const uint32_t offset = address & kOffsetMask;
  if (address % 8 != 0) Fail("usage", "mbarrier 0x%x is not 8-byte aligned", address);
  if (arrivals == 0) Fail("usage", "mbarrier.init with 0 arrivals");
  if (block->barriers.count(offset) != 0) {
    Fail("usage", "mbarrier %s initialised twice", DescribeShared(block, offset).c_str());
  }
  Barrier& barrier = block->barriers[offset];
  barrier.offset = offset;
  barrier.block = block;
  barrier.count = barrier.pending = arrivals;
  const uint64_t bytes = kMagic ^ offset;
  std::memcpy(block->shared + offset, &bytes, sizeof bytes);
  if (!g_engine.options.check_races) return;
  barrier.agent = NewAsyncAgent(Agent::Kind::kBarrier, block, &barrier);
  RecordAccess(true, {block, offset, nullptr, 8}, g_current->clock,
               FiberAccess(AccessKind::kGeneric), "mbarrier.init");
}

void MbarrierInvalidate(uint32_t address) {
  Enter("mbarrier.inval", address);
  Barrier& barrier = BarrierAt(address, "mbarrier.inval");
  if (barrier.transfers != 0) Fail("tx", "mbarrier.inval with transfers in flight");
  BlockOfAddress(address)->barriers.erase(address & kOffsetMask);
}

void MbarrierArrive(uint32_t address, ArriveScope scope) {
  Enter("mbarrier.arrive", address);
  Barrier& barrier = BarrierAt(address, "mbarrier.arrive");
  TouchBarrier(barrier, AccessKind::kGeneric);
  if (barrier.pending == 0) {
    Fail("usage", "mbarrier %s phase %u: too many arrivals (count %u)",
         DescribeShared(barrier.block, barrier.offset).c_str(), barrier.phase, barrier.count);
  }
  switch (scope) {
    case ArriveScope::kBlock:
      ReleaseTo(barrier.arriving);
      break;
    case ArriveScope::kRemoteRelaxed:
      ReleaseAsyncOnly(barrier.arriving);
      break;
    case ArriveScope::kRemoteRelease:
      ReleaseTo(barrier.arriving_remote);
      break;
  }
  --barrier.pending;
  ++g_engine.progress;
  CompletePhaseIfDone(barrier);
}

void MbarrierExpectTransaction(uint32_t address, uint32_t bytes, bool arrive) {
  Enter("mbarrier.expect_tx", address, bytes);
  Barrier& barrier = BarrierAt(address, "mbarrier.expect_tx");
  TouchBarrier(barrier, AccessKind::kGeneric);
  barrier.transactions += bytes;
  if (barrier.transactions > kMaxTransactions) Fail("tx", "mbarrier transaction overflow");
  ++g_engine.progress;
  if (!arrive) return;
  if (barrier.pending == 0) {
    Fail("usage", "mbarrier %s: too many arrivals",
         DescribeShared(barrier.block, barrier.offset).c_str());
  }
  ReleaseTo(barrier.arriving);
  --barrier.pending;
  CompletePhaseIfDone(barrier);
}

bool MbarrierTryWait(uint32_t address, uint32_t parity, bool cluster_scope) {
  Enter("mbarrier.try_wait", address, parity);
  if (parity > 1) Fail("usage", "mbarrier parity %u", parity);
  Barrier& barrier = BarrierAt(address, "mbarrier.try_wait");
  TouchBarrier(barrier, AccessKind::kGeneric);
  Fiber* fiber = g_current;
  while ((barrier.phase & 1) == parity) {
    if (g_engine.options.seed != 0 && Random() % 64 == 0) return false;
    barrier.waiters.push_back(fiber);
    fiber->time_limited = true;
    BlockFiber();
    fiber->time_limited = false;
    const auto self = std::find(barrier.waiters.begin(), barrier.waiters.end(), fiber);
    if (self == barrier.waiters.end()) continue;
    barrier.waiters.erase(self);  // the time limit woke this thread, not the barrier
    return false;
  }
  Acquire(barrier, cluster_scope);
  return true;
}

bool MbarrierTestWait(uint32_t address, uint32_t parity) {
  Enter("mbarrier.test_wait", address, parity);
  if (parity > 1) Fail("usage", "mbarrier parity %u", parity);
  Barrier& barrier = BarrierAt(address, "mbarrier.test_wait");
  TouchBarrier(barrier, AccessKind::kGeneric);
  if ((barrier.phase & 1) == parity) {
    YieldFiber();
    return false;
  }
  Acquire(barrier, false);
  return true;
}

void FenceMbarrierInit() {
  Enter("fence.mbarrier_init");
  if (!g_engine.options.check_races) return;
  g_current->clock.async_shared = g_current->clock.happened;
  Tick(g_current);
}

void FenceProxyAsync(ProxyFenceSpace space) {
  Enter("fence.proxy.async");
  if (!g_engine.options.check_races) return;
  Clock& clock = g_current->clock;
  if (space != ProxyFenceSpace::kGlobal) clock.async_shared = clock.happened;
  if (space != ProxyFenceSpace::kShared) clock.async_global = clock.happened;
  Tick(g_current);
}

}  // namespace mok::emulator
