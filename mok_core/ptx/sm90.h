// Every wrapper that an sm_90a kernel may use.
#pragma once

#include "mok_core/ptx/bulk_copy.h"
#include "mok_core/ptx/compiler.h"
#include "mok_core/ptx/fence.h"
#include "mok_core/ptx/ids.h"
#include "mok_core/ptx/math.h"
#include "mok_core/ptx/mbarrier.h"
#include "mok_core/ptx/memory.h"
#include "mok_core/ptx/sync.h"
#include "mok_core/ptx/tensor_copy.h"
#include "mok_core/ptx/time.h"
#include "mok_core/ptx/warp.h"
#include "mok_core/ptx/wgmma.h"
