// Tensors of more than 2^31 elements: a 32-bit product anywhere in an address would show. They are
// sparse mappings, so that only the few pages that a route touches take memory.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <vector>

#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

constexpr int64_t kElementBytes = 2;  // bf16

class SparseTensor {
 public:
  explicit SparseTensor(int64_t elements) : bytes_(static_cast<size_t>(elements * kElementBytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~SparseTensor() { munmap(data_, bytes_); }
  SparseTensor(const SparseTensor&) = delete;
  SparseTensor& operator=(const SparseTensor&) = delete;

  void* data() const { return data_; }
  uint8_t* At(int64_t element) const {
    return static_cast<uint8_t*>(data_) + element * kElementBytes;
  }
  void Place(int64_t element, const Tensor& tensor) const {
    std::memcpy(At(element), tensor.At(0), tensor.bytes.size());
  }
  bool Holds(int64_t element, const Tensor& tensor) const {
    return std::memcmp(At(element), tensor.At(0), tensor.bytes.size()) == 0;
  }

 private:
  size_t bytes_;
  void* data_;
};

// One expert and three tokens.
LayerSpec OneExpertSpec() {
  LayerSpec spec;
  spec.tokens = {3};
  spec.experts = {1};
  spec.hidden = 1024;
  spec.intermediate = 1032;
  return spec;
}

// The one expert is the last of so many that its weights and gradients lie beyond element 2^31.
TEST(LargeTensorTest, WeightsAndGradients) {
  const LayerData data(OneExpertSpec());
  RunOptions options;
  options.grad_dtype = DType::kBf16;
  options.accumulate = true;  // leaves the gradients of all other experts unmapped
  const LayerResult expected = RunLayer(data, options);

  constexpr int32_t kExperts = 2100;
  const int64_t expert_size = data.spec.hidden * data.spec.intermediate;
  const int64_t last = (kExperts - 1) * expert_size;
  ASSERT_GT(last, int64_t{1} << 31);
  const SparseTensor gate(kExperts * expert_size), up(kExperts * expert_size),
      down(kExperts * expert_size), d_gate(kExperts * expert_size), d_up(kExperts * expert_size),
      d_down(kExperts * expert_size);
  gate.Place(last, data.gate);
  up.Place(last, data.up);
  down.Place(last, data.down);

  const RankWorkspaces workspaces(data.spec);
  RankLayer layer(data, 0, options);
  const std::vector<int64_t> topk_idx(3, kExperts - 1);
  layer.schedule_args.topk_idx = topk_idx.data();
  layer.schedule_args.num_local_experts = kExperts;
  layer.config.macrobatch_rows = 128;
  layer.forward_args.layer.routed = {gate.data(), up.data(), down.data(), data.spec.intermediate};
  layer.backward_args.layer.routed = layer.forward_args.layer.routed;
  layer.backward_args.d_routed = {d_gate.data(), d_up.data(), d_down.data(), MOK_BF16, 1};
  ASSERT_EQ(layer.BuildSchedule(workspaces[0]), MOK_OK) << mok_last_error();
  ASSERT_EQ(layer.Forward(workspaces[0]), MOK_OK) << mok_last_error();
  ASSERT_EQ(layer.Backward(workspaces[0]), MOK_OK) << mok_last_error();
  EXPECT_TRUE(layer.out == expected.out);
  EXPECT_TRUE(layer.d_x == expected.d_x);
  EXPECT_TRUE(d_gate.Holds(last, expected.d_gate));
  EXPECT_TRUE(d_up.Holds(last, expected.d_up));
  EXPECT_TRUE(d_down.Holds(last, expected.d_down));
}

// One row in each of so many experts, each padded to 128 rows, that ring rows times H passes 2^31.
// Only the last expert has weights other than zero.
TEST(LargeTensorTest, Ring) {
  constexpr int64_t kExperts = 17000;
  LayerSpec spec;
  spec.tokens = {1};
  spec.experts = {1};
  spec.hidden = 1024;
  spec.intermediate = 8;
  const LayerData last_only(spec);
  const LayerResult expected = RunLayer(last_only, {});

  const int64_t expert_size = spec.hidden * spec.intermediate;
  const SparseTensor gate(kExperts * expert_size), up(kExperts * expert_size),
      down(kExperts * expert_size), x(kExperts * spec.hidden);
  gate.Place((kExperts - 1) * expert_size, last_only.gate);
  up.Place((kExperts - 1) * expert_size, last_only.up);
  down.Place((kExperts - 1) * expert_size, last_only.down);
  x.Place((kExperts - 1) * spec.hidden, last_only.x);
  LayerSpec many = spec;
  many.tokens = {kExperts};
  const RankWorkspaces workspaces(many);
  RankLayer layer(last_only, 0, {});
  std::vector<int64_t> topk_idx;
  for (int64_t expert = 0; expert < kExperts; ++expert) topk_idx.push_back(expert);
  const std::vector<float> topk_weight(kExperts, last_only.topk_weight[0]);
  MokSchedule* schedule = nullptr;
  layer.config.macrobatch_rows = -1;
  layer.schedule_args.topk_idx = topk_idx.data();
  layer.schedule_args.num_tokens = kExperts;
  layer.schedule_args.num_local_experts = kExperts;
  ASSERT_EQ(mok_schedule_build(workspaces[0], &layer.config, &layer.schedule_args, &schedule),
            MOK_OK)
      << mok_last_error();
  MokScheduleInfo info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(mok_schedule_info(schedule, &info), MOK_OK);
  ASSERT_GT((info.ring_rows - 128) * spec.hidden, int64_t{1} << 31);
  const SparseTensor ring_x(info.ring_rows * spec.hidden),
      ring_gate(info.ring_rows * spec.intermediate), ring_up(info.ring_rows * spec.intermediate);

  // d_out is zero but for the last token, d_x and out are kept for all.
  const SparseTensor out(kExperts * spec.hidden), d_out(kExperts * spec.hidden),
      d_x(kExperts * spec.hidden);
  d_out.Place((kExperts - 1) * spec.hidden, last_only.d_out);
  std::vector<float> d_topk_weight(kExperts);
  MokForwardArgs& forward = layer.forward_args;
  forward.layer.x = x.data();
  forward.layer.topk_weight = topk_weight.data();
  forward.layer.routed = {gate.data(), up.data(), down.data(), spec.intermediate};
  forward.context = {info.ring_rows, ring_x.data(), ring_gate.data(),
                     ring_up.data(), nullptr,       nullptr};
  forward.out = out.data();
  ASSERT_EQ(mok_forward(workspaces[0], &layer.config, schedule, &forward), MOK_OK)
      << mok_last_error();
  EXPECT_TRUE(out.Holds((kExperts - 1) * spec.hidden, expected.out));

  const SparseTensor d_gate(kExperts * expert_size);
  MokBackwardArgs& backward = layer.backward_args;
  backward.layer = forward.layer;
  backward.context = forward.context;
  backward.d_out = d_out.data();
  backward.d_x = d_x.data();
  backward.d_topk_weight = d_topk_weight.data();
  backward.d_routed = {d_gate.data(), nullptr, nullptr, MOK_BF16, 0};
  ASSERT_EQ(mok_backward(workspaces[0], &layer.config, schedule, &backward), MOK_OK)
      << mok_last_error();
  EXPECT_TRUE(d_x.Holds((kExperts - 1) * spec.hidden, expected.d_x));
  EXPECT_EQ(d_topk_weight.back(), static_cast<float>(expected.d_topk_weight.Get(0)));
  mok_schedule_destroy(schedule);
}

// A real width that is no multiple of any tile.
TEST(LargeTensorTest, Width2880) {
  LayerSpec spec;
  spec.tokens = {9};
  spec.experts = {1};
  spec.hidden = 2880;
  spec.intermediate = 2880;
  const LayerData data(spec);
  RunOptions options;
  options.threads = 2;
  options.poison = true;
  ExpectMatchesReference(data, RunLayer(data, options));
}

}  // namespace
}  // namespace mok::testing
