// mok_matmul: the router's product, on threads of the process.
#pragma once

#include "mok_core/status.h"
#include "mok_megakernel/mok.h"

namespace mok {

// Safe to call from several threads: one of them uses the shared worker threads, the others compute
// alone meanwhile (same bits).
Status Matmul(const MokMatmulArgs* args);

}  // namespace mok
