// Clocks, sleep and trap.
#pragma once

#include "mok_core/ptx/compiler.h"

namespace mok {

// PTX ISA 8.8 section 10, %globaltimer: nanoseconds, the same on all SMs of a GPU; coarse.
MOK_DEVICE uint64_t GlobalTimer() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

// PTX ISA 8.8 section 10, %clock64: cycles of this SM.
MOK_DEVICE uint64_t CycleCounter() {
  uint64_t cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

// PTX ISA 8.8 section 9.7.19, nanosleep: between 0 and twice `nanoseconds`.
MOK_DEVICE void NanoSleep(uint32_t nanoseconds) {
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
}

// PTX ISA 8.8 section 9.7.19, trap: ends the grid with an error that destroys the context.
MOK_DEVICE void Trap() { asm volatile("trap;" ::: "memory"); }

}  // namespace mok
