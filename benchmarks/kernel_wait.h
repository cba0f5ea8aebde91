// What the C APIs of the benchmarks' libraries have in common: errors, and the record of a kernel's
// waits.
#pragma once

#include <cstdint>
#include <string>

#include "mok_core/device/runtime.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/status.h"

namespace mok {

// The text of the calling thread's last error.
inline std::string& LastError() {
  static thread_local std::string text;
  return text;
}

// Keeps the text of an error; returns its code, 0 if there is none.
inline int32_t Report(const Status& status) {
  if (!status.ok()) LastError() = status.ToString();
  return static_cast<int32_t>(status.code());
}

// Memory behind a kernel's DeviceWaitParams, with a timeout of one second.
class KernelWait {
 public:
  KernelWait() = default;
  ~KernelWait() {
    for (void* const memory : {record_, abort_flag_}) Report(runtime::Free(memory));
  }
  KernelWait(const KernelWait&) = delete;
  KernelWait& operator=(const KernelWait&) = delete;

  // Once. `rank` appears in messages.
  Status Allocate(int device, int32_t rank) {
    rank_ = rank;
    MOK_ASSIGN_OR_RETURN(record_,
                         runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record"));
    MOK_ASSIGN_OR_RETURN(abort_flag_,
                         runtime::AllocateDevice(device, sizeof(uint32_t), "abort_flag"));
    return runtime::Fill(abort_flag_, 0, sizeof(uint32_t));
  }

  DeviceWaitParams params() const {
    constexpr uint64_t kTimeoutNs = 1'000'000'000;
    return {static_cast<DeviceWaitRecord*>(record_), static_cast<uint32_t*>(abort_flag_),
            kTimeoutNs, rank_};
  }
  const DeviceWaitRecord& record() const { return *static_cast<const DeviceWaitRecord*>(record_); }

 private:
  void* record_ = nullptr;      // in mapped host memory
  void* abort_flag_ = nullptr;  // in device memory
  int32_t rank_ = 0;
};

}  // namespace mok
