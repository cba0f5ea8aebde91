#include "mok_core/device/device.h"
#include "mok_megakernel/cuda/join_pass.h"

namespace mok {
namespace {

// Waits for nobody: no rank has rows in this pass, so nobody reads or writes this rank's memory.
MOK_KERNEL(32, 1)
JoinPassKernel(MOK_GRID_CONSTANT(JoinPassParams) p) {
  const int lane = static_cast<int>(ThreadIndex().x);
  const uint64_t epoch = LoadRelaxedGpu(&p.state->epoch) + 1;
  for (const Meeting meeting : {Meeting::kEntry, Meeting::kExit}) {
    for (int rank = lane; rank < p.meeting.num_ranks; rank += 32) {
      StoreReleaseSys(p.meeting.Flag(rank, meeting, p.meeting.rank), epoch);
    }
  }
  SyncWarp();  // every lane has read the state
  if (lane == 0) StoreRelaxedGpu(&p.state->epoch, epoch);
}

}  // namespace

const void* JoinPassKernelAddress() { return reinterpret_cast<const void*>(&JoinPassKernel); }

}  // namespace mok
