// Bulk copies between global and shared memory (PTX ISA 8.8 section 9.7.9, cp.async.bulk).
// Addresses and sizes are multiples of 16 bytes.
#pragma once

#include "mok_core/ptx/compiler.h"
#include "mok_core/ptx/ids.h"

namespace mok {

// cp.async.bulk.shared::cluster.global: completes on `barrier` with `bytes` transactions.
MOK_DEVICE void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// cp.async.bulk with an L2 cache policy (see CreatePolicyEvictFirst).
MOK_DEVICE void BulkLoadHinted(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

// cp.async.bulk.global.shared::cta: joins the thread's current bulk group.
MOK_DEVICE void BulkStore(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(SharedAddress(shared)), "r"(bytes)
               : "memory");
}

// cp.async.bulk.commit_group: closes the thread's current bulk group.
MOK_DEVICE void BulkCommitGroup() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: at most kPending younger groups still read shared memory.
template <int kPending>
MOK_DEVICE void BulkWaitGroupRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.wait_group: at most kPending younger groups are incomplete; the writes of the
// others are visible to this thread, which may release them to others.
template <int kPending>
MOK_DEVICE void BulkWaitGroup() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.prefetch.L2.global.
MOK_DEVICE void BulkPrefetch(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// createpolicy.fractional.L2::evict_first: for data read once.
MOK_DEVICE uint64_t CreatePolicyEvictFirst() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_last: for data that many blocks read.
MOK_DEVICE uint64_t CreatePolicyEvictLast() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace mok
