// Kernels for tests of the schedule on a device: the schedule kernel with few threads and planted
// bugs, and one that decodes a program there.
#pragma once

#include <cstdint>

#include "mok_schedule/device/device_schedule.h"
#include "mok_schedule/device/launch_schedule.h"

namespace mok::testing {

// The schedule kernel with 64 threads; `bug` is a ScheduleBug. On a GPU only the correct one exists
// (address nullptr).
ScheduleKernelInfo GetSmallScheduleKernel(int bug);

// Decodes every task of one queue, on the device, from a schedule that was built there.
struct DecodeParams {
  DeviceSchedule schedule;
  ProgramShape shape;  // but for ring.num_row_blocks
  Queue queue;
  int64_t capacity;            // of the arrays
  int64_t* num_tasks;          // [1]
  Task* tasks;                 // [num_tasks]
  Dependencies* dependencies;  // [num_tasks]
};
inline constexpr int kDecodeThreads = 32;
const void* DecodeKernelAddress();

}  // namespace mok::testing
