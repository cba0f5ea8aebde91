// Takes part in a pass without a task: for a rank that cannot run it, so that the others need not
// wait for it. Or leaves the passes for good: the others never wait for it again, and find why.
#pragma once

#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/status.h"
#include "mok_megakernel/sm90/pass_params.h"

namespace mok {

// A flag of RankMeeting that stays above every epoch, and holds a MokStatusCode.
inline constexpr uint64_t kLeftFlag = uint64_t{1} << 62;

struct JoinPassParams {
  RankMeeting meeting;  // flags of all ranks: this kernel -> the passes of the others
  PassState* state;     // of this rank: its pass is counted as if it had run
  int32_t left_code;    // 0: takes part in one pass; else a MokStatusCode: leaves for good
};

// Address of the kernel: one warp.
const void* JoinPassKernelAddress();

Status LaunchJoinPass(const JoinPassParams& params, int device, void* stream);

}  // namespace mok
