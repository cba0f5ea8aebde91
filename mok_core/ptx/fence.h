// Fences between proxies and between scopes (PTX ISA 8.8 section 9.7.13, membar / fence).
#pragma once

#include "mok_core/ptx/compiler.h"

namespace mok {

// fence.proxy.async: generic accesses before it are ordered with async-proxy accesses (TMA, bulk
// copies, wgmma and tcgen05 operands) after it, in every state space.
MOK_DEVICE void FenceProxyAsync() { asm volatile("fence.proxy.async;" ::: "memory"); }

// fence.proxy.async.global: global memory only. A thread that has acquired data in global memory
// executes it before a bulk or tensor load of that data, even if bulk copies wrote it.
MOK_DEVICE void FenceProxyAsyncGlobal() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// fence.proxy.async.shared::cta: shared memory of this CTA only.
MOK_DEVICE void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init: orders this thread's mbarrier.init before uses by the cluster and by the
// async proxy; a block or cluster barrier has to follow.
MOK_DEVICE void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// fence.acq_rel.gpu.
MOK_DEVICE void FenceAcquireReleaseGpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// fence.acq_rel.sys.
MOK_DEVICE void FenceAcquireReleaseSys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace mok
