// The backward of the layer on Hopper as one persistent kernel per rank, in the style of the
// forward (pass_kernel.h): reverse combine by pull, the gradient GEMMs, reverse dispatch by push,
// weight gradients, reduction, and whatever the ring no longer holds computed again.
#pragma once

#include "mok_core/device/device.h"
#include "mok_megakernel/sm90/backward_compute.h"
#include "mok_megakernel/sm90/backward_exchange.h"
#include "mok_megakernel/sm90/pass_kernel.h"

namespace mok {

template <class GemmConfig, PassBug kBug = PassBug::kNone,
          ExchangeBug kExchangeBug = ExchangeBug::kNone, bool kTraces = false>
using Sm90BackwardConfig = Sm90PassConfig<GemmConfig, BackwardWork, kBug, kExchangeBug, kTraces>;
template <class GemmConfig>
using TracedBackwardConfig =
    Sm90BackwardConfig<GemmConfig, PassBug::kNone, ExchangeBug::kNone, true>;

MOK_DEVICE void PrefetchTensorMaps(const BackwardParams& p) {
  if (p.schedule.num_local_experts == 0) return;
  PrefetchTensorMap(&p.routed.down_grad.d_out);
  PrefetchTensorMap(&p.routed.down_grad.weight);
  PrefetchTensorMap(&p.routed.down_grad.gate);
  PrefetchTensorMap(&p.routed.down_grad.up);
  PrefetchTensorMap(&p.routed.input_grad.d_gate);
  PrefetchTensorMap(&p.routed.input_grad.d_up);
  PrefetchTensorMap(&p.routed.input_grad.gate);
  PrefetchTensorMap(&p.routed.input_grad.up);
}

template <class Config>
MOK_KERNEL(kPassThreads, 1)
BackwardKernel(MOK_GRID_CONSTANT(BackwardParams) p) {
  MOK_SHARED_STORAGE(PassStorage<Config>, s);
  RunPass<Config>(p, s);
}

}  // namespace mok
