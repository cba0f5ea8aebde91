// Twin of mok_core/ptx/cluster_launch_control.h.
#pragma once

#include "mok_core/emulator/twins/ids.h"

namespace mok {

MOK_DEVICE void ClusterLaunchTryCancel(Word4* shared_response, uint64_t* barrier) {
  emulator::ClusterLaunchTryCancel(SharedAddress(shared_response), SharedAddress(barrier));
}
MOK_DEVICE bool ClusterLaunchQuery(const Word4* shared_response, Index3* block_index) {
  return emulator::ClusterLaunchQuery(shared_response, block_index);
}

}  // namespace mok
