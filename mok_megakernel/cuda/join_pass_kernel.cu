#include "mok_core/device/device.h"
#include "mok_megakernel/cuda/join_pass.h"

namespace mok {
namespace {

// Waits for nobody. A rank that takes part in a single pass has no rows in it, so nobody reads or
// writes its memory; the memory of one that leaves may be read and written by the others for as
// long as they go on, and what they make of it is not for use.
MOK_KERNEL(32, 1)
JoinPassKernel(MOK_GRID_CONSTANT(JoinPassParams) p) {
  const int lane = static_cast<int>(ThreadIndex().x);
  const bool leaves = p.left_code != 0;
  const uint64_t epoch = LoadRelaxedGpu(&p.state->epoch) + 1;
  const uint64_t flag = leaves ? kLeftFlag + static_cast<uint64_t>(p.left_code) : epoch;
  for (const Meeting meeting : {Meeting::kEntry, Meeting::kExit}) {
    for (int rank = lane; rank < p.meeting.num_ranks; rank += 32) {
      StoreReleaseSys(p.meeting.Flag(rank, meeting, p.meeting.rank), flag);
    }
  }
  SyncWarp();  // every lane has read the state
  if (lane == 0 && !leaves) StoreRelaxedGpu(&p.state->epoch, epoch);
}

}  // namespace

const void* JoinPassKernelAddress() { return reinterpret_cast<const void*>(&JoinPassKernel); }

}  // namespace mok
