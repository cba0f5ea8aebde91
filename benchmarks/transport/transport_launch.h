// Host side of the transport benchmark: checked launches through mok_core's seam.
#pragma once

#include "benchmarks/transport/transport_params.h"
#include "mok_core/status.h"

namespace mok {

struct TransportLaunch {
  Mechanism mechanism;
  Side side;
  Arrival arrival;
  int device = 0;
  uint32_t num_blocks = 1;  // SMs used
  void* stream = nullptr;
};

// kInvalidArgument names the field that is out of range, with its value.
Status LaunchTransport(const TransportParams& params, const TransportLaunch& launch);

Status LaunchPingPong(const PingPongParams& params, int device, void* stream);

}  // namespace mok
