// What a device wait leaves behind when it runs out of time. Shared by device and host code.
#pragma once

#include <cstdint>
#include <string>

#include "mok_core/status.h"

namespace mok {

// In mapped host memory, one per rank, zero before first use. Written by the wait that raises the
// abort flag, with stores only; later ones leave it alone.
struct DeviceWaitRecord {
  uint32_t state;  // 0: nothing, 1: being written, 2: complete
  int32_t rank;
  int32_t block;   // linear block index
  int32_t thread;  // linear thread index
  int32_t role;    // the kernel's own numbering
  int32_t task_kind;
  int64_t task;  // index in the queue of the role
  uint64_t expected, observed;
  uint64_t waited_ns;
};

// Part of the kernel's parameters.
struct DeviceWaitParams {
  DeviceWaitRecord* record;  // mapped host memory: device waits -> host
  uint32_t* abort_flag;      // device (not host) memory of this rank, 0 at first: 1 ends the grid
  uint64_t timeout_ns;       // of counter waits
  int32_t rank;
};

// Gives role and task kind their names in a message; null: numbers.
struct DeviceWaitNames {
  const char* (*role)(int32_t) = nullptr;
  const char* (*task_kind)(int32_t) = nullptr;
};

// Ok when no wait has run out; else kDeadlineExceeded with rank, block, role, task, expected and
// observed values. Call after the kernel has ended.
Status CheckDeviceWaitRecord(const DeviceWaitRecord& record, const DeviceWaitNames& names = {});

}  // namespace mok
