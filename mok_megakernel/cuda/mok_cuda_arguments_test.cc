// Every argument of the CUDA C API that the host can find wrong, and the error that names it.
// Nothing is queued then.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/argument_pointers.h"
#include "mok_megakernel/cuda/cuda_ranks_test_support.h"
#include "mok_megakernel/cuda/cuda_test_cases.h"

namespace mok::testing {
namespace {

void ExpectError(int32_t code, int32_t expected_code, const std::string& text) {
  EXPECT_EQ(code, expected_code) << text;
  EXPECT_EQ(mok_last_error(), text);
}

// What a forward and a backward both need.
template <class Args>
std::vector<Pointer> TensorsOfBothPasses(Args& args) {
  std::vector<Pointer> tensors = InputsOf(args);
  tensors.emplace_back("topk_idx", args.topk_idx);
  for (const Pointer& pointer : ContextOf(args)) tensors.push_back(pointer);
  return tensors;
}

class MokCudaArgumentsTest : public ::testing::Test {
 protected:
  using Rank = CudaRanks::Rank;

  MokCudaArgumentsTest() { Start(SharedLayer()); }

  void Start(const LayerSpec& spec) {
    ranks_.reset();
    data_.emplace(spec);
    StartCase({1, 0.1});
    ranks_.emplace(*data_, CudaRanksOptions{});
  }

  Rank& rank() { return ranks_->rank(0); }
  Call forward() {
    return [this] { return ranks_->Forward(0, rank().forward.part); };
  }
  Call backward() {
    return [this] { return ranks_->Backward(0, rank().backward.part); };
  }
  Call schedule() {
    return [this] { return ranks_->BuildSchedule(0, rank().schedule.part); };
  }

  void Expect(const Call& call, const std::function<void(Rank&)>& spoil, int32_t code,
              const std::string& text) {
    const Rank good = rank();
    spoil(rank());
    ExpectError(call(), code, text);
    rank() = good;
  }
  // Nothing may lie where no kernel can access it.
  void ExpectAligned(const Call& call, const std::vector<Pointer>& pointers, int alignment = 16) {
    for (const Pointer& pointer : pointers) {
      void* const good = *pointer.place;
      *pointer.place = static_cast<std::byte*>(good) + alignment / 2;
      ExpectError(call(), MOK_INVALID_ARGUMENT,
                  StrCat(pointer.name, ": expected an address aligned to ", alignment,
                         " bytes, got ", *pointer.place));
      *pointer.place = good;
    }
  }
  // None of these may be null either.
  void ExpectNeeded(const Call& call, const std::vector<Pointer>& pointers, int alignment = 16) {
    for (const Pointer& pointer : pointers) {
      void* const good = *pointer.place;
      ASSERT_NE(good, nullptr) << pointer.name;
      *pointer.place = nullptr;
      ExpectError(call(), MOK_INVALID_ARGUMENT, pointer.name + ": expected a pointer, got null");
      *pointer.place = good;
    }
    ExpectAligned(call, pointers, alignment);
  }

