#include "mok_megakernel/layer_test_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

namespace mok::testing {
namespace {

Tensor RandomTensor(DType dtype, int64_t size, double scale, std::mt19937* random) {
  std::normal_distribution<double> normal(0, scale);
  Tensor tensor(dtype, size);
  for (int64_t i = 0; i < size; ++i) tensor.Set(i, normal(*random));
  return tensor;
}

std::vector<int64_t> RandomRoutes(const LayerSpec& spec, std::mt19937* random) {
  const int64_t num_experts = spec.num_experts();
  std::vector<int64_t> routes;
  std::vector<int64_t> order(static_cast<size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t token = 0; token < spec.num_tokens(); ++token) {
    if (!spec.route) std::shuffle(order.begin(), order.end(), *random);
    for (int k = 0; k < spec.topk; ++k) {
      routes.push_back(spec.route ? spec.route(token, k)
                                  : order[static_cast<size_t>(k % num_experts)]);
    }
  }
  return routes;
}

}  // namespace

Tensor::Tensor(DType tensor_dtype, int64_t size)
    : dtype(tensor_dtype), bytes(static_cast<size_t>(size * ElementBytes(tensor_dtype)), 0xFF) {}

double Tensor::Get(int64_t index) const {
  if (dtype == DType::kBf16) {
    BFloat16 value;
    std::memcpy(&value, At(index), sizeof(value));
    return ToFloat(value);
  }
  float value;
  std::memcpy(&value, At(index), sizeof(value));
  return value;
}

void Tensor::Set(int64_t index, double value) {
  const float single = static_cast<float>(value);
  if (dtype == DType::kBf16) {
    const BFloat16 rounded = RoundToBFloat16(single);
    std::memcpy(At(index), &rounded, sizeof(rounded));
  } else {
    std::memcpy(At(index), &single, sizeof(single));
  }
}

void Tensor::Append(const Tensor& other) {
  dtype = other.dtype;
  bytes.insert(bytes.end(), other.bytes.begin(), other.bytes.end());
}

std::vector<double> Tensor::ToDoubles() const {
  std::vector<double> values;
  for (int64_t i = 0; i < size(); ++i) values.push_back(Get(i));
  return values;
}

int64_t LayerSpec::num_tokens() const {
  return std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
}

int32_t LayerSpec::num_experts() const {
  return std::accumulate(experts.begin(), experts.end(), 0);
}

LayerSpec SmallLayer() {
  LayerSpec spec;
  spec.tokens = {9, 20};
  spec.experts = {2, 2};
  spec.topk = 2;
  spec.hidden = 72;
  spec.intermediate = 40;
  return spec;
}

LayerSpec OneRankLayer() {
  LayerSpec spec;
  spec.tokens = {9};
  spec.experts = {4};
  spec.topk = 2;
  spec.hidden = 24;
  spec.intermediate = 16;
  spec.shared_intermediate = 32;
  spec.shared_scale = true;
  return spec;
}

LayerData::LayerData(const LayerSpec& layer_spec) : spec(layer_spec) {
  std::mt19937 random(spec.seed);
  const int64_t num_tokens = spec.num_tokens();
  const int64_t num_experts = spec.num_experts();
  const int64_t shared = spec.shared_intermediate;
  const double by_hidden = 1 / std::sqrt(static_cast<double>(spec.hidden));
  const double by_intermediate = 1 / std::sqrt(static_cast<double>(spec.intermediate));
  const auto tensor = [&](int64_t size, double scale) {
    return RandomTensor(spec.dtype, size, scale, &random);
  };
  const int64_t expert_size = spec.hidden * spec.intermediate;
  // Tokens first: their values must not depend on the experts' number.
  x = tensor(num_tokens * spec.hidden, spec.x_scale);
  d_out = tensor(num_tokens * spec.hidden, 1);
  gate = tensor(num_experts * expert_size, by_hidden);
  up = tensor(num_experts * expert_size, by_hidden);
  down = tensor(num_experts * expert_size, by_intermediate);
  shared_gate = tensor(shared * spec.hidden, by_hidden);
  shared_up = tensor(shared * spec.hidden, by_hidden);
  shared_down = tensor(shared * spec.hidden, shared > 0 ? 1 / std::sqrt(shared) : 1);
  topk_idx = RandomRoutes(spec, &random);
  std::uniform_real_distribution<float> uniform(0.1f, 1.0f);
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int k = 0; k < spec.topk; ++k) {
      topk_weight.push_back(spec.weight ? spec.weight(token, k) : uniform(random));
    }
    if (spec.shared_scale) shared_scale.push_back(uniform(random));
  }
}

