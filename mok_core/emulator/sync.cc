// Barriers of threads, warp collectives, register budgets.
#include "mok_core/emulator/engine.h"

#include <cstring>

namespace mok::emulator {

void NoteSynchronized() { g_current->tensor_needs_fence = true; }

void NamedBarrier(int id, int threads, bool wait) {
  Enter(wait ? "bar.sync" : "bar.arrive", id, threads);
  if (id < 0 || id > 15) Fail("usage", "named barrier %d: ids are 0 to 15", id);
  NamedBarrierState& barrier = g_current->block->named_barriers[id];
  if (threads % 32 != 0) Fail("usage", "barrier of %d threads, not a multiple of 32", threads);
  if (barrier.arrived != 0 && barrier.count != threads) {
    Fail("usage", "named barrier %d used with %d and with %d threads", id, barrier.count, threads);
  }
  barrier.count = threads;
  ++barrier.arrived;
  ReleaseTo(barrier.clock);
  if (barrier.arrived == threads) {
    barrier.arrived = 0;
    if (g_engine.options.check_races) {
      for (Fiber* waiter : barrier.waiters) waiter->clock.Join(barrier.clock);
    }
    Wake(barrier.waiters);
    if (wait) AcquireFrom(barrier.clock);
  } else if (wait) {
    barrier.waiters.push_back(g_current);
    BlockFiber();
  }
  if (wait) NoteSynchronized();
}

void SyncBlock() {
  const Index3& size = g_current->context->block_dimensions;
  NamedBarrier(0, static_cast<int>(size.x * size.y * size.z), true);
}

void ClusterArrive(bool release) {
  Enter("barrier.cluster.arrive");
  Cluster* cluster = g_current->block->cluster;
  if (release) ReleaseTo(cluster->arriving);
  if (++cluster->arrived < cluster->total) return;
  cluster->arrived = 0;
  ++cluster->phase;
  if (g_engine.options.check_races) cluster->completed.Join(cluster->arriving);
  Wake(cluster->waiters);
}

void ClusterWait() {
  Enter("barrier.cluster.wait");
  Cluster* cluster = g_current->block->cluster;
  while (cluster->phase <= g_current->cluster_waits) {
    cluster->waiters.push_back(g_current);
    BlockFiber();
  }
  ++g_current->cluster_waits;
  AcquireFrom(cluster->completed);
  NoteSynchronized();
}

Collective& RunCollective(const char* name, uint32_t mask, uint64_t in, bool memory,
                          void (*combine)(Collective&)) {
  Enter(name);
  Fiber* fiber = g_current;
  Collective& c = fiber->block->collectives[fiber->warp];
  if ((mask >> fiber->lane & 1) == 0) Fail("usage", "%s: lane not in mask %08x", name, mask);
  if (c.arrived == 0) {
    c.name = name;
    c.mask = mask;
  } else if (c.name != name || c.mask != mask) {
    Fail("usage", "warp divergence: %s mask %08x while other lanes wait in %s mask %08x", name,
         mask, c.name, c.mask);
  }
  c.arrived |= 1u << fiber->lane;
  c.in[fiber->lane] = in;
  if (memory) ReleaseTo(c.clock);
  if (c.arrived != mask) {
    c.waiters.push_back(fiber);
    BlockFiber();
    return c;
  }
  combine(c);
  c.arrived = 0;
  if (memory && g_engine.options.check_races) {
    for (Fiber* waiter : c.waiters) waiter->clock.Join(c.clock);
  }
  Wake(c.waiters);
  if (memory) AcquireFrom(c.clock);
  return c;
}

void SyncWarp(uint32_t mask) {
  RunCollective("warp.sync", mask, 0, true, [](Collective&) {});
}

uint64_t Shuffle(uint32_t mask, uint64_t value, ShuffleKind kind, int argument) {
  const int lane = g_current->lane;
  int source = lane;
  switch (kind) {
    case ShuffleKind::kIndex:
      source = argument & 31;
      break;
    case ShuffleKind::kXor:
      source = lane ^ argument;
      break;
    case ShuffleKind::kUp:
      source = lane - argument;
      break;
    case ShuffleKind::kDown:
      source = lane + argument;
      break;
  }
  if (source < 0 || source > 31) source = lane;
  Collective& c = RunCollective("warp.shuffle", mask, value, false, [](Collective& done) {
    std::memcpy(done.out, done.in, sizeof done.in);
  });
  if ((mask >> source & 1) == 0) {
    Fail("usage", "shuffle reads lane %d outside mask %08x", source, mask);
  }
  return c.out[source];
}

uint32_t Ballot(uint32_t mask, bool predicate) {
  Collective& c = RunCollective("warp.ballot", mask, predicate, false, [](Collective& done) {
    uint64_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if ((done.arrived >> lane & 1) != 0 && done.in[lane] != 0) votes |= 1ull << lane;
    }
    for (uint64_t& out : done.out) out = votes;
  });
  return static_cast<uint32_t>(c.out[g_current->lane]);
}

bool ElectOne() {
  RunCollective("warp.elect", 0xFFFFFFFFu, 0, false, [](Collective&) {});
  // Which lane is elected is the hardware's choice: here it depends on the seed and the warp.
  const uint64_t seed = g_engine.options.seed;
  const int leader = seed != 0 ? static_cast<int>((seed * 7 + g_current->warp) % 32) : 0;
  return g_current->lane == leader;
}

void SetRegisters(int registers, bool increase) {
  Enter(increase ? "setmaxnreg.inc" : "setmaxnreg.dec", registers);
  Fiber* fiber = g_current;
  Block* block = fiber->block;
  if (registers % 8 != 0 || registers < 24 || registers > 256) {
    Fail("usage", "setmaxnreg %d: a multiple of 8 from 24 to 256", registers);
  }
  if (!increase) {
    if (registers > fiber->registers) {
      Fail("usage", "setmaxnreg.dec from %d to %d", fiber->registers, registers);
    }
    block->free_registers += fiber->registers - registers;
    fiber->registers = registers;
    Wake(block->register_waiters);
    return;
  }
  const int more = registers - fiber->registers;
  if (more < 0) Fail("usage", "setmaxnreg.inc from %d to %d", fiber->registers, registers);
  while (block->free_registers < more) {
    block->register_waiters.push_back(fiber);
    BlockFiber();
  }
  block->free_registers -= more;
  fiber->registers = registers;
}

}  // namespace mok::emulator
