// Twin of mok_core/ptx/bulk_copy.h. Cache policies change nothing here.
#pragma once

#include "mok_core/emulator/twins/ids.h"

namespace mok {

MOK_DEVICE void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  emulator::BulkLoad(SharedAddress(shared), global, bytes, SharedAddress(barrier));
}
MOK_DEVICE void BulkLoadHinted(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                               uint64_t /*policy*/) {
  BulkLoad(shared, global, bytes, barrier);
}
MOK_DEVICE void BulkStore(void* global, const void* shared, uint32_t bytes) {
  emulator::BulkStore(global, SharedAddress(shared), bytes);
}
MOK_DEVICE void BulkCommitGroup() { emulator::BulkCommitGroup(); }
template <int kPending>
MOK_DEVICE void BulkWaitGroupRead() {
  emulator::BulkWaitGroup(kPending, true);
}
template <int kPending>
MOK_DEVICE void BulkWaitGroup() {
  emulator::BulkWaitGroup(kPending, false);
}
MOK_DEVICE void BulkPrefetch(const void* global, uint32_t bytes) {
  emulator::BulkPrefetch(global, bytes);
}
MOK_DEVICE uint64_t CreatePolicyEvictFirst() { return 0; }
MOK_DEVICE uint64_t CreatePolicyEvictLast() { return 0; }

}  // namespace mok
