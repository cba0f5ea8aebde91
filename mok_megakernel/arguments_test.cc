// Every argument of the C API that can be wrong on its own, and the error that names it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "mok_core/status.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

void ExpectError(int32_t code, int32_t expected_code, const std::string& text) {
  EXPECT_EQ(code, expected_code);
  EXPECT_STREQ(mok_last_error(), text.c_str());
}

class ArgumentsTest : public ::testing::Test {
 protected:
  ArgumentsTest() : data_(OneRankLayer()), workspaces_(data_.spec), layer_(data_, 0, {}) {
    EXPECT_EQ(layer_.BuildSchedule(workspaces_[0]), MOK_OK) << mok_last_error();
  }

  void ExpectForwardError(const std::function<void(MokForwardArgs*)>& spoil, int32_t code,
                          const std::string& text) {
    ExpectPassError(&layer_.forward_args, spoil, &RankLayer::Forward, code, text);
  }
  void ExpectBackwardError(const std::function<void(MokBackwardArgs*)>& spoil, int32_t code,
                           const std::string& text) {
    ExpectPassError(&layer_.backward_args, spoil, &RankLayer::Backward, code, text);
  }
  // The call after the error works.
  template <class Args>
  void ExpectPassError(Args* args, const std::function<void(Args*)>& spoil,
                       int32_t (RankLayer::*pass)(MokWorkspace*), int32_t code,
                       const std::string& text) {
    const Args good = *args;
    spoil(args);
    ExpectError((layer_.*pass)(workspaces_[0]), code, text);
    *args = good;
    EXPECT_EQ((layer_.*pass)(workspaces_[0]), MOK_OK) << mok_last_error();
  }
  void ExpectConfigError(const std::function<void(MokEngineConfig*)>& spoil, int32_t code,
                         const std::string& text) {
    const MokEngineConfig good = layer_.config;
    spoil(&layer_.config);
    ExpectError(layer_.Forward(workspaces_[0]), code, text);
    layer_.config = good;
  }

  LayerData data_;
  RankWorkspaces workspaces_;
  RankLayer layer_;
};

TEST_F(ArgumentsTest, Forward) {
  const auto null = [](const std::string& name) { return name + ": expected a pointer, got null"; };
  ExpectForwardError([](auto* args) { args->layer.x = nullptr; }, MOK_INVALID_ARGUMENT, null("x"));
  ExpectForwardError([](auto* args) { args->layer.topk_weight = nullptr; }, MOK_INVALID_ARGUMENT,
                     null("topk_weight"));
  ExpectForwardError([](auto* args) { args->layer.routed.up = nullptr; }, MOK_INVALID_ARGUMENT,
                     null("routed.up"));
  ExpectForwardError([](auto* args) { args->layer.shared.down = nullptr; }, MOK_INVALID_ARGUMENT,
                     null("shared.down"));
  ExpectForwardError([](auto* args) { args->context.ring_x = nullptr; }, MOK_INVALID_ARGUMENT,
                     null("context.ring_x"));
  ExpectForwardError([](auto* args) { args->context.shared_up = nullptr; }, MOK_INVALID_ARGUMENT,
                     null("context.shared_up"));
  ExpectForwardError([](auto* args) { args->out = nullptr; }, MOK_INVALID_ARGUMENT, null("out"));
  ExpectForwardError([](auto* args) { args->layer.routed.intermediate = 0; }, MOK_INVALID_ARGUMENT,
                     "routed.intermediate: expected a multiple of 8 from 8 to 2^31 - 1, got 0");
  ExpectForwardError([](auto* args) { args->layer.shared.intermediate = -8; }, MOK_INVALID_ARGUMENT,
                     "shared.intermediate: expected a multiple of 8 from 0 to 2^31 - 1, got -8");
  ExpectForwardError([](auto* args) { args->layer.swiglu_limit = NAN; }, MOK_INVALID_ARGUMENT,
                     "swiglu_limit: expected a number, got NaN");
  ExpectForwardError([](auto* args) { args->layer.shared.intermediate = 0; }, MOK_INVALID_ARGUMENT,
                     "shared_scale: expected null without a shared expert");
  const int64_t rows = layer_.info().ring_rows;
  ExpectForwardError([](auto* args) { args->context.ring_rows -= 1; }, MOK_INVALID_ARGUMENT,
                     StrCat("context.ring_rows: expected at least ", rows,
                            " (MokScheduleInfo.ring_rows), got ", rows - 1));
  ExpectForwardError([](auto* args) { args->struct_size = 8; }, MOK_INVALID_ARGUMENT,
                     StrCat("MokForwardArgs.struct_size: expected ", sizeof(MokForwardArgs),
                            ", got 8 (compiled against another version of mok.h?)"));
}

