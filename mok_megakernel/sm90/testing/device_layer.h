// A layer with random contents in device memory, one part per rank, that runs the forward kernel.
// Through the host seam: for the emulator and for GPUs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mok_megakernel/layer_test_support.h"
#include "mok_megakernel/sm90/forward_launch.h"
#include "mok_megakernel/sm90/testing/device_memory.h"
#include "mok_megakernel/sm90/testing/schedule_ranks_on_device.h"
#include "mok_megakernel/sm90/testing/trace_buffer.h"

namespace mok::testing {

struct DeviceLayerOptions {
  ForwardOptions forward;
  HopperDevice device;
  // Rank r runs on device r; else all ranks on device 0, one after the other.
  bool own_devices = true;
  // Other than what SelectForwardConfig chooses, if > 0.
  int32_t exchange_tiles = 0;
  int32_t token_reduce_tiles = 0;
  int32_t fused_forward_reduce = -1;  // if >= 0
  int32_t fused_backward_reduce = -1;
  int32_t output_panel_blocks = 0;
  int32_t gate_up_panel_blocks = 0;
  int64_t d_x_window_blocks = 0;
  uint32_t chunk_bytes = 0;
  uint64_t push_interval_ns = 0;
  uint64_t push_interval_beside_pulls_ns = 0;
  int32_t id_bytes = 8;
  // The schedule kernel builds the tables before every pass; else the host has built them once.
  bool device_schedule = false;
  uint64_t timeout_ns = 2'000'000'000;
  // Events of each warp of rank 0 that a trace has room for; 0: no trace.
  uint32_t trace_capacity = 0;
};

class DeviceLayer {
 public:
  // kernel_of: which kernel for a column order.
  using KernelOf = ForwardKernelInfo (*)(ColumnOrder order);
  DeviceLayer(const LayerData& data, const DeviceLayerOptions& options, KernelOf kernel_of);
  DeviceLayer(const DeviceLayer&) = delete;
  DeviceLayer& operator=(const DeviceLayer&) = delete;

  // One rank's part of the layer.
  struct Rank {
    ForwardLayerShape shape;
    ForwardConfig config;
    ForwardArguments arguments;
    ForwardParams params;
    int device = 0;
    void* stream = nullptr;
    void* scratch = nullptr;
    size_t scratch_bytes = 0;
    size_t poison_begin = 0;  // scratch before it is state
    int64_t first_token = 0;
    int64_t num_rows = 0;  // valid rows of its table
  };

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  const Rank& rank(int rank) const { return ranks_[rank]; }
  const ForwardConfig& config(int rank) const { return ranks_[rank].config; }
  const LayerData& data() const { return data_; }
  // Ranks run at the same time and meet in their kernels.
  bool ranks_meet() const { return options_.own_devices || num_ranks() == 1; }

  // NaN in everything that a pass has to write: ring, scratch, rows of routes, out.
  void Poison();

  // Queues one pass of one rank, or of all.
  Status Launch(int rank, PassMode mode);
  Status Launch(int rank, PassMode mode, const ForwardKernelInfo& kernel);
  Status LaunchAll();
  Status LaunchAll(const ForwardKernelInfo& kernel);

  // Ok, or the first rank's wait that ran out. After the kernels have ended.
  Status CheckRecords() const;

  // out of all ranks, [T, H] of the whole batch.
  Tensor Out() const;
  void* stream(int rank) const { return ranks_[rank].stream; }
  // Of rank 0, since Poison; with trace_capacity.
  const TraceBuffer& trace() const { return *trace_; }
  // Of the busiest rank, whose GEMMs count its rows and its share of the shared expert.
  double flops() const;

 private:
  void ChooseConfig(int rank);
  void UploadTokens(int rank);
  void UploadWeights(int rank);
  void AllocateOutputs(int rank);
  void UploadSchedule(int rank);
  void Connect(int rank);
  void PrepareDeviceSchedule();

  Status LaunchSchedules() const;

  const LayerData& data_;
  const DeviceLayerOptions options_;
  KernelOf kernel_of_;
  std::vector<Rank> ranks_;
  std::unique_ptr<ScheduleRanksOnDevice> schedules_;  // with device_schedule
  DeviceMemory memory_;
  std::unique_ptr<TraceBuffer> trace_;  // with trace_capacity
};

}  // namespace mok::testing
