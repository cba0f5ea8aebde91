// When each role of each block worked on which task, by %globaltimer, and the SM's cycles.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/device_trace_params.h"

namespace mok {

// One role's part of the buffer; used by one thread.
class DeviceTracer {
 public:
  MOK_DEVICE DeviceTracer(const DeviceTraceParams& params, uint32_t block, uint32_t role)
      : params_(&params), slot_(block * params.num_roles + role) {}

  // The time to pass to Record; 0 when tracing is off.
  MOK_DEVICE uint64_t Now() const { return params_->capacity != 0 ? GlobalTimer() : 0; }

  // Notes one task. Events beyond the capacity are counted and dropped.
  MOK_DEVICE void Record(int32_t kind, int32_t task, uint64_t begin_ns) {
    if (params_->capacity == 0) return;
    if (count_ < params_->capacity) {
      params_->events[static_cast<uint64_t>(slot_) * params_->capacity + count_] = {
          kind, task, begin_ns, GlobalTimer(), CycleCounter()};
    }
    params_->counts[slot_] = ++count_;
  }

 private:
  const DeviceTraceParams* params_;
  uint32_t slot_;
  uint32_t count_ = 0;
};

}  // namespace mok