// A batch of which no route leads anywhere needs no ring, unless its spare rows are to be cleared.
TEST_F(ArgumentsTest, ClearedRingIsNeeded) {
  const std::vector<int64_t> no_routes(data_.topk_idx.size(), -1);
  layer_.schedule_args.topk_idx = no_routes.data();
  ASSERT_EQ(layer_.BuildSchedule(workspaces_[0]), MOK_OK) << mok_last_error();
  const MokForwardArgs good = layer_.forward_args;
  MokContext& context = layer_.forward_args.context;
  for (void** pointer : {&context.ring_x, &context.ring_gate, &context.ring_up}) {
    *pointer = nullptr;
    EXPECT_EQ(layer_.Forward(workspaces_[0]), MOK_OK) << mok_last_error();
    layer_.forward_args.clear_spare_rows = 1;
    const std::string name = pointer == &context.ring_x      ? "ring_x"
                             : pointer == &context.ring_gate ? "ring_gate"
                                                             : "ring_up";
    ExpectError(layer_.Forward(workspaces_[0]), MOK_INVALID_ARGUMENT,
                StrCat("context.", name, ": expected a pointer, got null"));
    layer_.forward_args = good;
  }
  context.ring_rows = 0;
  context.ring_x = context.ring_gate = context.ring_up = nullptr;
  layer_.forward_args.clear_spare_rows = 1;
  ExpectError(layer_.Forward(workspaces_[0]), MOK_INVALID_ARGUMENT,
              StrCat("context.ring_rows: expected at least ", layer_.info().ring_rows,
                     " (MokScheduleInfo.ring_rows), got 0"));
  layer_.forward_args = good;
}

TEST_F(ArgumentsTest, Backward) {
  ASSERT_EQ(layer_.Forward(workspaces_[0]), MOK_OK);
  const auto null = [](const std::string& name) { return name + ": expected a pointer, got null"; };
  ExpectBackwardError([](auto* args) { args->d_out = nullptr; }, MOK_INVALID_ARGUMENT,
                      null("d_out"));
  ExpectBackwardError([](auto* args) { args->d_x = nullptr; }, MOK_INVALID_ARGUMENT, null("d_x"));
  ExpectBackwardError([](auto* args) { args->d_topk_weight = nullptr; }, MOK_INVALID_ARGUMENT,
                      null("d_topk_weight"));
  ExpectBackwardError([](auto* args) { args->d_shared_scale = nullptr; }, MOK_INVALID_ARGUMENT,
                      null("d_shared_scale"));
  ExpectBackwardError([](auto* args) { args->layer.shared_scale = nullptr; }, MOK_INVALID_ARGUMENT,
                      "d_shared_scale: expected null without shared_scale");
  ExpectBackwardError([](auto* args) { args->kept_macrobatches = 2; }, MOK_INVALID_ARGUMENT,
                      "kept_macrobatches: expected 0 to 1, got 2");
  ExpectBackwardError([](auto* args) { args->d_routed.dtype = 2; }, MOK_TYPE_MISMATCH,
                      "d_routed.dtype: expected fp32 or bf16, got e4m3");
  ExpectBackwardError([](auto* args) { args->d_routed.accumulate = 2; }, MOK_INVALID_ARGUMENT,
                      "d_routed.accumulate: expected 0 to 1, got 2");
  ExpectBackwardError([](auto* args) { args->d_shared.accumulate = -1; }, MOK_INVALID_ARGUMENT,
                      "d_shared.accumulate: expected 0 to 1, got -1");
}

