// Barriers of the block, of part of it, and of the cluster; register budget of a warpgroup.
#pragma once

#include "mok_core/ptx/compiler.h"

namespace mok {

// PTX ISA 8.8 section 9.7.13, barrier.sync 0 by every thread of the block.
MOK_DEVICE void SyncBlock() { __syncthreads(); }

// PTX ISA 8.8 section 9.7.13, bar.warp.sync.
MOK_DEVICE void SyncWarp(uint32_t mask = 0xFFFFFFFFu) { __syncwarp(mask); }

// PTX ISA 8.8 section 9.7.13, bar.sync: `threads` is a multiple of 32, ids 1 to 15 are free.
MOK_DEVICE void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA 8.8 section 9.7.13, bar.arrive.
MOK_DEVICE void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA 8.8 section 9.7.13, barrier.cluster.arrive.aligned: the lanes of a warp execute it
// together, hence SyncWarp after code of single lanes. The same holds for the other two.
MOK_DEVICE void ClusterArriveRelease() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// PTX ISA 8.8 section 9.7.13, barrier.cluster.arrive: orders nothing, for teardown only.
MOK_DEVICE void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// PTX ISA 8.8 section 9.7.13, barrier.cluster.wait.
MOK_DEVICE void ClusterWaitAcquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// PTX ISA 8.8 section 9.7.19, setmaxnreg: by all warps of a warpgroup; blocks until registers are
// free, so that some other warpgroup has to decrease first.
template <int kRegisters>
MOK_DEVICE void IncreaseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX ISA 8.8 section 9.7.19, setmaxnreg.
template <int kRegisters>
MOK_DEVICE void DecreaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mok
