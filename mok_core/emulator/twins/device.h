// All twins: what mok_core/ptx/sm90.h and sm100.h are to nvcc.
#pragma once

#include "mok_core/emulator/twins/bulk_copy.h"
#include "mok_core/emulator/twins/cluster_launch_control.h"
#include "mok_core/emulator/twins/compiler.h"
#include "mok_core/emulator/twins/fence.h"
#include "mok_core/emulator/twins/ids.h"
#include "mok_core/emulator/twins/math.h"
#include "mok_core/emulator/twins/mbarrier.h"
#include "mok_core/emulator/twins/memory.h"
#include "mok_core/emulator/twins/sync.h"
#include "mok_core/emulator/twins/tcgen05.h"
#include "mok_core/emulator/twins/tensor_copy.h"
#include "mok_core/emulator/twins/time.h"
#include "mok_core/emulator/twins/warp.h"
#include "mok_core/emulator/twins/wgmma.h"
