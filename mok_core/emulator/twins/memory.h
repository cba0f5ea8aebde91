// Twin of mok_core/ptx/memory.h.
#pragma once

#include "mok_core/emulator/twins/compiler.h"

namespace mok {

template <class T>
MOK_DEVICE T EmulatedAtomic(const T* global, emulator::AtomicOperation operation, T value,
                            T expected, emulator::Order order, emulator::Scope scope) {
  return static_cast<T>(emulator::AtomicAccess(const_cast<T*>(global), sizeof(T), operation, value,
                                               expected, order, scope));
}
#define MOK_EMULATED_LOAD(name, order, scope)                                        \
  MOK_DEVICE uint32_t name(const uint32_t* global) {                                 \
    return EmulatedAtomic<uint32_t>(global, emulator::AtomicOperation::kLoad, 0, 0,  \
                                    emulator::Order::order, emulator::Scope::scope); \
  }                                                                                  \
  MOK_DEVICE uint64_t name(const uint64_t* global) {                                 \
    return EmulatedAtomic<uint64_t>(global, emulator::AtomicOperation::kLoad, 0, 0,  \
                                    emulator::Order::order, emulator::Scope::scope); \
  }
#define MOK_EMULATED_UPDATE(name, Type, operation, order, scope)                        \
  MOK_DEVICE Type name(Type* global, Type value) {                                      \
    return EmulatedAtomic<Type>(global, emulator::AtomicOperation::operation, value, 0, \
                                emulator::Order::order, emulator::Scope::scope);        \
  }
#define MOK_EMULATED_WRITE(name, Type, operation, order, scope)                  \
  MOK_DEVICE void name(Type* global, Type value) {                               \
    EmulatedAtomic<Type>(global, emulator::AtomicOperation::operation, value, 0, \
                         emulator::Order::order, emulator::Scope::scope);        \
  }

MOK_EMULATED_LOAD(LoadAcquireGpu, kAcquire, kGpu)
MOK_EMULATED_LOAD(LoadAcquireSys, kAcquire, kSystem)
MOK_EMULATED_LOAD(LoadRelaxedGpu, kRelaxed, kGpu)
MOK_EMULATED_LOAD(LoadRelaxedSys, kRelaxed, kSystem)
MOK_EMULATED_WRITE(StoreReleaseGpu, uint32_t, kStore, kRelease, kGpu)
MOK_EMULATED_WRITE(StoreReleaseGpu, uint64_t, kStore, kRelease, kGpu)
MOK_EMULATED_WRITE(StoreReleaseSys, uint32_t, kStore, kRelease, kSystem)
MOK_EMULATED_WRITE(StoreReleaseSys, uint64_t, kStore, kRelease, kSystem)
MOK_EMULATED_WRITE(StoreRelaxedGpu, uint32_t, kStore, kRelaxed, kGpu)
MOK_EMULATED_WRITE(StoreRelaxedGpu, uint64_t, kStore, kRelaxed, kGpu)
MOK_EMULATED_WRITE(StoreRelaxedSys, uint32_t, kStore, kRelaxed, kSystem)
MOK_EMULATED_WRITE(StoreRelaxedSys, uint64_t, kStore, kRelaxed, kSystem)
MOK_EMULATED_WRITE(ReduceAddReleaseGpu, uint32_t, kAdd, kRelease, kGpu)
MOK_EMULATED_WRITE(ReduceAddReleaseGpu, uint64_t, kAdd, kRelease, kGpu)
MOK_EMULATED_WRITE(ReduceAddReleaseSys, uint32_t, kAdd, kRelease, kSystem)
MOK_EMULATED_WRITE(ReduceAddReleaseSys, uint64_t, kAdd, kRelease, kSystem)
MOK_EMULATED_WRITE(ReduceAddRelaxedGpu, uint32_t, kAdd, kRelaxed, kGpu)
MOK_EMULATED_WRITE(ReduceAddRelaxedGpu, uint64_t, kAdd, kRelaxed, kGpu)
MOK_EMULATED_WRITE(ReduceAddRelaxedSys, uint32_t, kAdd, kRelaxed, kSystem)
MOK_EMULATED_WRITE(ReduceAddRelaxedSys, uint64_t, kAdd, kRelaxed, kSystem)
MOK_EMULATED_UPDATE(AtomicAddRelaxedGpu, uint32_t, kAdd, kRelaxed, kGpu)
MOK_EMULATED_UPDATE(AtomicAddRelaxedGpu, uint64_t, kAdd, kRelaxed, kGpu)
MOK_EMULATED_UPDATE(AtomicAddAcquireReleaseGpu, uint32_t, kAdd, kAcquireRelease, kGpu)
MOK_EMULATED_UPDATE(AtomicAddAcquireReleaseGpu, uint64_t, kAdd, kAcquireRelease, kGpu)
MOK_EMULATED_UPDATE(AtomicAddAcquireReleaseSys, uint32_t, kAdd, kAcquireRelease, kSystem)
MOK_EMULATED_UPDATE(AtomicAddAcquireReleaseSys, uint64_t, kAdd, kAcquireRelease, kSystem)

#undef MOK_EMULATED_LOAD
#undef MOK_EMULATED_UPDATE
#undef MOK_EMULATED_WRITE

MOK_DEVICE uint32_t AtomicCompareSwapAcquireReleaseGpu(uint32_t* global, uint32_t expected,
                                                       uint32_t desired) {
  return EmulatedAtomic<uint32_t>(global, emulator::AtomicOperation::kCompareSwap, desired,
                                  expected, emulator::Order::kAcquireRelease,
                                  emulator::Scope::kGpu);
}
MOK_DEVICE uint32_t AtomicCompareSwapAcquireReleaseSys(uint32_t* global, uint32_t expected,
                                                       uint32_t desired) {
  return EmulatedAtomic<uint32_t>(global, emulator::AtomicOperation::kCompareSwap, desired,
                                  expected, emulator::Order::kAcquireRelease,
                                  emulator::Scope::kSystem);
}
// The checks are the emulator's; the access itself must not reach the plain-access hooks again.
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T EmulatedLoad(const T* global,
                                                                bool non_coherent) {
  emulator::CheckGlobalAccess(global, sizeof(T), false, non_coherent);
  return *global;
}
template <class T>
__attribute__((noinline, no_sanitize("thread"))) void EmulatedStore(T* global, T value) {
  emulator::CheckGlobalAccess(global, sizeof(T), true, false);
  *global = value;
}
MOK_DEVICE uint32_t LoadNonCoherent(const uint32_t* global) { return EmulatedLoad(global, true); }
MOK_DEVICE int32_t LoadNonCoherent(const int32_t* global) { return EmulatedLoad(global, true); }
MOK_DEVICE float LoadNonCoherent(const float* global) { return EmulatedLoad(global, true); }
MOK_DEVICE Word4 LoadNonCoherent(const Word4* global) { return EmulatedLoad(global, true); }
MOK_DEVICE void LoadVectorIf(bool condition, const Word4* global, float (&values)[4]) {
  if (!condition) return;
  const Word4 words = EmulatedLoad(global, false);
  __builtin_memcpy(values, &words, sizeof values);
}
MOK_DEVICE Word2 LoadVector(const Word2* global) { return EmulatedLoad(global, false); }
MOK_DEVICE Word4 LoadVector(const Word4* global) { return EmulatedLoad(global, false); }
MOK_DEVICE Word4 LoadVectorStreaming(const Word4* global) { return EmulatedLoad(global, false); }
MOK_DEVICE void StoreVector(Word4* global, Word4 value) { EmulatedStore(global, value); }
MOK_DEVICE void StoreVectorStreaming(Word2* global, Word2 value) { EmulatedStore(global, value); }
MOK_DEVICE void StoreVectorStreaming(Word4* global, Word4 value) { EmulatedStore(global, value); }

}  // namespace mok
