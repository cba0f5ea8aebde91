#include "mok_core/device/device.h"
#include "mok_megakernel/cuda/leave_passes.h"

namespace mok {
namespace {

// Waits for nobody. The rank's memory may be read and written by the others for as long as they go
// on, and what they make of it is not for use.
MOK_KERNEL(32, 1)
LeavePassesKernel(MOK_GRID_CONSTANT(LeavePassesParams) p) {
  const int lane = static_cast<int>(ThreadIndex().x);
  const uint64_t flag = kLeftFlag + static_cast<uint64_t>(p.code);
  for (const Meeting meeting : {Meeting::kStart, Meeting::kEntry, Meeting::kExit}) {
    for (int rank = lane; rank < p.meeting.num_ranks; rank += 32) {
      StoreReleaseSys(p.meeting.Flag(rank, meeting, p.meeting.rank), flag);
    }
  }
}

}  // namespace

const void* LeavePassesKernelAddress() { return reinterpret_cast<const void*>(&LeavePassesKernel); }

}  // namespace mok
