// The trace of one rank's kernel in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "mok_core/device/device_trace_params.h"
#include "mok_megakernel/sm90/testing/device_memory.h"

namespace mok::testing {

class TraceBuffer {
 public:
  // Room for `capacity` events of every warp of num_blocks blocks.
  TraceBuffer(int device, int num_blocks, uint32_t capacity);

  // Part of the kernel's parameters.
  const DeviceTraceParams& params() const { return params_; }
  // Before a launch.
  void Clear() const;
  // [blocks, warps, capacity] events with their counts. After the launch.
  struct Trace {
    std::vector<DeviceTraceEvent> events;
    std::vector<uint32_t> counts;
  };
  Trace Read() const;
  // What the first consumer warps did: per kind of task its number and the means of each phase, in
  // microseconds and in thousands of cycles; the time from the first event to the last, the share
  // of it that they waited, and the cycles and mean clock of an SM.
  std::string SummaryOfConsumers() const;

 private:
  DeviceMemory memory_;
  size_t num_warps_;
  DeviceTraceParams params_ = {};
};

}  // namespace mok::testing
