// Builds the schedules of a test layer with the schedule kernel, in the stream of the forward.
#pragma once

#include <cstdint>
#include <vector>

#include "mok_megakernel/sm90/testing/device_memory.h"
#include "mok_schedule/device/launch_schedule.h"
#include "mok_schedule/device/schedule_params.h"

namespace mok::testing {

// What one rank brings.
struct ScheduleRank {
  int device = 0;
  void* stream = nullptr;
  const void* expert_ids = nullptr;  // device memory
  int32_t id_bytes = 8;
  int64_t num_tokens = 0;
  int32_t num_local_experts = 0;
  int64_t macrobatch_blocks = 1;
};

class ScheduleRanksOnDevice {
 public:
  ScheduleRanksOnDevice(const std::vector<ScheduleRank>& ranks, int topk, uint64_t timeout_ns);
  ScheduleRanksOnDevice(const ScheduleRanksOnDevice&) = delete;
  ScheduleRanksOnDevice& operator=(const ScheduleRanksOnDevice&) = delete;

  // What the forward is given; valid on the device once the kernel has run.
  const DeviceSchedule& schedule(int rank) const { return params_[rank].schedule; }

  // Queues the build of one rank. kAll: all ranks run at the same time.
  Status Launch(int rank, ScheduleSteps steps) const;
  // After the kernels have ended.
  Status Check() const;

 private:
  std::vector<ScheduleRank> ranks_;
  std::vector<ScheduleParams> params_;
  DeviceMemory memory_;
};

}  // namespace mok::testing
