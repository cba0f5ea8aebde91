// Plain loads and stores of kernel code. Kernels are compiled with -fsanitize=thread, but linked
// with these hooks in place of its run-time library. Kernel object files hold device code only: an
// instrumented copy of, say, a std::vector function could otherwise be linked into the emulator
// itself.
#include "mok_core/emulator/engine.h"

extern "C" char __executable_start, _end;

namespace mok::emulator {
namespace {

void CheckPlainShared(const void* pointer, size_t bytes, bool write) {
  Engine& e = g_engine;
  const char* what = write ? "plain store" : "plain load";
  const size_t distance = static_cast<const char*>(pointer) - e.slots;
  Block* block = e.slot_block[distance / kSlotBytes];
  const auto offset = static_cast<uint32_t>(distance % kSlotBytes);
  if (block == nullptr || block->cluster != g_current->block->cluster) {
    Fail("oob", "%s to shared memory of another cluster", what);
  }
  CheckSharedOffset(block, offset, bytes, what);
  if (!e.options.check_races) return;
  if (!write && block->shadow[offset / 4].write.kind == AccessKind::kNone) {
    Fail("uninit", "plain load of shared %s, which was never written",
         DescribeShared(block, offset).c_str());
  }
  RecordAccess(write, {block, offset, nullptr, bytes}, g_current->clock,
               FiberAccess(AccessKind::kGeneric), what);
}

void CheckPlainGlobal(const void* pointer, size_t bytes, bool write) {
  const char* what = write ? "plain store" : "plain load";
  Allocation* allocation = CheckGlobal(pointer, bytes, what);
  if (write) {
    SetInitialized(allocation, pointer, bytes);
  } else {
    CheckInitialized(allocation, pointer, bytes, what);
  }
  RecordAccess(write, {nullptr, 0, pointer, bytes}, g_current->clock,
               FiberAccess(AccessKind::kGeneric), what);
}

// Null outside kernels: test and host code of the same object file passes through unhindered.
void OnPlainAccess(const void* pointer, size_t bytes, bool write) {
  if (g_current == nullptr || g_engine.failed) return;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address - reinterpret_cast<uintptr_t>(g_current->stack) < kStackBytes) return;
  ++g_engine.report.plain_accesses;
  if (IsSharedPointer(pointer)) {
    CheckPlainShared(pointer, bytes, write);
  } else if (IsGlobalPointer(pointer)) {
    CheckPlainGlobal(pointer, bytes, write);
  } else if (IsParameterPointer(pointer)) {
    if (write) Fail("usage", "kernel writes its constant bank");
  } else if (address >= reinterpret_cast<uintptr_t>(&__executable_start) &&
             address < reinterpret_cast<uintptr_t>(&_end)) {
    if (write) Fail("usage", "kernel writes a host global or static variable");
  } else {
    Fail("oob", "plain %s at %p: not stack, shared or device memory (a host pointer?)",
         write ? "store" : "load", pointer);
  }
}

}  // namespace

void CheckGlobalAccess(const void* global, size_t bytes, bool write, bool non_coherent) {
  Enter(write ? "st.global" : non_coherent ? "ld.global.nc" : "ld.global", 0, 0, global);
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0) {
    Fail("usage", "misaligned access of %zu bytes at %s", bytes, DescribeGlobal(global).c_str());
  }
  CheckPlainGlobal(global, bytes, write);
  if (!non_coherent || !g_engine.options.check_races) return;
  Allocation* allocation = CheckGlobal(global, bytes, "ld.global.nc");
  const size_t begin = (static_cast<const char*>(global) - allocation->base) / 4;
  for (size_t word = begin; word < begin + bytes / 4; ++word) {
    const Access& last = GlobalCell(allocation, word).write;
    if (last.kind != AccessKind::kNone &&
        g_engine.agents[last.agent].grid == g_current->block->grid) {
      Fail("usage", "ld.global.nc of %s, which this kernel writes", DescribeGlobal(global).c_str());
    }
  }
}

}  // namespace mok::emulator

#define MOK_HOOK(name, bytes, write) \
  extern "C" void __tsan_##name##bytes(void* p) { mok::emulator::OnPlainAccess(p, bytes, write); }
#define MOK_HOOKS(bytes)                 \
  MOK_HOOK(read, bytes, false)           \
  MOK_HOOK(write, bytes, true)           \
  MOK_HOOK(volatile_read, bytes, false)  \
  MOK_HOOK(volatile_write, bytes, true)  \
  MOK_HOOK(unaligned_read, bytes, false) \
  MOK_HOOK(unaligned_write, bytes, true)
MOK_HOOKS(1)
MOK_HOOKS(2)
MOK_HOOKS(4)
MOK_HOOKS(8)
MOK_HOOKS(16)

extern "C" {
// The guard of a function static. All other atomics of the host language stay undefined: a kernel
// that uses std::atomic does not link.
char __tsan_atomic8_load(const volatile char* p, int /*order*/) {
  if (mok::emulator::g_current != nullptr) {
    mok::emulator::Fail("usage", "kernel uses a function static");
  }
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, size_t bytes) { mok::emulator::OnPlainAccess(p, bytes, false); }
void __tsan_write_range(void* p, size_t bytes) { mok::emulator::OnPlainAccess(p, bytes, true); }
}