// They may mean something to another version of the library.
TEST_F(ArgumentsTest, ReservedFieldsAreZero) {
  ExpectForwardError([](auto* args) { args->layer.reserved = 0.5f; }, MOK_INVALID_ARGUMENT,
                     "MokLayer.reserved: expected 0, got 0.5");
  ExpectBackwardError([](auto* args) { args->layer.reserved = NAN; }, MOK_INVALID_ARGUMENT,
                      "MokLayer.reserved: expected 0, got nan");
  ExpectBackwardError([](auto* args) { args->reserved = -1; }, MOK_INVALID_ARGUMENT,
                      "MokBackwardArgs.reserved: expected 0, got -1");
  ExpectConfigError([](auto* config) { config->reserved = 7; }, MOK_INVALID_ARGUMENT,
                    "MokEngineConfig.reserved: expected 0, got 7");
  layer_.config.reserved = 7;
  ExpectError(layer_.BuildSchedule(workspaces_[0]), MOK_INVALID_ARGUMENT,
              "MokEngineConfig.reserved: expected 0, got 7");
}

TEST_F(ArgumentsTest, Config) {
  ExpectConfigError([](auto* config) { config->num_threads = -1; }, MOK_INVALID_ARGUMENT,
                    "config.num_threads: expected 0 to 1024, got -1");
  ExpectConfigError([](auto* config) { config->num_comm_threads = 5000; }, MOK_INVALID_ARGUMENT,
                    "config.num_comm_threads: expected 0 to 1024, got 5000");
  ExpectConfigError([](auto* config) { config->isa = 4; }, MOK_INVALID_ARGUMENT,
                    "config.isa: expected -1 to 3, got 4");
  MokTrace* trace = nullptr;
  ASSERT_EQ(mok_trace_create(2, 10, &trace), MOK_OK);
  ExpectConfigError(
      [&](auto* config) {
        config->num_threads = 3;
        config->trace = trace;
      },
      MOK_INVALID_ARGUMENT, "config.trace: made for 2 workers, the pass has 3");
  mok_trace_destroy(trace);
}

TEST_F(ArgumentsTest, Schedule) {
  MokScheduleArgs good = layer_.schedule_args;
  layer_.schedule_args.num_tokens = -1;
  ExpectError(layer_.BuildSchedule(workspaces_[0]), MOK_INVALID_ARGUMENT,
              "num_tokens: expected 0 to max_tokens = 9 of the workspace, got -1");
  layer_.schedule_args = good;
  layer_.schedule_args.topk_idx = nullptr;
  ExpectError(layer_.BuildSchedule(workspaces_[0]), MOK_INVALID_ARGUMENT,
              "topk_idx: expected a pointer, got null");
  layer_.schedule_args = good;
  for (const int32_t experts : {-3, MOK_MAX_LOCAL_EXPERTS + 1}) {
    layer_.schedule_args.num_local_experts = experts;
    ExpectError(layer_.BuildSchedule(workspaces_[0]), MOK_INVALID_ARGUMENT,
                StrCat("num_local_experts: expected 0 to 1048576, got ", experts));
  }
  layer_.schedule_args = good;
  layer_.schedule_args.num_experts = -1;
  ExpectError(layer_.BuildSchedule(workspaces_[0]), MOK_INVALID_ARGUMENT,
              "num_experts: expected 0 to 2147483647, got -1");
  ExpectError(layer_.Forward(workspaces_[0]), MOK_INVALID_ARGUMENT,
              "schedule: expected a pointer, got null");
}