  std::optional<LayerData> data_;
  std::optional<CudaRanks> ranks_;
};

TEST_F(MokCudaArgumentsTest, TensorsOfALayer) {
  MokCudaForwardArgs& args = rank().forward;
  ExpectNeeded(forward(), TensorsOfBothPasses(args));
  ExpectNeeded(forward(), {{"out", args.out}});
  ExpectNeeded(forward(), {{"schedule", args.schedule}, {"scratch", args.scratch}}, 256);
  ExpectAligned(forward(), {{"shared_scale", args.layer.shared_scale}});
  EXPECT_EQ(ranks_->Forward(0, MOK_CUDA_STAGE), MOK_OK) << mok_last_error();
  RunQueued();
}

TEST_F(MokCudaArgumentsTest, TensorsOfABackward) {
  MokCudaBackwardArgs& args = rank().backward;
  ExpectNeeded(backward(), TensorsOfBothPasses(args));
  ExpectNeeded(backward(), {{"d_out", args.d_out},
                            {"d_x", args.d_x},
                            {"d_topk_weight", args.d_topk_weight},
                            {"d_shared_scale", args.d_shared_scale}});
  ExpectNeeded(backward(), {{"schedule", args.schedule}, {"scratch", args.scratch}}, 256);
  ExpectAligned(backward(), {{"shared_scale", args.layer.shared_scale},
                             {"d_routed", args.d_routed.gate},
                             {"d_routed", args.d_routed.up},
                             {"d_routed", args.d_routed.down},
                             {"d_shared", args.d_shared.gate},
                             {"d_shared", args.d_shared.up},
                             {"d_shared", args.d_shared.down}});
}

TEST_F(MokCudaArgumentsTest, Schedule) {
  MokCudaScheduleArgs& args = rank().schedule;
  ExpectNeeded(schedule(), {{"topk_idx", args.topk_idx}});
  ExpectNeeded(schedule(), {{"schedule", args.schedule}, {"scratch", args.scratch}}, 256);
  Expect(
      schedule(), [](Rank& r) { r.schedule.part = MOK_CUDA_REDUCE; }, MOK_INVALID_ARGUMENT,
      "part: expected 0, 1 or 2 to 2, got 4");
  Expect(
      schedule(), [](Rank& r) { r.schedule.topk_idx_bytes = 2; }, MOK_INVALID_ARGUMENT,
      "topk_idx_bytes: expected 4 or 8, got 2");
}

TEST_F(MokCudaArgumentsTest, SizesAndFlags) {
  const auto expect = [&](const std::function<void(Rank&)>& spoil, const std::string& text) {
    Expect(forward(), spoil, MOK_INVALID_ARGUMENT, text);
  };
  expect([](Rank& r) { r.layer.num_tokens = 21; }, "layer.num_tokens: expected 0 to 20, got 21");
  expect([](Rank& r) { r.layer.intermediate = 12; },
         "layer.intermediate: expected a multiple of 8 from 8 to 2^31 - 1, got 12");
  expect([](Rank& r) { r.layer.num_sms = 3; }, "layer.num_sms: expected 0 to 2, got 3");
  expect([](Rank& r) { r.layer.num_sms = r.layer.num_comm_sms = 1; },
         "layer.num_comm_sms: expected 0 to 0, got 1");
  expect([](Rank& r) { r.layer.first_expert = 3; }, "layer.first_expert: expected 0 to 2, got 3");
  expect([](Rank& r) { r.forward.part = MOK_CUDA_BUILD; }, "part: expected 0, 1 or 3 to 4, got 2");
  expect([](Rank& r) { r.forward.topk_idx_bytes = 2; }, "topk_idx_bytes: expected 4 or 8, got 2");
  expect([](Rank& r) { r.forward.context.ring_rows = 128; },
         "context.ring_rows: expected at least 256, got 128");
  expect([](Rank& r) { r.forward.layer.routed.intermediate = 48; },
         "routed.intermediate: expected 40, the layer's, got 48");
  expect([](Rank& r) { r.forward.layer.shared.intermediate = 48; },
         "shared.intermediate: expected 24, the layer's, got 48");
  expect([](Rank& r) { r.forward.struct_size = 8; },
         StrCat("MokCudaForwardArgs.struct_size: expected ", sizeof(MokCudaForwardArgs),
                ", got 8 (compiled against another version of mok.h?)"));
}

TEST_F(MokCudaArgumentsTest, ReservedFieldsAreZero) {
  const auto expect = [&](const Call& call, const std::function<void(Rank&)>& spoil,
                          const std::string& text) {
    Expect(call, spoil, MOK_INVALID_ARGUMENT, text);
  };
  for (const Call& call : {schedule(), forward(), backward()}) {
    expect(call, [](Rank& r) { r.layer.reserved = 1; }, "MokCudaLayer.reserved: expected 0, got 1");
  }
  expect(
      forward(), [](Rank& r) { r.forward.layer.reserved = 1; },
      "MokLayer.reserved: expected 0, got 1");
  expect(
      backward(), [](Rank& r) { r.backward.layer.reserved = 1; },
      "MokLayer.reserved: expected 0, got 1");
  expect(
      backward(), [](Rank& r) { r.backward.reserved = 1; },
      "MokCudaBackwardArgs.reserved: expected 0, got 1");
}

TEST_F(MokCudaArgumentsTest, Gradients) {
  Expect(
      backward(), [](Rank& r) { r.backward.kept_macrobatches = 2; }, MOK_INVALID_ARGUMENT,
      "kept_macrobatches: expected 0 to 1, got 2");
  Expect(
      backward(), [](Rank& r) { r.backward.layer.shared_scale = nullptr; }, MOK_INVALID_ARGUMENT,
      "d_shared_scale: expected null without shared_scale");
  Expect(
      backward(), [](Rank& r) { r.backward.d_routed.dtype = 7; }, MOK_TYPE_MISMATCH,
      "d_routed.dtype: expected bf16 (0) or fp32 (1), got 7");
  Expect(
      backward(), [](Rank& r) { r.backward.d_shared.dtype = 7; }, MOK_TYPE_MISMATCH,
      "d_shared.dtype: expected bf16 (0) or fp32 (1), got 7");
  Expect(
      backward(), [](Rank& r) { r.backward.d_routed.accumulate = 2; }, MOK_INVALID_ARGUMENT,
      "d_routed.accumulate: expected 0 to 1, got 2");
}

TEST_F(MokCudaArgumentsTest, ReportedErrors) {
  MokCudaErrorArgs args{};
  args.struct_size = sizeof(args);
  args.code = MOK_TYPE_MISMATCH;
  args.place = MOK_CUDA_IN_PASS;
  args.scratch = rank().schedule.scratch;
  args.stream = rank().stream;
  const Call report = [&] { return mok_cuda_report_error(rank().workspace, &args); };
  ExpectNeeded(report, {{"scratch", args.scratch}}, 256);
  ExpectRefused(report, {"scratch", args.scratch}, rank().heap,
                "scratch: expected memory that does not overlap the workspace's heap");
  args.code = MOK_OK;
  ExpectError(report(), MOK_INVALID_ARGUMENT, "code: expected an error of MokStatusCode, got 0");
  args.code = MOK_TYPE_MISMATCH;
  args.place = 2;
  ExpectError(report(), MOK_INVALID_ARGUMENT, "place: expected 0 to 1, got 2");
  EXPECT_EQ(mok_cuda_check_usable(rank().workspace), MOK_OK) << "it has not left";
}

// As the host engine has it: NaN is no limit, and a scale needs something to scale.
TEST_F(MokCudaArgumentsTest, WhatWouldBeIgnoredIsRefused) {
  const auto expect = [&](const std::function<void(MokLayer&)>& spoil, const std::string& text) {
    const auto spoil_both = [&](Rank& r) {
      spoil(r.forward.layer);
      spoil(r.backward.layer);
    };
    for (const Call& call : {forward(), backward()}) {
      Expect(call, spoil_both, MOK_INVALID_ARGUMENT, text);
    }
  };
  expect([](MokLayer& layer) { layer.swiglu_limit = std::numeric_limits<float>::quiet_NaN(); },
         "swiglu_limit: expected a number, got NaN");
  LayerSpec spec = SharedLayer();
  spec.shared_intermediate = 0;
  spec.shared_scale = false;
  Start(spec);
  expect([](MokLayer& layer) { layer.shared_scale = layer.topk_weight; },
         "shared_scale: expected null without a shared expert");
  expect([](MokLayer& layer) { layer.shared.up = layer.routed.up; },
         "shared.up: expected null without a shared expert");
  Expect(
      backward(), [](Rank& r) { r.backward.d_shared.down = r.backward.d_routed.down; },
      MOK_INVALID_ARGUMENT, "d_shared.down: expected null without a shared expert");
}

// Empty tensors may be null: of a rank without tokens, and the ring of one without experts.
TEST_F(MokCudaArgumentsTest, EmptyTensorsNeedNoMemory) {
  LayerSpec spec = SharedLayer(3);
  spec.tokens = {9, 0, 4};
  spec.experts = {1, 3, 0};
  Start(spec);
  EXPECT_EQ(ranks_->rank(1).forward.layer.x, nullptr);
  EXPECT_EQ(ranks_->rank(1).forward.context.shared_up, nullptr);
  EXPECT_EQ(ranks_->rank(2).forward.context.ring_gate, nullptr);
  EXPECT_EQ(ranks_->rank(2).forward.layer.routed.up, nullptr);
  RunBoth(*ranks_);
}

TEST(MokCudaOptionsTest, WrongOptionsAreNamed) {
  MokCudaOptions options{};
  options.struct_size = sizeof(options);
  options.ep_size = 2;
  options.hidden = 64;
  options.topk = 2;
  options.num_sms = 132;
  options.timeout_seconds = 1;
  MokCudaMemory memory{};
  memory.struct_size = sizeof(memory);
  ASSERT_EQ(mok_cuda_memory(&options, &memory), MOK_OK) << mok_last_error();
  EXPECT_LE(memory.heap_zero_bytes, memory.heap_bytes);
  const auto expect = [&](auto spoil, const std::string& text) {
    MokCudaOptions wrong = options;
    spoil(wrong);
    ExpectError(mok_cuda_memory(&wrong, &memory), MOK_INVALID_ARGUMENT, text);
  };
  expect([](MokCudaOptions& o) { o.rank = 2; }, "options.rank: expected 0 to 1, got 2");
  expect([](MokCudaOptions& o) { o.ep_size = 73; }, "options.ep_size: expected 1 to 72, got 73");
  expect([](MokCudaOptions& o) { o.hidden = 12; },
         "options.hidden: expected a multiple of 8 from 8 to 2^31 - 1, got 12");
  for (const double seconds : {0.0, -1.0, 1e9, static_cast<double>(NAN)}) {
    expect([&](MokCudaOptions& o) { o.timeout_seconds = seconds; },
           StrCat("options.timeout_seconds: expected a number in (0, 1e9), got ", seconds));
  }
  expect([](MokCudaOptions& o) { o.max_tokens = 1 << 30; },
         "options: expected ep_size * max_tokens * topk to be at most 1073741823, got 2 * "
         "1073741824 * 2");
  expect(
      [](MokCudaOptions& o) {
        o.max_tokens = 1 << 27;
        o.hidden = 1 << 30;
      },
      "options.max_tokens * topk, hidden: expected at most 2^45 bytes, got [268435456, "
      "1073741824] of 2 bytes");
}

class MokCudaDeviceTest : public ::testing::Test {
 protected:
  MokCudaDeviceTest() {
    StartCase({1, 0.1});
    options_.struct_size = sizeof(options_);
    options_.ep_size = 1;
    options_.max_tokens = 5000;
    options_.hidden = 64;
    options_.topk = 4;
    options_.num_sms = 132;
    options_.timeout_seconds = 1;
    MokCudaMemory sizes{};
    sizes.struct_size = sizeof(sizes);
    EXPECT_EQ(mok_cuda_memory(&options_, &sizes), MOK_OK) << mok_last_error();
    const auto allocate = [](int64_t bytes) {
      return runtime::AllocateDevice(0, static_cast<size_t>(bytes), "memory").value();
    };
    memory_ = allocate(sizes.heap_bytes);
    state_ = allocate(sizes.state_bytes);
  }
  ~MokCudaDeviceTest() override { mok_cuda_workspace_destroy(workspace_); }

