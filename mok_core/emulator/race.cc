// Happens-before checks with vector clocks, over four-byte cells.
//
// An access is allowed when the conflicting earlier ones are known to the thread that issues it
// (Clock::happened). An asynchronous access also needs a proxy fence on the way from a generic
// write, or from an asynchronous write of another block (PTX ISA section 8, proxy-preserved
// causality order). Atomics conflict only if their scopes do not include each other.
#include "mok_core/emulator/engine.h"

namespace mok::emulator {
namespace {

bool IsAtomic(AccessKind kind) {
  return kind == AccessKind::kAtomicGpu || kind == AccessKind::kAtomicSystem;
}

std::string Where(const MemoryRange& range) {
  return range.block != nullptr ? DescribeShared(range.block, range.offset)
                                : DescribeGlobal(range.pointer);
}

// Two atomics that are not ordered are fine if each one's scope includes the other thread.
void CheckAtomicScopes(const Access& previous, const Access& access, const MemoryRange& where,
                       const char* what) {
  const bool same_device = g_engine.agents[previous.agent].grid->options.device ==
                           g_engine.agents[access.agent].grid->options.device;
  const bool both_system =
      previous.kind == AccessKind::kAtomicSystem && access.kind == AccessKind::kAtomicSystem;
  if (same_device || both_system) return;
  FailRace("scope", "atomics of two devices need system scope on both sides", Where(where), what,
           previous, true);
}

void CheckAgainstWrite(const Cell& cell, const Clock& clock, const Access& access, bool write,
                       const MemoryRange& where, const char* what) {
  const Access& previous = cell.write;
  if (previous.kind == AccessKind::kNone || (previous.bytes & access.bytes) == 0) return;
  if (previous.clock > clock.happened[previous.agent]) {
    if (IsAtomic(previous.kind) && IsAtomic(access.kind)) {
      CheckAtomicScopes(previous, access, where, what);
      return;
    }
    FailRace("race", "data race", Where(where), what, previous, true);
  }
  if (access.kind != AccessKind::kAsync) return;
  const bool crosses =
      previous.kind != AccessKind::kAsync ||
      (!write && g_engine.agents[previous.agent].block != g_engine.agents[access.agent].block);
  const VectorClock& fenced = where.block != nullptr ? clock.async_shared : clock.async_global;
  if (crosses && previous.clock > fenced[previous.agent]) {
    FailRace("proxy-fence", "missing fence.proxy.async", Where(where), what, previous, true);
  }
}

void RememberRead(Cell& cell, const Clock& clock, const Access& access) {
  Access* slot = nullptr;
  for (Access& read : cell.reads) {
    if (read.kind != AccessKind::kNone && read.agent == access.agent &&
        read.bytes == access.bytes) {
      slot = &read;
    }
  }
  for (int i = 0; i < 3 && slot == nullptr; ++i) {
    Access& read = cell.reads[i];
    if (read.kind == AccessKind::kNone || read.clock <= clock.happened[read.agent]) slot = &read;
  }
  // More than three concurrent readers: one is forgotten; over several seeds all get their turn.
  if (slot == nullptr) slot = &cell.reads[Random() % 3];
  *slot = access;
}

}  // namespace

void RecordCellAccess(bool write, Cell& cell, const MemoryRange& where, const Clock& clock,
                      Access access, const char* what) {
  CheckAgainstWrite(cell, clock, access, write, where, what);
  if (!write) {
    RememberRead(cell, clock, access);
    return;
  }
  for (const Access& read : cell.reads) {
    if (read.kind == AccessKind::kNone || (read.bytes & access.bytes) == 0) continue;
    if (read.clock <= clock.happened[read.agent]) continue;
    if (IsAtomic(read.kind) && IsAtomic(access.kind)) {
      CheckAtomicScopes(read, access, where, what);
      continue;
    }
    FailRace("race", "data race", Where(where), what, read, false);
  }
  cell.write = access;
  for (Access& read : cell.reads) read.kind = AccessKind::kNone;
}

void RecordAccess(bool write, const MemoryRange& range, const Clock& clock, Access access,
                  const char* what) {
  if (!g_engine.options.check_races || range.bytes == 0) return;
  Allocation* allocation = nullptr;
  size_t begin = range.offset;
  if (range.block == nullptr) {
    allocation = CheckGlobal(range.pointer, range.bytes, what);
    begin = static_cast<const char*>(range.pointer) - allocation->base;
  }
  const size_t end = begin + range.bytes;
  for (size_t word = begin / 4; word * 4 < end; ++word) {
    access.bytes = 0xF;
    if (word * 4 < begin || word * 4 + 4 > end) {
      access.bytes = 0;
      for (size_t i = 0; i < 4; ++i) {
        if (word * 4 + i >= begin && word * 4 + i < end) access.bytes |= 1 << i;
      }
    }
    MemoryRange where{range.block, static_cast<uint32_t>(word * 4), nullptr, 4};
    if (allocation != nullptr) where.pointer = allocation->base + word * 4;
    Cell& cell = allocation != nullptr ? GlobalCell(allocation, word) : range.block->shadow[word];
    RecordCellAccess(write, cell, where, clock, access, what);
  }
}

Access FiberAccess(AccessKind kind) {
  if (!g_engine.options.check_races) return {};
  return {g_current->clock.happened[g_current->agent], g_current->agent, kind, 0xF};
}

void Tick(Fiber* fiber) {
  if (!g_engine.options.check_races) return;
  fiber->clock.happened.Raise(fiber->agent, fiber->clock.happened[fiber->agent] + 1);
}

void ReleaseTo(Clock& clock) {
  if (!g_engine.options.check_races) return;
  clock.Join(g_current->clock);
  Tick(g_current);
}

void AcquireFrom(const Clock& clock) {
  if (g_engine.options.check_races) g_current->clock.Join(clock);
}

}  // namespace mok::emulator