ReferenceInputs ReferenceInputsOf(const LayerData& data) {
  const LayerSpec& spec = data.spec;
  ReferenceInputs inputs;
  inputs.num_tokens = spec.num_tokens();
  inputs.hidden = spec.hidden;
  inputs.intermediate = spec.intermediate;
  inputs.shared_intermediate = spec.shared_intermediate;
  inputs.num_experts = spec.num_experts();
  inputs.topk = spec.topk;
  inputs.swiglu_limit = spec.swiglu_limit;
  inputs.round_to_bf16 = spec.swiglu_limit > 0 && spec.dtype == DType::kBf16;
  inputs.x = data.x.ToDoubles();
  inputs.topk_idx = data.topk_idx;
  inputs.topk_weight.assign(data.topk_weight.begin(), data.topk_weight.end());
  inputs.gate = data.gate.ToDoubles();
  inputs.up = data.up.ToDoubles();
  inputs.down = data.down.ToDoubles();
  inputs.shared_gate = data.shared_gate.ToDoubles();
  inputs.shared_up = data.shared_up.ToDoubles();
  inputs.shared_down = data.shared_down.ToDoubles();
  inputs.shared_scale.assign(data.shared_scale.begin(), data.shared_scale.end());
  inputs.d_out = data.d_out.ToDoubles();
  return inputs;
}

MokEngineConfig ConfigOf(const RunOptions& options) {
  MokEngineConfig config{};
  config.struct_size = sizeof(config);
  config.num_threads = options.threads;
  config.num_comm_threads = options.comm_threads;
  config.minibatch_rows = options.minibatch_rows;
  config.macrobatch_rows = options.macrobatch_rows;
  config.isa = options.isa;
  config.trace = options.trace;
  return config;
}

RankLayer::RankLayer(const LayerData& data, int rank, const RunOptions& options)
    : config(ConfigOf(options)), data_(data), options_(options) {
  const LayerSpec& spec = data.spec;
  for (int lower = 0; lower < rank; ++lower) {
    first_token_ += spec.tokens[static_cast<size_t>(lower)];
    first_expert_ += spec.experts[static_cast<size_t>(lower)];
  }
  num_tokens_ = spec.tokens[static_cast<size_t>(rank)];
  num_experts_ = spec.experts[static_cast<size_t>(rank)];
  schedule_args = {};
  schedule_args.struct_size = sizeof(schedule_args);
  schedule_args.topk_idx = data.topk_idx.data() + first_token_ * spec.topk;
  schedule_args.num_tokens = num_tokens_;
  schedule_args.num_local_experts = num_experts_;
  FillLayer(data);
  forward_args = {};
  forward_args.struct_size = sizeof(forward_args);
  forward_args.layer = layer_;
  out = Tensor(spec.dtype, num_tokens_ * spec.hidden);
  forward_args.out = out.At(0);
  backward_args = {};
  backward_args.struct_size = sizeof(backward_args);
  backward_args.layer = layer_;
  backward_args.d_out = data.d_out.At(first_token_ * spec.hidden);
  backward_args.kept_macrobatches = options.kept_macrobatches;
  MakeGradients();
}

RankLayer::~RankLayer() { mok_schedule_destroy(schedule_); }

void RankLayer::FillLayer(const LayerData& data) {
  const LayerSpec& spec = data.spec;
  const int64_t expert_size = spec.hidden * spec.intermediate;
  layer_.x = data.x.At(first_token_ * spec.hidden);
  layer_.topk_weight = data.topk_weight.data() + first_token_ * spec.topk;
  layer_.routed = {data.gate.At(first_expert_ * expert_size),
                   data.up.At(first_expert_ * expert_size),
                   data.down.At(first_expert_ * expert_size), spec.intermediate};
  if (spec.shared_intermediate > 0) {
    layer_.shared = {data.shared_gate.At(0), data.shared_up.At(0), data.shared_down.At(0),
                     spec.shared_intermediate};
  }
  if (spec.shared_scale) layer_.shared_scale = data.shared_scale.data() + first_token_;
  layer_.swiglu_limit = spec.swiglu_limit;
}