TEST_F(ArgumentsTest, ScheduleOfAnotherWorkspace) {
  const RankWorkspaces alike(data_.spec);
  ASSERT_EQ(layer_.BuildSchedule(alike[0]), MOK_OK);
  EXPECT_EQ(layer_.Forward(workspaces_[0]), MOK_OK) << mok_last_error();
  LayerSpec smaller = OneRankLayer();
  smaller.tokens = {8};
  const RankWorkspaces too_small(smaller);
  ExpectError(layer_.Forward(too_small[0]), MOK_FAILED_PRECONDITION,
              "schedule: has 9 tokens, the workspace room for 8");
  smaller.topk = 3;
  const RankWorkspaces other_topk(smaller);
  ExpectError(layer_.Forward(other_topk[0]), MOK_FAILED_PRECONDITION,
              "schedule: built for rank 0 of 1 with K = 2, the workspace is of rank 0 of 1 with K "
              "= 3");
}

TEST_F(ArgumentsTest, Float32LayerTakesNoBf16Gradients) {
  LayerSpec spec = OneRankLayer();
  spec.dtype = DType::kFp32;
  const LayerData data(spec);
  const RankWorkspaces workspaces(spec);
  RunOptions options;
  options.grad_dtype = DType::kBf16;
  RankLayer layer(data, 0, options);
  ASSERT_EQ(layer.BuildSchedule(workspaces[0]), MOK_OK);
  ASSERT_EQ(layer.Forward(workspaces[0]), MOK_OK);
  ExpectError(layer.Backward(workspaces[0]), MOK_TYPE_MISMATCH,
              "d_routed.dtype: expected fp32, got bf16");
}

TEST_F(ArgumentsTest, UnwantedGradientsAreSkipped) {
  ASSERT_EQ(layer_.Forward(workspaces_[0]), MOK_OK);
  layer_.backward_args.d_routed.up = nullptr;
  layer_.backward_args.d_shared.down = nullptr;
  ASSERT_EQ(layer_.Backward(workspaces_[0]), MOK_OK) << mok_last_error();
  const LayerResult whole = RunLayer(data_, {});
  EXPECT_TRUE(layer_.d_x == whole.d_x);
  EXPECT_TRUE(layer_.d_gate == whole.d_gate);
  EXPECT_TRUE(layer_.d_down == whole.d_down);
  EXPECT_TRUE(std::isnan(layer_.d_up.Get(0)));
  EXPECT_TRUE(std::isnan(layer_.d_shared_down.Get(0)));
}

TEST_F(ArgumentsTest, SavedSchedule) {
  layer_.SaveAndLoadSchedule();
  ASSERT_EQ(layer_.Forward(workspaces_[0]), MOK_OK) << mok_last_error();
  ASSERT_EQ(layer_.Backward(workspaces_[0]), MOK_OK) << mok_last_error();
  const LayerResult expected = RunLayer(data_, {});
  EXPECT_TRUE(layer_.out == expected.out);
  EXPECT_TRUE(layer_.d_gate == expected.d_gate);
}

