// Host side of the schedule kernel: checks the arguments, chooses the grid, launches. Goes through
// the host seam, so that it also serves the emulator.
#pragma once

#include <cstdint>

#include "mok_core/status.h"
#include "mok_schedule/device/schedule_params.h"

namespace mok {

// The kernel as a launch needs it. GetScheduleKernel() is the one to use; tests have others.
struct ScheduleKernelInfo {
  const void* address;
  int threads;
  int64_t shared_bytes;
};
ScheduleKernelInfo GetScheduleKernel();

// Blocks of the grid: enough for one batch of loads per thread over all routes of the largest
// batch, at most one per multiprocessor (all blocks have to be resident at once), at least 2. The
// schedule does not depend on it.
int ScheduleGridBlocks(int64_t max_total_routes, int num_multiprocessors, int threads);

struct ScheduleLaunch {
  int grid_blocks = 0;  // at most those of the scratch
  int device = 0;
  void* stream = nullptr;
};

// kInvalidArgument names the parameter that is out of range; what other ranks pass is checked on
// the device (ScheduleErrorRecord). Returns when the kernel is queued.
Status LaunchSchedule(const ScheduleKernelInfo& kernel, const ScheduleParams& params,
                      const ScheduleLaunch& launch);

}  // namespace mok
