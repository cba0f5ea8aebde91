#include "mok_core/device/wait_record.h"

namespace mok {
namespace {

std::string Name(const char* (*names)(int32_t), int32_t value) {
  return names != nullptr ? names(value) : StrCat(value);
}

}  // namespace

Status CheckDeviceWaitRecord(const DeviceWaitRecord& record, const DeviceWaitNames& names) {
  if (record.state == 0) return OkStatus();
  if (record.state != 2) {
    return DeadlineExceededError("a device wait ran out, and the kernel died while reporting it");
  }
  return DeadlineExceededError("rank ", record.rank, ", block ", record.block, ", thread ",
                               record.thread, ", role ", Name(names.role, record.role), ": task ",
                               record.task, " of kind ", Name(names.task_kind, record.task_kind),
                               " expected ", record.expected, ", observed ", record.observed,
                               " after ", record.waited_ns / 1000000, " ms");
}

}  // namespace mok