void RankLayer::MakeGradients() {
  const LayerSpec& spec = data_.spec;
  const auto gradient = [&](int64_t size) {
    Tensor tensor(options_.grad_dtype, size);
    if (!options_.accumulate) return tensor;
    for (int64_t i = 0; i < size; ++i) tensor.Set(i, options_.initial_grad);
    return tensor;
  };
  const int64_t routed_size = num_experts_ * spec.hidden * spec.intermediate;
  const int64_t shared_size = spec.hidden * spec.shared_intermediate;
  d_x = Tensor(spec.dtype, num_tokens_ * spec.hidden);
  d_topk_weight = Tensor(DType::kFp32, num_tokens_ * spec.topk);
  d_shared_scale = Tensor(DType::kFp32, spec.shared_scale ? num_tokens_ : 0);
  d_gate = gradient(routed_size);
  d_up = gradient(routed_size);
  d_down = gradient(routed_size);
  d_shared_gate = gradient(shared_size);
  d_shared_up = gradient(shared_size);
  d_shared_down = gradient(shared_size);
  backward_args.d_x = d_x.At(0);
  backward_args.d_topk_weight = static_cast<float*>(d_topk_weight.At(0));
  if (spec.shared_scale) backward_args.d_shared_scale = static_cast<float*>(d_shared_scale.At(0));
  const auto dtype = static_cast<int32_t>(options_.grad_dtype);
  backward_args.d_routed = {d_gate.At(0), d_up.At(0), d_down.At(0), dtype, options_.accumulate};
  backward_args.d_shared = {d_shared_gate.At(0), d_shared_up.At(0), d_shared_down.At(0), dtype,
                            options_.accumulate};
}

int32_t RankLayer::BuildSchedule(MokWorkspace* workspace) {
  mok_schedule_destroy(schedule_);
  schedule_ = nullptr;
  const int32_t code = mok_schedule_build(workspace, &config, &schedule_args, &schedule_);
  if (code != MOK_OK) return code;
  const LayerSpec& spec = data_.spec;
  const int64_t rows = info().ring_rows;
  ring_x_ = Tensor(spec.dtype, rows * spec.hidden);
  ring_gate_ = Tensor(spec.dtype, rows * spec.intermediate);
  ring_up_ = Tensor(spec.dtype, rows * spec.intermediate);
  context_shared_gate_ = Tensor(spec.dtype, num_tokens_ * spec.shared_intermediate);
  context_shared_up_ = Tensor(spec.dtype, num_tokens_ * spec.shared_intermediate);
  forward_args.context = {rows,
                          ring_x_.At(0),
                          ring_gate_.At(0),
                          ring_up_.At(0),
                          context_shared_gate_.At(0),
                          context_shared_up_.At(0)};
  backward_args.context = forward_args.context;
  return MOK_OK;
}

int32_t RankLayer::Forward(MokWorkspace* workspace) {
  return mok_forward(workspace, &config, schedule_, &forward_args);
}

int32_t RankLayer::Backward(MokWorkspace* workspace) {
  if (options_.kept_macrobatches == 0) {  // the context is lost
    for (Tensor* lost :
         {&ring_x_, &ring_gate_, &ring_up_, &context_shared_gate_, &context_shared_up_}) {
      std::fill(lost->bytes.begin(), lost->bytes.end(), uint8_t{0xFF});
    }
  }
  return mok_backward(workspace, &config, schedule_, &backward_args);
}

void RankLayer::SaveAndLoadSchedule() {
  const MokScheduleInfo built = info();
  const int64_t capacity =
      mok_schedule_capacity_rows(built.num_tokens_total, data_.spec.topk, built.num_local_experts);
  std::vector<int32_t> words(static_cast<size_t>(MOK_SCHEDULE_HEADER_WORDS +
                                                 2 * built.num_local_experts + 2 * capacity +
                                                 built.num_tokens * data_.spec.topk));
  const auto num_words = static_cast<int64_t>(words.size());
  ASSERT_EQ(mok_schedule_save(schedule_, words.data(), num_words), MOK_OK) << mok_last_error();
  mok_schedule_destroy(schedule_);
  schedule_ = nullptr;
  ASSERT_EQ(mok_schedule_load(words.data(), num_words, &schedule_), MOK_OK) << mok_last_error();
}

