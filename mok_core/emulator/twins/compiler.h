// Twin of mok_core/ptx/compiler.h for the host compiler.
#pragma once

#include <cstdint>
#include <cstring>

#include "mok_core/device/types.h"
#include "mok_core/emulator/device_api.h"

#define MOK_DEVICE inline __attribute__((always_inline))
#define MOK_KERNEL(threads, blocks) void
#define MOK_GRID_CONSTANT(Type) const Type&
#define MOK_SHARED_STORAGE(Type, name) \
  Type& name = *static_cast<Type*>(::mok::emulator::SharedStorage())
#define MOK_NAME(pointer, text, index) ::mok::emulator::NameSharedMemory(pointer, text, index)
#define MOK_EXPECT(condition) ((condition) ? (void)0 : ::mok::emulator::FailExpectation(#condition))
#define MOK_UNROLL
