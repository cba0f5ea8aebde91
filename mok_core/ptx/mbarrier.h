// Shared-memory barriers with phases and transaction counts (PTX ISA 8.8 section 9.7.13, mbarrier).
//
// Waits name a phase by its parity: TryWait(parity) is true once the phase with that parity has
// completed. A fresh barrier behaves as if the phase of parity 1 had just completed.
#pragma once

#include "mok_core/ptx/compiler.h"
#include "mok_core/ptx/ids.h"

namespace mok {

// mbarrier.init: phases complete after `arrivals` arrivals and when the transaction count is 0.
MOK_DEVICE void MbarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// mbarrier.inval: the 8 bytes may be reused afterwards.
MOK_DEVICE void MbarrierInvalidate(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// mbarrier.arrive, release at CTA scope.
MOK_DEVICE void MbarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// mbarrier.arrive on a barrier of another CTA of the cluster, without release.cluster, which would
// compile to a GPU-wide MEMBAR. It orders what the async proxy has read (a freed stage), but
// publishes no store of this thread to the other CTA.
MOK_DEVICE void MbarrierArriveRemote(uint32_t barrier_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_address) : "memory");
}

// mbarrier.arrive.release.cluster: also publishes this thread's stores. Expensive.
MOK_DEVICE void MbarrierArriveReleaseCluster(uint32_t barrier_address) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_address)
               : "memory");
}

// mbarrier.arrive.expect_tx: adds `bytes` to the phase's transaction count, then arrives once.
MOK_DEVICE void MbarrierArriveExpectTransaction(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// mbarrier.expect_tx: adds `bytes` to the transaction count and does not arrive.
MOK_DEVICE void MbarrierExpectTransaction(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// mbarrier.try_wait.parity, acquire at CTA scope: suspends the thread for a time limit of the
// hardware's choice. Returns whether the phase of that parity has completed.
MOK_DEVICE bool MbarrierTryWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// mbarrier.try_wait.parity.acquire.cluster: also acquires what other CTAs released here.
MOK_DEVICE bool MbarrierTryWaitCluster(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// mbarrier.test_wait.parity: as TryWait, and never suspends.
MOK_DEVICE bool MbarrierTestWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace mok
