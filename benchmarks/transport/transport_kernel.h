// Addresses of the benchmark's kernels.
#pragma once

#include <cstddef>

#include "benchmarks/transport/transport_params.h"

namespace mok {

// Takes TransportParams; blocks of 32 * kTransportWarps threads.
const void* TransportKernel(Mechanism mechanism, Side side, Arrival arrival);
size_t TransportSharedBytes();

// Takes PingPongParams; one block of 32 threads on each of two GPUs.
const void* PingPongKernel();

}  // namespace mok
