// What device code says to nvcc. mok_core/emulator/twins/compiler.h says the same to a host
// compiler.
#pragma once

#include <cstdint>

#include "mok_core/device/types.h"

// A device function. Inlined always: register arrays pass through wrappers by reference.
#define MOK_DEVICE __device__ __forceinline__
// A kernel of at most `threads` threads and at least `blocks` resident blocks per SM.
#define MOK_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
// The one parameter of a kernel: read in place from the constant bank, so that tensor maps inside
// it have an address that the TMA unit accepts.
#define MOK_GRID_CONSTANT(Type) const __grid_constant__ Type
// `name` refers to the kernel's one shared-memory struct, which lives in dynamic shared memory.
#define MOK_SHARED_STORAGE(Type, name)                                  \
  extern __shared__ __align__(1024) unsigned char mok_shared_storage[]; \
  Type& name = *reinterpret_cast<Type*>(mok_shared_storage)
// Names shared memory (barriers above all) in the emulator's reports; nothing on the GPU.
#define MOK_NAME(pointer, text, index) ((void)0)
// What the caller has to see to. The emulator fails with the condition's text where it is false; on
// the GPU it is not evaluated.
#define MOK_EXPECT(condition) ((void)sizeof((condition) ? 1 : 0))
#define MOK_UNROLL _Pragma("unroll")
