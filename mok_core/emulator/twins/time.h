// Twin of mok_core/ptx/time.h. Time is virtual: see Options::fast_forward.
#pragma once

#include "mok_core/emulator/twins/compiler.h"

namespace mok {

MOK_DEVICE uint64_t GlobalTimer() { return emulator::GlobalTimer(); }
MOK_DEVICE uint64_t CycleCounter() { return emulator::CycleCounter(); }
MOK_DEVICE void NanoSleep(uint32_t nanoseconds) { emulator::NanoSleep(nanoseconds); }
MOK_DEVICE void Trap() { emulator::Trap(); }

}  // namespace mok
