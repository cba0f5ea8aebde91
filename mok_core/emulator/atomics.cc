// Atomic accesses with order and scope, fences, and virtual time.
//
// A release reaches an acquire that reads it only if the scope of each includes the other's thread
// (PTX ISA section 8, morally strong): within a device any scope does, between devices both must be
// system scope. What a variable's releases carry is kept per (scope, device of the releaser).
#include <algorithm>
#include <cstring>

#include "mok_core/emulator/engine.h"

namespace mok::emulator {
namespace {

constexpr int kNumScopes = 2;

bool IsAcquire(Order order) { return order == Order::kAcquire || order == Order::kAcquireRelease; }
bool IsRelease(Order order) { return order == Order::kRelease || order == Order::kAcquireRelease; }

Clock& Channel(const void* variable, Scope scope, int device) {
  std::vector<SyncChannel>& channels = g_engine.sync_variables[variable];
  for (SyncChannel& channel : channels) {
    if (channel.scope == scope && channel.device == device) return channel.clock;
  }
  channels.push_back({scope, device, Clock{}});
  return channels.back().clock;
}

Clock& Lazy(std::unique_ptr<Clock>& clock) {
  if (clock == nullptr) clock = std::make_unique<Clock>();
  return *clock;
}

void AcquireVariable(const void* variable, Order order, Scope scope) {
  const int device = DeviceOfFiber(g_current);
  for (const SyncChannel& channel : g_engine.sync_variables[variable]) {
    const bool same_device = channel.device == device;
    if (!same_device && !(channel.scope == Scope::kSystem && scope == Scope::kSystem)) continue;
    if (IsAcquire(order)) {
      g_current->clock.Join(channel.clock);
    } else {
      // A later fence turns it into an acquire, at the fence's scope.
      const Scope needed = same_device ? Scope::kGpu : Scope::kSystem;
      Lazy(g_current->relaxed_seen[static_cast<int>(needed)]).Join(channel.clock);
    }
  }
}

void ReleaseVariable(const void* variable, Order order, Scope scope) {
  const int device = DeviceOfFiber(g_current);
  if (IsRelease(order)) {
    ReleaseTo(Channel(variable, scope, device));
    return;
  }
  for (int fence = 0; fence < kNumScopes; ++fence) {
    const std::unique_ptr<Clock>& fenced = g_current->fence_release[fence];
    if (fenced == nullptr) continue;
    const Scope effective = std::min(scope, static_cast<Scope>(fence));
    Channel(variable, effective, device).Join(*fenced);
  }
}

uint64_t NewValue(AtomicOperation operation, uint64_t old, uint64_t value, uint64_t expected) {
  switch (operation) {
    case AtomicOperation::kLoad:
      return old;
    case AtomicOperation::kStore:
      return value;
    case AtomicOperation::kAdd:
      return old + value;
    case AtomicOperation::kCompareSwap:
      return old == expected ? value : old;
  }
  return old;
}

}  // namespace

uint64_t AtomicAccess(void* global, int bytes, AtomicOperation operation, uint64_t value,
                      uint64_t expected, Order order, Scope scope) {
  const bool load = operation == AtomicOperation::kLoad;
  const char* name = load                                   ? "ld.atomic"
                     : operation == AtomicOperation::kStore ? "st.atomic"
                                                            : "atom";
  Enter(name, 0, 0, global);
  Allocation* allocation = CheckGlobal(global, bytes, name);
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0) {
    Fail("usage", "misaligned %s at %s", name, DescribeGlobal(global).c_str());
  }
  // A GPU behind PCIe cannot update host memory atomically; compute-sanitizer rejects it too.
  if (allocation->device < 0 && !load && operation != AtomicOperation::kStore) {
    Fail("usage", "%s on mapped host memory, which only takes loads and stores: %s", name,
         DescribeGlobal(global).c_str());
  }
  if (operation == AtomicOperation::kStore) {
    SetInitialized(allocation, global, bytes);
  } else {
    CheckInitialized(allocation, global, bytes, name);
  }
  uint64_t old = 0;
  std::memcpy(&old, global, bytes);
  uint64_t updated = NewValue(operation, old, value, expected);
  if (bytes == 4) updated = static_cast<uint32_t>(updated);
  if (g_engine.options.check_races) {
    const AccessKind kind =
        scope == Scope::kGpu ? AccessKind::kAtomicGpu : AccessKind::kAtomicSystem;
    RecordAccess(!load, {nullptr, 0, global, static_cast<size_t>(bytes)}, g_current->clock,
                 FiberAccess(kind), name);
    if (operation == AtomicOperation::kStore) {
      g_engine.sync_variables.erase(global);  // ends the release sequence of earlier writes
    } else {
      AcquireVariable(global, order, scope);
    }
    if (!load) ReleaseVariable(global, order, scope);
  }
  if (!load) {
    std::memcpy(global, &updated, bytes);
    if (updated != old) ++g_engine.progress;
  }
  if (updated == old && operation != AtomicOperation::kStore) YieldFiber();  // may be a spin loop
  return old;
}

void Fence(Scope scope) {
  Enter("fence");
  if (!g_engine.options.check_races) return;
  for (int seen = 0; seen <= static_cast<int>(scope); ++seen) {
    if (g_current->relaxed_seen[seen] != nullptr) {
      g_current->clock.Join(*g_current->relaxed_seen[seen]);
    }
  }
  Lazy(g_current->fence_release[static_cast<int>(scope)]) = g_current->clock;
  Tick(g_current);
}

uint64_t GlobalTimer() {
  Enter("globaltimer");
  g_engine.timer_read = true;
  YieldFiber();  // code that watches the clock may be waiting
  return g_engine.time;
}

uint64_t CycleCounter() {
  Enter("clock");
  return g_engine.time;
}

void NanoSleep(uint32_t nanoseconds) {
  Enter("nanosleep", nanoseconds);
  YieldFiber();
}

void Trap() { Fail("trap", "the kernel executed trap"); }

void FailExpectation(const char* condition) { Fail("usage", "expected: %s", condition); }

}  // namespace mok::emulator
