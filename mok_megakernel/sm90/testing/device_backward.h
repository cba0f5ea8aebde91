// The backward of a DeviceLayer: its gradients and scratch in device memory, one part per rank.
// Through the host seam: for the emulator and for GPUs.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "mok_megakernel/layer_test_support.h"
#include "mok_megakernel/sm90/backward_launch.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/device_memory.h"
#include "mok_megakernel/sm90/testing/trace_buffer.h"

namespace mok::testing {

struct DeviceBackwardOptions {
  int32_t kept_macrobatches = 1;
  DType grad_dtype = DType::kFp32;
  bool accumulate = false;
  double initial_grad = 0;       // with accumulate: what the weight gradients hold before
  bool has_weight_grads = true;  // else the caller wants none
  // A pass of one macrobatch leaves the context as it was, so that it may be run again.
  bool keeps_context = false;
  // State and flags of its own; else those of the forward.
  bool own_state = false;
  // Events of each warp of rank 0 that a trace has room for; 0: no trace.
  uint32_t trace_capacity = 0;
};

class DeviceBackward {
 public:
  using KernelOf = PassKernelInfo (*)(ColumnOrder order);
  // `forward` must outlive it.
  DeviceBackward(const DeviceLayer& forward, const DeviceBackwardOptions& options,
                 KernelOf kernel_of);
  DeviceBackward(const DeviceBackward&) = delete;
  DeviceBackward& operator=(const DeviceBackward&) = delete;

  // NaN in everything that a pass has to write: scratch, rows of routes, gradients (but for those
  // that accumulate, which get their initial value); and, if nothing is kept, in the context of the
  // forward.
  void Poison();

  // Queues one pass of one rank, or of all.
  Status Launch(int rank, PassMode mode, const PassKernelInfo& kernel);
  Status LaunchAll();
  Status LaunchAll(const PassKernelInfo& kernel);

  // Ok, or the first rank's wait that ran out. After the kernels have ended.
  Status CheckRecords() const;

  const BackwardArguments& arguments(int rank) const { return ranks_[rank].arguments; }
  const BackwardParams& params(int rank) const { return ranks_[rank].params; }

  // Of rank 0, since Poison; with trace_capacity.
  const TraceBuffer& trace() const { return *trace_; }

  // All gradients, joined over ranks; `out` is the forward's.
  LayerResult Result() const;

 private:
  struct Rank {
    BackwardArguments arguments;
    BackwardParams params;
    void* scratch = nullptr;
    size_t scratch_bytes = 0;
    size_t poison_begin = 0;  // scratch before it is state
  };

  // A weight gradient.
  void* Gradient(int device, int64_t count, const char* name);

  void FillTokens(int rank);
  void FillGradients(int rank);
  void FillMemory(int rank);
  void FillGateUpGrads(int rank);
  void Connect(int rank);
  void ResetGradients();
  PassKernelInfo KernelOfRank(int rank) const;

  const DeviceLayer& forward_;
  const DeviceBackwardOptions options_;
  KernelOf kernel_of_;
  std::vector<Rank> ranks_;
  std::unique_ptr<TraceBuffer> trace_;  // with trace_capacity
  DeviceMemory memory_;
  std::vector<std::pair<void*, int64_t>> gradients_;  // weights: elements
};

}  // namespace mok::testing
