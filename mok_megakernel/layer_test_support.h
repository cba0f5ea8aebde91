// Test only: layers with random contents, split over ranks and run through the C API.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mok_core/dtype.h"
#include "mok_megakernel/mok.h"
#include "mok_megakernel/reference_layer.h"

namespace mok::testing {

// The elements of a tensor of `dtype`.
struct Tensor {
  DType dtype = DType::kFp32;
  std::vector<uint8_t> bytes;

  Tensor() = default;
  // NaN everywhere, so that what is not written shows.
  Tensor(DType tensor_dtype, int64_t size);

  int64_t size() const { return static_cast<int64_t>(bytes.size()) / ElementBytes(dtype); }
  double Get(int64_t index) const;
  void Set(int64_t index, double value);  // rounded to the dtype
  void* At(int64_t index) { return bytes.data() + index * ElementBytes(dtype); }
  const void* At(int64_t index) const { return bytes.data() + index * ElementBytes(dtype); }
  void Append(const Tensor& other);
  std::vector<double> ToDoubles() const;
  friend bool operator==(const Tensor&, const Tensor&) = default;
};

// The layer and the batch, all ranks together. Every size is chosen by the test.
struct LayerSpec {
  DType dtype = DType::kBf16;
  std::vector<int64_t> tokens = {0};   // of each rank
  std::vector<int32_t> experts = {1};  // of each rank
  int topk = 1;
  int64_t hidden = 8;
  int64_t intermediate = 8;
  int64_t shared_intermediate = 0;
  bool shared_scale = false;
  float swiglu_limit = 0;
  // Small as in a trained model, so that silu stays clear of its extremum, where a gradient close
  // to zero has no relative accuracy in any format.
  double x_scale = 0.02;
  uint32_t seed = 1;
  // Expert id of a route from (global token, k); default: random, no two alike for one token if
  // there are enough experts.
  std::function<int64_t(int64_t token, int k)> route;
  // Router weight of a route; default: random in [0.1, 1).
  std::function<float(int64_t token, int k)> weight;

  int ep_size() const { return static_cast<int>(tokens.size()); }
  int64_t num_tokens() const;
  int32_t num_experts() const;
};

// What most small tests start from: two ranks with unequal numbers of tokens, widths that differ
// and are no multiple of any tile, no shared expert.
LayerSpec SmallLayer();
// One rank, and a shared expert with a scale.
LayerSpec OneRankLayer();

struct LayerData {
  explicit LayerData(const LayerSpec& layer_spec);

  LayerSpec spec;
  Tensor x, d_out;                  // [T, H]
  std::vector<int64_t> topk_idx;    // [T, K]
  std::vector<float> topk_weight;   // [T, K]
  std::vector<float> shared_scale;  // [T] or empty
  Tensor gate, up, down;            // [E, ...]
  Tensor shared_gate, shared_up, shared_down;
};

ReferenceInputs ReferenceInputsOf(const LayerData& data);

// How the engine runs.
struct RunOptions {
  int threads = 1;
  int comm_threads = 0;
  int64_t minibatch_rows = 0;
  int64_t macrobatch_rows = 0;
  int kept_macrobatches = 1;
  bool poison = false;  // NaN in all memory of the workspace before each pass
  int isa = -1;
  DType grad_dtype = DType::kFp32;
  bool accumulate = false;
  double initial_grad = 0;  // with accumulate: what the weight gradients hold before
  MokTrace* trace = nullptr;
};
MokEngineConfig ConfigOf(const RunOptions& options);

// Outputs of all ranks, joined to the shapes of the whole batch and all experts. The shared
// expert's gradients are one per rank.
struct LayerResult {
  Tensor out, d_x, d_topk_weight, d_shared_scale;
  Tensor d_gate, d_up, d_down;
  std::vector<Tensor> d_shared_gate, d_shared_up, d_shared_down;
  int64_t most_macrobatches = 0;  // of any rank
};

// One rank's part of a layer, with its context and outputs, as a caller of the C API would hold it.
class RankLayer {
 public:
  RankLayer(const LayerData& data, int rank, const RunOptions& options);
  ~RankLayer();
  RankLayer(const RankLayer&) = delete;
  RankLayer& operator=(const RankLayer&) = delete;

  // Each returns the C API's code.
  int32_t BuildSchedule(MokWorkspace* workspace);
  int32_t Forward(MokWorkspace* workspace);
  int32_t Backward(MokWorkspace* workspace);
  // Through words, as if the schedule had left the process.
  void SaveAndLoadSchedule();

  MokScheduleInfo info() const;
  MokScheduleArgs schedule_args;
  MokForwardArgs forward_args;
  MokBackwardArgs backward_args;
  MokEngineConfig config;
  Tensor out, d_x, d_topk_weight, d_shared_scale;
  Tensor d_gate, d_up, d_down, d_shared_gate, d_shared_up, d_shared_down;

 private:
  void FillLayer(const LayerData& data);
  void MakeGradients();
  MokLayer layer_{};
  int64_t first_token_ = 0;
  int64_t num_tokens_ = 0;
  int32_t first_expert_ = 0;
  int32_t num_experts_ = 0;
  const LayerData& data_;
  const RunOptions options_;
  MokSchedule* schedule_ = nullptr;
  Tensor ring_x_, ring_gate_, ring_up_, context_shared_gate_, context_shared_up_;
};

MokWorkspaceOptions WorkspaceOptionsOf(const LayerSpec& spec, int rank, MokInProcessGroup* group,
                                       const char* heap_name, double timeout_seconds = 60);

// Runs body(rank) on one thread per rank and returns when all are done.
void RunRanks(int ep_size, const std::function<void(int rank)>& body);

// In-process workspaces of all ranks.
class RankWorkspaces {
 public:
  explicit RankWorkspaces(const LayerSpec& spec, double timeout_seconds = 60);
  ~RankWorkspaces();
  RankWorkspaces(const RankWorkspaces&) = delete;
  RankWorkspaces& operator=(const RankWorkspaces&) = delete;
  MokWorkspace* operator[](int rank) const { return workspaces_[static_cast<size_t>(rank)]; }

 private:
  std::vector<MokWorkspace*> workspaces_;
};

// Schedule, forward and backward on all ranks; every call must succeed.
LayerResult RunLayer(const LayerData& data, const RunOptions& options);
// The same on given workspaces, which fit the layer.
LayerResult RunLayer(const LayerData& data, const RunOptions& options,
                     const RankWorkspaces& workspaces);

// |actual - expected| / |expected| over all elements; 0 when both are 0, NaN when anything is NaN.
double RelativeError(const Tensor& actual, const std::vector<double>& expected);
// The largest relative error of any row of `columns` elements.
double WorstRowError(const Tensor& actual, const std::vector<double>& expected, int64_t columns);

// Compares every output with the reference under the tolerances of its dtype.
void ExpectMatchesReference(const LayerData& data, const LayerResult& result);
// Same bits in everything that does not depend on how tokens are split; `label` names the case.
void ExpectSameBits(const LayerResult& expected, const LayerResult& actual,
                    const std::string& label);

}  // namespace mok::testing
