// Twin of mok_core/ptx/fence.h.
#pragma once

#include "mok_core/emulator/twins/compiler.h"

namespace mok {

MOK_DEVICE void FenceProxyAsync() { emulator::FenceProxyAsync(emulator::ProxyFenceSpace::kAll); }
MOK_DEVICE void FenceProxyAsyncGlobal() {
  emulator::FenceProxyAsync(emulator::ProxyFenceSpace::kGlobal);
}
MOK_DEVICE void FenceProxyAsyncShared() {
  emulator::FenceProxyAsync(emulator::ProxyFenceSpace::kShared);
}
MOK_DEVICE void FenceMbarrierInit() { emulator::FenceMbarrierInit(); }
MOK_DEVICE void FenceAcquireReleaseGpu() { emulator::Fence(emulator::Scope::kGpu); }
MOK_DEVICE void FenceAcquireReleaseSys() { emulator::Fence(emulator::Scope::kSystem); }

}  // namespace mok
