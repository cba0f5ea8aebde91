// Twin of mok_core/ptx/mbarrier.h.
#pragma once

#include "mok_core/emulator/twins/ids.h"

namespace mok {

MOK_DEVICE void MbarrierInit(uint64_t* barrier, uint32_t arrivals) {
  emulator::MbarrierInit(SharedAddress(barrier), arrivals);
}
MOK_DEVICE void MbarrierInvalidate(uint64_t* barrier) {
  emulator::MbarrierInvalidate(SharedAddress(barrier));
}
MOK_DEVICE void MbarrierArrive(uint64_t* barrier) {
  emulator::MbarrierArrive(SharedAddress(barrier), emulator::ArriveScope::kBlock);
}
MOK_DEVICE void MbarrierArriveRemote(uint32_t barrier_address) {
  emulator::MbarrierArrive(barrier_address, emulator::ArriveScope::kRemoteRelaxed);
}
MOK_DEVICE void MbarrierArriveReleaseCluster(uint32_t barrier_address) {
  emulator::MbarrierArrive(barrier_address, emulator::ArriveScope::kRemoteRelease);
}
MOK_DEVICE void MbarrierArriveExpectTransaction(uint64_t* barrier, uint32_t bytes) {
  emulator::MbarrierExpectTransaction(SharedAddress(barrier), bytes, true);
}
MOK_DEVICE void MbarrierExpectTransaction(uint64_t* barrier, uint32_t bytes) {
  emulator::MbarrierExpectTransaction(SharedAddress(barrier), bytes, false);
}
MOK_DEVICE bool MbarrierTryWait(uint64_t* barrier, uint32_t parity) {
  return emulator::MbarrierTryWait(SharedAddress(barrier), parity, false);
}
MOK_DEVICE bool MbarrierTryWaitCluster(uint64_t* barrier, uint32_t parity) {
  return emulator::MbarrierTryWait(SharedAddress(barrier), parity, true);
}
MOK_DEVICE bool MbarrierTestWait(uint64_t* barrier, uint32_t parity) {
  return emulator::MbarrierTestWait(SharedAddress(barrier), parity);
}

}  // namespace mok
