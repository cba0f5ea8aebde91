#include "mok_schedule/device/schedule_kernel.h"

#include "mok_schedule/device/launch_schedule.h"

namespace mok {

ScheduleKernelInfo GetScheduleKernel() {
  constexpr int kThreads = 256;
  return {reinterpret_cast<const void*>(&ScheduleKernel<kThreads, kScheduleCorrect>), kThreads,
          sizeof(ScheduleStorage<kThreads>)};
}

}  // namespace mok