MokScheduleInfo RankLayer::info() const {
  MokScheduleInfo info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(mok_schedule_info(schedule_, &info), MOK_OK) << mok_last_error();
  return info;
}

MokWorkspaceOptions WorkspaceOptionsOf(const LayerSpec& spec, int rank, MokInProcessGroup* group,
                                       const char* heap_name, double timeout_seconds) {
  MokWorkspaceOptions options{};
  options.struct_size = sizeof(options);
  options.rank = rank;
  options.ep_size = spec.ep_size();
  options.heap_name = heap_name;
  options.group = options.ep_size > 1 ? group : nullptr;
  options.max_tokens = *std::max_element(spec.tokens.begin(), spec.tokens.end());
  options.hidden = static_cast<int32_t>(spec.hidden);
  options.topk = spec.topk;
  options.dtype = static_cast<int32_t>(spec.dtype);
  options.timeout_seconds = timeout_seconds;
  return options;
}

void RunRanks(int ep_size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ep_size; ++rank) threads.emplace_back(body, rank);
  body(0);
  for (std::thread& thread : threads) thread.join();
}

RankWorkspaces::RankWorkspaces(const LayerSpec& spec, double timeout_seconds) {
  MokInProcessGroup* group = nullptr;
  EXPECT_EQ(mok_in_process_group_create(spec.ep_size(), &group), MOK_OK);
  for (int rank = 0; rank < spec.ep_size(); ++rank) {
    const MokWorkspaceOptions options =
        WorkspaceOptionsOf(spec, rank, group, nullptr, timeout_seconds);
    MokWorkspace* workspace = nullptr;
    EXPECT_EQ(mok_workspace_create(&options, &workspace), MOK_OK) << mok_last_error();
    workspaces_.push_back(workspace);
  }
  mok_in_process_group_destroy(group);
}

RankWorkspaces::~RankWorkspaces() {
  for (MokWorkspace* workspace : workspaces_) mok_workspace_destroy(workspace);
}

LayerResult RunLayer(const LayerData& data, const RunOptions& options) {
  const RankWorkspaces workspaces(data.spec);
  return RunLayer(data, options, workspaces);
}

LayerResult RunLayer(const LayerData& data, const RunOptions& options,
                     const RankWorkspaces& workspaces) {
  const int ep_size = data.spec.ep_size();
  std::vector<std::unique_ptr<RankLayer>> ranks;
  for (int rank = 0; rank < ep_size; ++rank) {
    ranks.push_back(std::make_unique<RankLayer>(data, rank, options));
  }
  RunRanks(ep_size, [&](int rank) {
    RankLayer& layer = *ranks[static_cast<size_t>(rank)];
    MokWorkspace* workspace = workspaces[rank];
    const auto poison = [&] {
      if (options.poison) {
        EXPECT_EQ(mok_workspace_poison(workspace), MOK_OK);
      }
    };
    ASSERT_EQ(layer.BuildSchedule(workspace), MOK_OK) << mok_last_error();
    poison();
    ASSERT_EQ(layer.Forward(workspace), MOK_OK) << mok_last_error();
    poison();
    ASSERT_EQ(layer.Backward(workspace), MOK_OK) << mok_last_error();
  });
  LayerResult result;
  for (const auto& rank : ranks) {
    result.out.Append(rank->out);
    result.d_x.Append(rank->d_x);
    result.d_topk_weight.Append(rank->d_topk_weight);
    result.d_shared_scale.Append(rank->d_shared_scale);
    result.d_gate.Append(rank->d_gate);
    result.d_up.Append(rank->d_up);
    result.d_down.Append(rank->d_down);
    result.d_shared_gate.push_back(rank->d_shared_gate);
    result.d_shared_up.push_back(rank->d_shared_up);
    result.d_shared_down.push_back(rank->d_shared_down);
    result.most_macrobatches =
        std::max<int64_t>(result.most_macrobatches, rank->info().num_macrobatches);
  }
  return result;
}

double RelativeError(const Tensor& actual, const std::vector<double>& expected) {
  return WorstRowError(actual, expected, std::max<int64_t>(1, actual.size()));
}

