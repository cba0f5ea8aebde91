// Work stealing from the launch queue (PTX ISA 8.8 section 9.7.13, clusterlaunchcontrol). sm_100+.
#pragma once

#include "mok_core/ptx/compiler.h"
#include "mok_core/ptx/ids.h"

namespace mok {

// clusterlaunchcontrol.try_cancel: asks for a cluster that has not started; the 16-byte answer
// completes 16 transactions on `barrier`.
MOK_DEVICE void ClusterLaunchTryCancel(Word4* shared_response, uint64_t* barrier) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
      " [%0], [%1];" ::"r"(SharedAddress(shared_response)),
      "r"(SharedAddress(barrier))
      : "memory");
}

// clusterlaunchcontrol.query_cancel: whether a cluster was taken over, and its first block's index.
MOK_DEVICE bool ClusterLaunchQuery(const Word4* shared_response, Index3* block_index) {
  uint32_t canceled, x, y, z;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b128 r;\n"
      "ld.shared.b128 r, [%4];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, %3, _}, r;\n"
      "}"
      : "=r"(canceled), "=r"(x), "=r"(y), "=r"(z)
      : "r"(SharedAddress(shared_response))
      : "memory");
  *block_index = {x, y, z};
  return canceled != 0;
}

}  // namespace mok