TEST_F(ArgumentsTest, SavedScheduleIsChecked) {
  MokSchedule* schedule = nullptr;
  ASSERT_EQ(mok_schedule_build(workspaces_[0], &layer_.config, &layer_.schedule_args, &schedule),
            MOK_OK);
  std::vector<int32_t> words(10000);
  EXPECT_EQ(mok_schedule_save(schedule, words.data(), 100), MOK_INVALID_ARGUMENT);
  ExpectError(mok_schedule_save(schedule, words.data(), -1), MOK_INVALID_ARGUMENT,
              "num_words: expected 0 to 2305843009213693951, got -1");
  ASSERT_EQ(mok_schedule_save(schedule, words.data(), 10000), MOK_OK);
  mok_schedule_destroy(schedule);
  schedule = nullptr;
  EXPECT_EQ(mok_schedule_load(words.data(), 100, &schedule), MOK_INVALID_ARGUMENT);
  ExpectError(mok_schedule_load(words.data(), -1, &schedule), MOK_INVALID_ARGUMENT,
              "num_words: expected 0 to 2305843009213693951, got -1");
  for (const size_t word : {size_t{0}, size_t{12}, size_t{200}}) {
    words[word] ^= 4;
    EXPECT_EQ(mok_schedule_load(words.data(), 10000, &schedule), MOK_INVALID_ARGUMENT) << word;
    EXPECT_STREQ(mok_last_error(),
                 "words: these 10000 words were not written by mok_schedule_save");
    words[word] ^= 4;
  }
  ASSERT_EQ(mok_schedule_load(words.data(), 10000, &schedule), MOK_OK) << mok_last_error();
  int64_t counts[4] = {};
  ASSERT_EQ(mok_schedule_tokens_per_expert(schedule, counts), MOK_OK);
  EXPECT_EQ(counts[0] + counts[1] + counts[2] + counts[3], 9 * 2);
  mok_schedule_destroy(schedule);
}

TEST_F(ArgumentsTest, TraceHoldsEveryTask) {
  MokTrace* trace = nullptr;
  ASSERT_EQ(mok_trace_create(1, 1000, &trace), MOK_OK);
  layer_.config.trace = trace;
  ASSERT_EQ(layer_.Forward(workspaces_[0]), MOK_OK) << mok_last_error();
  const std::string path = ::testing::TempDir() + "/mok_trace.json";
  ASSERT_EQ(mok_trace_write(trace, path.c_str()), MOK_OK) << mok_last_error();
  mok_trace_destroy(trace);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::remove(path.c_str());
  for (const char* kind : {"EntryBarrier", "SharedGateUp", "Dispatch", "GateUp", "Down", "Combine",
                           "ExitBarrier", "TokenReduce"}) {
    EXPECT_NE(text.str().find(StrCat("\"", kind, "\"")), std::string::npos) << kind;
  }
}

TEST(TraceTest, Errors) {
  MokTrace* trace = nullptr;
  ExpectError(mok_trace_create(0, 10, &trace), MOK_INVALID_ARGUMENT,
              "num_workers: expected 1 to 2048, got 0");
  ExpectError(mok_trace_create(INT32_MAX, 0, &trace), MOK_INVALID_ARGUMENT,
              "num_workers: expected 1 to 2048, got 2147483647");
  ExpectError(mok_trace_create(1, -1, &trace), MOK_INVALID_ARGUMENT,
              "events_per_worker: expected 0 to 9223372036854775807, got -1");
  ExpectError(mok_trace_create(2, INT64_MAX, &trace), MOK_INVALID_ARGUMENT,
              "num_workers, events_per_worker: expected at most 2^45 bytes, got [2, "
              "9223372036854775807] of 32 bytes");
  EXPECT_EQ(trace, nullptr);
}

TEST(GroupTest, Errors) {
  MokInProcessGroup* group = nullptr;
  for (const int32_t ranks : {-1, 0, MOK_MAX_RANKS + 1, INT32_MAX}) {
    ExpectError(mok_in_process_group_create(ranks, &group), MOK_INVALID_ARGUMENT,
                StrCat("ep_size: expected 1 to 1024, got ", ranks));
  }
  EXPECT_EQ(group, nullptr);
}

