// Takes part in a pass without a task: for a rank that cannot run it, so that the others need not
// wait for it.
#pragma once

#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/status.h"
#include "mok_megakernel/sm90/pass_params.h"

namespace mok {

struct JoinPassParams {
  RankMeeting meeting;  // flags of all ranks: this kernel -> the passes of the others
  PassState* state;     // of this rank: its pass is counted as if it had run
};

// Address of the kernel: one warp.
const void* JoinPassKernelAddress();

Status LaunchJoinPass(const JoinPassParams& params, int device, void* stream);

}  // namespace mok
