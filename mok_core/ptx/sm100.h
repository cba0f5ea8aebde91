// Every wrapper that an sm_100a or sm_103a kernel may use. (wgmma templates are declared but cannot
// be instantiated there.)
#pragma once

#include "mok_core/ptx/cluster_launch_control.h"
#include "mok_core/ptx/sm90.h"
#include "mok_core/ptx/tcgen05.h"