double WorstRowError(const Tensor& actual, const std::vector<double>& expected, int64_t columns) {
  EXPECT_EQ(actual.size(), static_cast<int64_t>(expected.size()));
  double worst = 0;
  for (int64_t begin = 0; begin < actual.size(); begin += columns) {
    double difference = 0;
    double norm = 0;
    for (int64_t i = begin; i < begin + columns; ++i) {
      const double want = expected[static_cast<size_t>(i)];
      difference += (actual.Get(i) - want) * (actual.Get(i) - want);
      norm += want * want;
    }
    if (std::isnan(difference)) return NAN;
    if (difference > 0) worst = std::max(worst, std::sqrt(difference / norm));
  }
  return worst;
}

namespace {

struct Tolerance {
  double tensor;
  double row;
};

void ExpectClose(const char* name, const Tensor& actual, const std::vector<double>& expected,
                 int64_t columns, const Tolerance& tolerance) {
  EXPECT_LE(RelativeError(actual, expected), tolerance.tensor) << name;
  EXPECT_LE(WorstRowError(actual, expected, columns), tolerance.row) << name << ", worst row";
}

// The shared expert's gradients: the reference has the sum over ranks.
Tensor SumOf(const std::vector<Tensor>& parts) {
  Tensor sum(DType::kFp32, parts.front().size());
  for (int64_t i = 0; i < sum.size(); ++i) {
    double total = 0;
    for (const Tensor& part : parts) total += part.Get(i);
    sum.Set(i, total);
  }
  return sum;
}

}  // namespace

void ExpectMatchesReference(const LayerData& data, const LayerResult& result) {
  const ReferenceResult expected = RunReference(ReferenceInputsOf(data));
  const LayerSpec& spec = data.spec;
  const bool bf16 = spec.dtype == DType::kBf16;
  // A row of a gradient may be one product of a sum that cancels, hence the wider bound.
  const Tolerance tolerance = bf16 ? Tolerance{4e-3, 2e-2} : Tolerance{1e-5, 2e-2};
  const Tolerance router = bf16 ? Tolerance{1e-2, INFINITY} : Tolerance{1e-5, INFINITY};
  ExpectClose("out", result.out, expected.out, spec.hidden, tolerance);
  ExpectClose("d_x", result.d_x, expected.d_x, spec.hidden, tolerance);
  ExpectClose("d_topk_weight", result.d_topk_weight, expected.d_topk_weight, spec.topk, router);
  ExpectClose("d_shared_scale", result.d_shared_scale, expected.d_shared_scale, 1, router);
  ExpectClose("d_gate", result.d_gate, expected.d_gate, spec.hidden, tolerance);
  ExpectClose("d_up", result.d_up, expected.d_up, spec.hidden, tolerance);
  ExpectClose("d_down", result.d_down, expected.d_down, spec.intermediate, tolerance);
  if (spec.shared_intermediate == 0) return;
  ExpectClose("d_shared_gate", SumOf(result.d_shared_gate), expected.d_shared_gate, spec.hidden,
              tolerance);
  ExpectClose("d_shared_up", SumOf(result.d_shared_up), expected.d_shared_up, spec.hidden,
              tolerance);
  ExpectClose("d_shared_down", SumOf(result.d_shared_down), expected.d_shared_down,
              spec.shared_intermediate, tolerance);
}

void ExpectSameBits(const LayerResult& expected, const LayerResult& actual,
                    const std::string& label) {
  EXPECT_TRUE(expected.out == actual.out) << label << ": out";
  EXPECT_TRUE(expected.d_x == actual.d_x) << label << ": d_x";
  EXPECT_TRUE(expected.d_topk_weight == actual.d_topk_weight) << label << ": d_topk_weight";
  EXPECT_TRUE(expected.d_shared_scale == actual.d_shared_scale) << label << ": d_shared_scale";
  EXPECT_TRUE(expected.d_gate == actual.d_gate) << label << ": d_gate";
  EXPECT_TRUE(expected.d_up == actual.d_up) << label << ": d_up";
  EXPECT_TRUE(expected.d_down == actual.d_down) << label << ": d_down";
  // One gradient per rank: comparable only where ranks hold the same tokens.
  if (expected.d_shared_gate.size() != actual.d_shared_gate.size()) return;
  EXPECT_TRUE(expected.d_shared_gate == actual.d_shared_gate) << label << ": d_shared_gate";
  EXPECT_TRUE(expected.d_shared_up == actual.d_shared_up) << label << ": d_shared_up";
  EXPECT_TRUE(expected.d_shared_down == actual.d_shared_down) << label << ": d_shared_down";
}

}  // namespace mok::testing