  int32_t Create() {
    const MokCudaAddresses addresses{sizeof(addresses), &memory_, state_, memory_};
    return mok_cuda_workspace_create(&options_, &addresses, &workspace_);
  }

  MokCudaOptions options_{};
  void *memory_, *state_;
  MokCudaWorkspace* workspace_ = nullptr;
};

TEST_F(MokCudaDeviceTest, AGpuThatCannotRunTheKernelsIsRefused) {
  emulator::Options gpu = emulator::CurrentOptions();
  for (const auto& [major, minor] : {std::pair{8, 0}, {9, 1}, {10, 0}}) {
    gpu.compute_major = major;
    gpu.compute_minor = minor;
    emulator::Configure(gpu);
    ExpectError(Create(), MOK_UNAVAILABLE,
                StrCat("options.device: expected a GPU of compute capability 9.0, device 0 has ",
                       major, ".", minor));
  }
}

TEST_F(MokCudaDeviceTest, DeviceAndSmsAreThoseOfTheMachine) {
  options_.num_sms = 133;
  ExpectError(Create(), MOK_INVALID_ARGUMENT, "options.num_sms: expected 2 to 132, got 133");
  options_.num_sms = 132;
  options_.device = emulator::kMaxDevices;
  ExpectError(Create(), MOK_INVALID_ARGUMENT, "options.device: expected 0 to 7, got 8");
  options_.device = 0;
  EXPECT_EQ(Create(), MOK_OK) << mok_last_error();
}

// Scratch for a schedule does not depend on what a build does not have to be told again.
TEST_F(MokCudaDeviceTest, ScheduleScratchServesAnyNumberOfSms) {
  ASSERT_EQ(Create(), MOK_OK) << mok_last_error();
  MokCudaLayer layer{};
  layer.struct_size = sizeof(layer);
  layer.num_local_experts = layer.num_experts = 8;
  layer.intermediate = 8;
  layer.num_tokens = 5000;
  layer.macrobatch_rows = 1024;
  const auto sizes = [&](int32_t num_sms) {
    layer.num_sms = num_sms;
    MokCudaLayerMemory memory{};
    memory.struct_size = sizeof(memory);
    EXPECT_EQ(mok_cuda_layer_memory(workspace_, &layer, &memory), MOK_OK) << mok_last_error();
    return std::pair{memory.schedule_bytes, memory.schedule_scratch_bytes};
  };
  for (const int32_t num_sms : {2, 10, 132}) EXPECT_EQ(sizes(num_sms), sizes(0)) << num_sms;
}

TEST(MokCudaMatmulTest, WrongArgumentsAreNamed) {
  StartCase({1, 0.1});
  void* const memory = runtime::AllocateDevice(0, 64, "matrix").value();
  MokMatmulArgs args{};
  args.struct_size = sizeof(args);
  args.layout = MOK_MATMUL_NT;
  args.m = args.n = args.k = 2;
  args.a = args.b = static_cast<const float*>(memory);
  args.c = static_cast<float*>(memory) + 8;
  const MokMatmulArgs good = args;
  const auto expect = [&](auto spoil, const std::string& text) {
    args = good;
    spoil(args);
    ExpectError(mok_cuda_matmul(&args, 0, nullptr), MOK_INVALID_ARGUMENT, text);
  };
  for (const Pointer& pointer : {Pointer{"a", args.a}, {"b", args.b}, {"c", args.c}}) {
    expect([&](MokMatmulArgs&) { *pointer.place = nullptr; },
           pointer.name + ": expected a pointer, got null");
    void* const off = static_cast<std::byte*>(memory) + 2;
    expect([&](MokMatmulArgs&) { *pointer.place = off; },
           StrCat(pointer.name, ": expected an address aligned to 4 bytes, got ", off));
  }
  expect([](MokMatmulArgs& a) { a.layout = 3; }, "layout: expected 0 to 2, got 3");
  expect([](MokMatmulArgs& a) { a.k = -1; }, "k: expected 0 to 2147483647, got -1");
  expect(
      [](MokMatmulArgs& a) {
        a.m = 65535 * 64 + 1;
        a.k = 0;
      },
      "m: expected 0 to 4194240, got 4194241");
  expect([](MokMatmulArgs& a) { a.reserved = 1; }, "MokMatmulArgs.reserved: expected 0, got 1");
  expect([&](MokMatmulArgs& a) { a.c = static_cast<float*>(memory) + 3; },
         StrCat("c: expected memory that does not overlap a, got 16 bytes at ",
                static_cast<void*>(static_cast<float*>(memory) + 3), " and 16 at ", memory));
  args = good;
  ExpectError(mok_cuda_matmul(&args, -1, nullptr), MOK_INVALID_ARGUMENT,
              "device: expected 0 to 2147483647, got -1");
  expect([](MokMatmulArgs& a) { a.struct_size = 8; },
         StrCat("MokMatmulArgs.struct_size: expected ", sizeof(args),
                ", got 8 (compiled against another version of mok.h?)"));
  ExpectError(mok_cuda_matmul(nullptr, 0, nullptr), MOK_INVALID_ARGUMENT,
              "args: expected a pointer, got null");
  args = good;
  args.k = 0;  // an empty sum reads nothing
  args.a = args.b = nullptr;
  EXPECT_EQ(mok_cuda_matmul(&args, 0, nullptr), MOK_OK) << mok_last_error();
  args.m = 0;
  args.c = nullptr;
  EXPECT_EQ(mok_cuda_matmul(&args, 0, nullptr), MOK_OK) << mok_last_error();
  RunQueued();
}

}  // namespace
}  // namespace mok::testing
