// Leaves the passes for good, for a rank that cannot run one whose schedule it has built: the
// others do not wait for it, then or later, and find why.
#pragma once

#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/status.h"

namespace mok {

// A flag of RankMeeting that stays above every epoch, and holds a MokStatusCode.
inline constexpr uint64_t kLeftFlag = uint64_t{1} << 62;

struct LeavePassesParams {
  RankMeeting meeting;  // flags of all ranks: this kernel -> the passes of the others
  int32_t code;         // a MokStatusCode other than MOK_OK
};

// Address of the kernel: one warp.
const void* LeavePassesKernelAddress();

Status LaunchLeavePasses(const LeavePassesParams& params, int device, void* stream);

}  // namespace mok
