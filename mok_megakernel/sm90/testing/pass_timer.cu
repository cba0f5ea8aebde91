#include "mok_megakernel/sm90/testing/pass_timer.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "mok_core/device/device.h"
#include "mok_core/device/runtime.h"

namespace mok::testing {
namespace {

constexpr uint64_t kGateTimeoutNs = 1'000'000'000;
constexpr auto kSleep = std::chrono::microseconds(300);

void MustSucceed(cudaError_t error) {
  MOK_CHECK(error == cudaSuccess) << cudaGetErrorString(error);
}

// Holds a stream back until the host opens the gate for this pass.
__global__ void WaitForGate(const volatile uint32_t* gate, uint32_t pass) {
  const uint64_t begin = GlobalTimer();
  while (*gate < pass && GlobalTimer() - begin < kGateTimeoutNs) {
  }
}

}  // namespace

PassTimer::PassTimer(std::vector<Lane> lanes) : lanes_(std::move(lanes)) {
  StatusOr<void*> gate = runtime::AllocateMappedHost(sizeof(uint32_t), "gate");
  MOK_CHECK(gate.ok()) << gate.status();
  gate_ = static_cast<uint32_t*>(gate.value());
  for (const Lane& lane : lanes_) {
    MustSucceed(cudaSetDevice(lane.device));
    for (std::vector<void*>* events : {&begin_, &end_}) {
      cudaEvent_t event;
      MustSucceed(cudaEventCreate(&event));
      events->push_back(event);
    }
  }
}

PassTimer::~PassTimer() {
  for (const std::vector<void*>* events : {&begin_, &end_}) {
    for (void* event : *events) MustSucceed(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
  }
  MOK_CHECK(runtime::Free(gate_).ok());
}

StatusOr<double> PassTimer::Run(const std::function<Status()>& launch) {
  ++pass_;
  const auto record = [&](const std::vector<void*>& events) {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      MustSucceed(cudaSetDevice(lanes_[i].device));
      MustSucceed(cudaEventRecord(static_cast<cudaEvent_t>(events[i]),
                                  static_cast<cudaStream_t>(lanes_[i].stream)));
    }
  };
  for (const Lane& lane : lanes_) {
    MustSucceed(cudaSetDevice(lane.device));
    WaitForGate<<<1, 1, 0, static_cast<cudaStream_t>(lane.stream)>>>(gate_, pass_);
    MustSucceed(cudaGetLastError());
  }
  record(begin_);
  const Status launched = launch();
  record(end_);
  std::this_thread::sleep_for(kSleep);
  *static_cast<volatile uint32_t*>(gate_) = pass_;
  MOK_RETURN_IF_ERROR(launched);
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  float most = 0;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    float milliseconds = 0;
    MustSucceed(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin_[i]),
                                     static_cast<cudaEvent_t>(end_[i])));
    most = std::max(most, milliseconds);
  }
  return double{most};
}

}  // namespace mok::testing
