// Test only: a layer on the CUDA C API, through the host seam: the emulator runs the kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mok_megakernel/layer_test_support.h"
#include "mok_megakernel/mok_cuda.h"

namespace mok::testing {

struct CudaRanksOptions {
  bool own_devices = false;  // rank r on device r; else all on device 0, one after the other
  int32_t num_sms = 2;
  int32_t num_comm_sms = 0;
  int32_t layer_num_sms = 0;  // SMs that calls occupy; 0: num_sms
  int64_t minibatch_rows = 0;
  int64_t macrobatch_rows = 0;
  int32_t id_bytes = 8;
  bool x_in_heap = false;  // x lies where the forward would stage it
  double timeout_seconds = 2;
  int32_t kept_macrobatches = 1;
  DType grad_dtype = DType::kBf16;
  bool accumulate = false;
  double initial_grad = 0;  // with accumulate: what the weight gradients hold before
  // Of one rank's workspace, before it is made; null: nothing.
  std::function<void(int rank, MokCudaOptions& options)> change_options;
};

// SmallLayer with a scaled shared expert on 1, 2 or 3 ranks; the first two hold the same batch.
LayerSpec SharedLayer(int num_ranks = 2);

// Every rank's workspace, tensors and calls.
class CudaRanks {
 public:
  CudaRanks(const LayerData& data, const CudaRanksOptions& options);
  ~CudaRanks();
  CudaRanks(const CudaRanks&) = delete;
  CudaRanks& operator=(const CudaRanks&) = delete;

  // Queues schedule and forward on all ranks; every call must succeed.
  void QueueAll();
  // Queues the backward on all ranks.
  void QueueBackward();
  // One rank's call; returns the C API's code.
  int32_t BuildSchedule(int rank, int32_t part = MOK_CUDA_WHOLE);
  int32_t Forward(int rank, int32_t part = MOK_CUDA_WHOLE);
  int32_t Backward(int rank, int32_t part = MOK_CUDA_WHOLE);
  int32_t Check(int rank);
  // In place of these.
  int32_t ReportError(int rank, int32_t code, int32_t place = MOK_CUDA_IN_SCHEDULE);

  // Replaces the expert ids [T, K] of the whole batch.
  void SetIds(const std::vector<int64_t>& ids);
  // NaN in out, scratch, context and the heap's data.
  void Poison();
  // out [T, H] of the whole batch.
  Tensor Out() const;
  // out and all gradients.
  LayerResult Result() const;
  MokCudaWorkspace* workspace(int rank) const { return ranks_[rank].workspace; }

  struct Rank {
    int device = 0;
    void* stream = nullptr;
    MokCudaOptions options{};
    MokCudaMemory memory{};
    MokCudaLayerMemory layer_memory{};
    void *heap = nullptr, *state = nullptr, *records = nullptr;
    MokCudaWorkspace* workspace = nullptr;
    MokCudaLayer layer{};
    MokCudaScheduleArgs schedule{};
    MokCudaForwardArgs forward{};
    MokCudaBackwardArgs backward{};
    int64_t first_token = 0;
    struct Region {
      void* begin;
      int64_t bytes;
    };
    std::vector<Region> poisoned;
  };
  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  // Memory for one more schedule of a rank; which one its calls use.
  void* NewSchedule(int rank);
  void* schedule(int rank) const { return ranks_[rank].schedule.schedule; }
  void SetSchedule(int rank, void* schedule);
  Rank& rank(int index) { return ranks_[static_cast<size_t>(index)]; }

 private:
  void* Allocate(int device, int64_t bytes, const char* name);
  void* Upload(int device, const void* values, int64_t bytes, const char* name);
  void* AllocatePoisoned(Rank& rank, int64_t bytes, const char* name);
  void MakeMemory(int index);
  void MakeLayer(int index);
  void UploadInputs(int index);
  void UploadWeights(int index);
  void MakeOutputs(int index);
  void MakeGradients(int index);
  void QueueParts(const std::vector<int32_t>& parts, int32_t (CudaRanks::*call)(int, int32_t));

  const LayerData& data_;
  const CudaRanksOptions options_;
  std::vector<Rank> ranks_;
};

}  // namespace mok::testing
