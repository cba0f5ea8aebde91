// The trace buffer of device roles, as host code sees it.
#pragma once

#include <cstdint>

namespace mok {

struct DeviceTraceEvent {
  int32_t kind;  // the kernel's own numbering
  int32_t task;
  uint64_t begin_ns, end_ns;
  // %clock64 of the SM at end_ns: the cycles between the ends of two events of a block. Where power
  // sets the clock, time says how much was done and cycles say how well.
  uint64_t end_cycles;
};

// Part of the kernel's parameters. capacity 0: nothing is recorded, but the
// code is there and costs time: a kernel that is to be fast does not hold it.
struct DeviceTraceParams {
  DeviceTraceEvent* events;  // [blocks, num_roles, capacity], device memory: roles -> host
  uint32_t* counts;          // [blocks, num_roles], zero before the launch; may exceed capacity
  uint32_t capacity, num_roles;
};

}  // namespace mok
