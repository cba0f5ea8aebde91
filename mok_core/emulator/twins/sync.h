// Twin of mok_core/ptx/sync.h.
#pragma once

#include "mok_core/emulator/twins/compiler.h"

namespace mok {

MOK_DEVICE void SyncBlock() { emulator::SyncBlock(); }
MOK_DEVICE void SyncWarp(uint32_t mask = 0xFFFFFFFFu) { emulator::SyncWarp(mask); }
MOK_DEVICE void NamedBarrierSync(int id, int threads) { emulator::NamedBarrier(id, threads, true); }
MOK_DEVICE void NamedBarrierArrive(int id, int threads) {
  emulator::NamedBarrier(id, threads, false);
}
MOK_DEVICE void ClusterArriveRelease() { emulator::ClusterArrive(true); }
MOK_DEVICE void ClusterArriveRelaxed() { emulator::ClusterArrive(false); }
MOK_DEVICE void ClusterWaitAcquire() { emulator::ClusterWait(); }
template <int kRegisters>
MOK_DEVICE void IncreaseRegisters() {
  emulator::SetRegisters(kRegisters, true);
}
template <int kRegisters>
MOK_DEVICE void DecreaseRegisters() {
  emulator::SetRegisters(kRegisters, false);
}

}  // namespace mok