TEST(WorkspaceOptionsTest, Errors) {
  const LayerSpec spec = OneRankLayer();
  const auto expect = [&](const std::function<void(MokWorkspaceOptions*)>& spoil, int32_t code,
                          const std::string& text) {
    MokWorkspaceOptions options = WorkspaceOptionsOf(spec, 0, nullptr, nullptr);
    spoil(&options);
    MokWorkspace* workspace = nullptr;
    ExpectError(mok_workspace_create(&options, &workspace), code, text);
    EXPECT_EQ(workspace, nullptr);
  };
  expect([](auto* options) { options->ep_size = 0; }, MOK_INVALID_ARGUMENT,
         "ep_size: expected 1 to 1024, got 0");
  expect([](auto* options) { options->rank = 1; }, MOK_INVALID_ARGUMENT,
         "rank: expected 0 to 0, got 1");
  expect([](auto* options) { options->hidden = 12; }, MOK_INVALID_ARGUMENT,
         "hidden: expected a multiple of 8 from 8 to 2^31 - 1, got 12");
  expect([](auto* options) { options->topk = 0; }, MOK_INVALID_ARGUMENT,
         "topk: expected 1 to 2147483647, got 0");
  expect([](auto* options) { options->dtype = 2; }, MOK_TYPE_MISMATCH,
         "dtype: expected bf16 (0) or fp32 (1), got 2");
  expect([](auto* options) { options->timeout_seconds = 0; }, MOK_INVALID_ARGUMENT,
         "timeout_seconds: expected a number in (0, 1e9), got 0");
  expect([](auto* options) { options->ep_size = 2; }, MOK_INVALID_ARGUMENT,
         "heap_name, group: expected exactly one with ep_size 2, got 0");
  expect([](auto* options) { options->reserved = 1; }, MOK_INVALID_ARGUMENT,
         "MokWorkspaceOptions.reserved: expected 0, got 1");
  expect([](auto* options) { options->topk = INT32_MAX; }, MOK_INVALID_ARGUMENT,
         StrCat("max_tokens * topk: expected 0 to 2147483647, got ", int64_t{INT32_MAX} * 9));
  expect(
      [](auto* options) {
        options->max_tokens = INT32_MAX;
        options->topk = 1;
        options->hidden = INT32_MAX - 7;
      },
      MOK_INVALID_ARGUMENT,
      "max_tokens * topk, hidden: expected at most 2^45 bytes, got [2147483647, 2147483640] of 2 "
      "bytes");
  const std::string long_name(65, 'x');
  for (const char* name : {"", "a/b", "/mok", long_name.c_str()}) {
    expect(
        [&](auto* options) {
          options->ep_size = 2;
          options->heap_name = name;
        },
        MOK_INVALID_ARGUMENT,
        StrCat("heap_name: expected 1 to 64 characters without '/', got ", std::string(name).size(),
               ": \"", std::string(name).substr(0, 64), "\""));
  }
}

TEST(WorkspaceInfoTest, ScratchAndThreadsGrowOnly) {
  const LayerData data(OneRankLayer());
  const RankWorkspaces workspaces(data.spec);
  const auto info = [&] {
    MokWorkspaceInfo result{};
    result.struct_size = sizeof(result);
    EXPECT_EQ(mok_workspace_info(workspaces[0], &result), MOK_OK) << mok_last_error();
    return result;
  };
  EXPECT_GT(info().heap_bytes, 0);
  EXPECT_EQ(info().scratch_bytes, 0);
  RunOptions options;
  options.threads = 3;
  RunLayer(data, options, workspaces);
  const MokWorkspaceInfo first = info();
  EXPECT_GT(first.scratch_bytes, 0);
  EXPECT_EQ(first.num_threads, 2);
  options.threads = 1;
  RunLayer(data, options, workspaces);
  EXPECT_EQ(info().scratch_bytes, first.scratch_bytes);
  EXPECT_EQ(info().num_threads, 2);
}

TEST(MachineTest, Isas) {
  EXPECT_EQ(mok_api_version(), MOK_API_VERSION);
  EXPECT_STREQ(mok_isa_name(0), "portable");
  EXPECT_STREQ(mok_isa_name(4), "unknown");
  EXPECT_EQ(mok_isa_supported(0), 1);
  EXPECT_EQ(mok_isa_supported(-1), 0);
  EXPECT_EQ(mok_isa_supported(mok_best_isa()), 1);
  EXPECT_GE(mok_num_cores(), 1);
}

}  // namespace
}  // namespace mok::testing
