// The seam between kernels and the machine. Kernels include this and nothing of CUDA: nvcc gets
// inline PTX, a host compiler with -DMOK_EMULATOR gets the emulator's twins of the same names.
// The rules for code above the seam are in mok_core/emulator/README.md.
#pragma once

#include "mok_core/device/types.h"

#if defined(MOK_EMULATOR)
#include "mok_core/emulator/twins/device.h"
#else
#include "mok_core/ptx/sm100.h"
#endif
