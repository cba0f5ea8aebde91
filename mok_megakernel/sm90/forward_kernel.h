// The forward of the layer on Hopper as one persistent kernel per rank: exchange, grouped GEMMs,
// shared expert and reduction are tasks of mok_schedule's program, executed by the roles of one
// block per SM (pass_kernel.h).
#pragma once

#include "mok_core/device/device.h"
#include "mok_megakernel/sm90/forward_compute.h"
#include "mok_megakernel/sm90/forward_exchange.h"
#include "mok_megakernel/sm90/pass_kernel.h"

namespace mok {

template <class GemmConfig, PassBug kBug = PassBug::kNone,
          ExchangeBug kExchangeBug = ExchangeBug::kNone, bool kTraces = false>
using Sm90ForwardConfig = Sm90PassConfig<GemmConfig, ForwardWork, kBug, kExchangeBug, kTraces>;
template <class GemmConfig>
using TracedForwardConfig = Sm90ForwardConfig<GemmConfig, PassBug::kNone, ExchangeBug::kNone, true>;

MOK_DEVICE void PrefetchTensorMaps(const ForwardParams& p) {
  if (p.schedule.num_local_experts == 0) return;
  PrefetchTensorMap(&p.ring.x);
  PrefetchTensorMap(&p.weights.gate);
  PrefetchTensorMap(&p.weights.up);
  PrefetchTensorMap(&p.ring.activation);
  PrefetchTensorMap(&p.weights.down);
}

template <class Config>
MOK_KERNEL(kPassThreads, 1)
ForwardKernel(MOK_GRID_CONSTANT(ForwardParams) p) {
  MOK_SHARED_STORAGE(PassStorage<Config>, s);
  RunPass<Config>(p, s);
}

}  // namespace mok
