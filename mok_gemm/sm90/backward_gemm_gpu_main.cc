// For a machine with a Hopper GPU: the backward's tiles on odd shapes and on the four models'
// shapes, against float64; NaN-poisoned outputs; runs with equal bits; rates.
//
//   backward_gemm_gpu_main [repeats [odd]]  exit status 0: everything agrees
//
// "odd": only the small odd shapes, for compute-sanitizer.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "mok_core/device/runtime.h"
#include "mok_gemm/sm90/backward_test_problem.h"
#include "mok_gemm/sm90/grouped_gemm.h"
#include "mok_gemm/sm90/tile_raster.h"

namespace mok::testing {
namespace {

constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr uint32_t kNumBlocks = 132;  // SMs of an H100 or H200; other grids are tested too
constexpr int kTimedLaunches = 10;
constexpr int kTimedRounds = 3;
// Before every measurement: the clock under load depends on what ran before.
constexpr std::chrono::milliseconds kPause(200);
constexpr float kNoLimit = std::numeric_limits<float>::infinity();
using Config = DefaultSm90GemmConfig<ColumnOrder::kNatural>;
constexpr BackwardTileSize kTile = {Config::kTileM, Config::kTileN};

void Check(const Status& status) { MOK_CHECK(status.ok()) << status; }

// Launches products of one problem.
class Runner {
 public:
  explicit Runner(const BackwardTestProblem& test) : test_(&test), kernel_(BackwardGemmKernel()) {
    static void* const record =
        runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value();
    static void* const abort_flag =
        runtime::AllocateDevice(0, sizeof(uint32_t), "abort_flag").value();
    Check(runtime::Fill(abort_flag, 0, sizeof(uint32_t)));
    record_ = static_cast<DeviceWaitRecord*>(record);
    wait_ = {record_, static_cast<uint32_t*>(abort_flag), kTimeoutNs, 0};
  }

  void Launch(uint32_t products, uint32_t num_blocks) const {
    for (int piece = 0; piece < test_->pieces(); ++piece) {
      BackwardGemmParams params =
          test_->Params(piece == 0 ? products : products & kProductWeightGrad, piece);
      params.gate_up.max_panel_blocks = TileRaster::kDefaultPanelBlocks;
      params.gate_up.wait = wait_;
      runtime::LaunchConfig config;
      config.grid = {num_blocks, 1, 1};
      config.block = {kernel_.threads, 1, 1};
      config.shared_bytes = kernel_.shared_bytes;
      config.registers_per_thread = kSm90LaunchRegisters;
      config.name = "backward_gemm";
      Check(runtime::LaunchKernelAddress(kernel_.address, config, &params, sizeof params));
    }
  }
  void Synchronize() const {
    const Status status = runtime::Synchronize();
    Check(CheckDeviceWaitRecord(*record_, {GroupedGemmRoleName, nullptr}));
    Check(status);
  }
  double TeraflopsPerSecond(uint32_t product) const {
    std::this_thread::sleep_for(kPause);
    Launch(product, kNumBlocks);
    Synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kTimedLaunches; ++i) Launch(product, kNumBlocks);
    Synchronize();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    return test_->Flops(product) * kTimedLaunches / seconds.count() / 1e12;
  }

 private:
  const BackwardTestProblem* test_;
  BackwardGemmKernelInfo kernel_;
  DeviceWaitRecord* record_;
  DeviceWaitParams wait_;
};

constexpr uint32_t kAll =
    kProductDownGrad | kProductInputGrad | kProductWeightGrad | kProductGateUp;

// All products in one launch, several grids; returns how many runs disagree.
int CompareRuns(const char* name, const BackwardTestSpec& spec, int sample, int repeats) {
  const BackwardTestProblem test(spec, kTile);
  const Runner runner(test);
  test.Poison();
  runner.Launch(kAll, kNumBlocks);
  runner.Synchronize();
  const int threads = static_cast<int>(std::thread::hardware_concurrency());
  const std::string error = test.Compare(kAll, sample, threads);
  int different = 0;
  if (repeats > 0) {
    const std::vector<uint32_t> expected = test.Results(kAll);
    for (int i = 0; i < repeats; ++i) {
      test.Poison();
      runner.Launch(kAll, 1 + static_cast<uint32_t>(i) * 37 % kNumBlocks);
      runner.Synchronize();
      if (test.Results(kAll) != expected) ++different;
    }
  }
  printf("%-20s %d of %d runs differ  %s\n", name, different, repeats,
         error.empty() ? "ok" : error.c_str());
  fflush(stdout);
  return (error.empty() ? 0 : 1) + different;
}

// Tails in every dimension, short tiles, empty experts, all forms of weight gradients.
int RunOddShapes(int repeats) {
  BackwardTestSpec spec;
  spec.counts = {1, 0, 64, 65, 300};
  spec.hidden = 1032;
  spec.intermediate = 776;
  spec.row_gap = 5;
  spec.swiglu_limit = kNoLimit;
  int failures = CompareRuns("odd", spec, 1 << 20, repeats);
  for (DType dtype : {DType::kBf16, DType::kFp32}) {
    for (bool accumulate : {false, true}) {
      for (bool gate_form : {false, true}) {
        BackwardTestSpec form = spec;
        form.counts = {129, 7, 0, 255};
        form.hidden = 136;
        form.intermediate = 440;
        form.out_dtype = dtype;
        form.accumulate = accumulate;
        form.gate_form = gate_form;
        form.piece_rows = gate_form ? 64 : 1 << 30;
        form.one_weight = accumulate;
        form.swiglu_limit = 0.75f;
        const std::string name =
            StrCat(DTypeName(dtype), accumulate ? " accumulate" : "", gate_form ? " pieces" : "");
        failures += CompareRuns(name.c_str(), form, 1 << 20, repeats);
      }
    }
  }
  BackwardTestSpec tiny;
  tiny.counts = {3};
  tiny.hidden = tiny.intermediate = 8;
  return failures + CompareRuns("tiny", tiny, 1 << 20, repeats);
}

// One rank of EP = 64 with 2048 tokens per GPU.
struct Model {
  const char* name;
  int64_t hidden, intermediate;
  std::vector<int32_t> counts;
};
std::vector<Model> Models() {
  return {
      {"kimi", 7168, 2048, {2731, 2731, 2731, 2731, 2730, 2730}},
      {"glm", 6144, 2048, {4096, 4096, 4096, 4096}},
      {"qwen", 4096, 1024, {2560, 2560, 2560, 2560, 2560, 2560, 2560, 2560}},
      {"deepseek", 7168, 3072, {2048, 2048, 2048, 2048, 2048, 2048}},
  };
}

// What is timed of a model: products of one problem.
struct Timed {
  const char* name;
  const Runner* runner;
  uint32_t product;
  std::vector<double> rates;
};

// The products take turns; the median of each is printed.
void PrintRates(const char* model, std::vector<Timed> all) {
  for (int round = 0; round < kTimedRounds; ++round) {
    for (Timed& timed : all) {
      timed.rates.push_back(timed.runner->TeraflopsPerSecond(timed.product));
    }
  }
  printf("%-9s TFLOP/s:", model);
  for (Timed& timed : all) {
    std::sort(timed.rates.begin(), timed.rates.end());
    printf("  %s %5.1f", timed.name, timed.rates[kTimedRounds / 2]);
  }
  printf("\n");
  fflush(stdout);
}

int RunModel(const Model& model) {
  BackwardTestSpec spec;
  spec.counts = model.counts;
  spec.hidden = model.hidden;
  spec.intermediate = model.intermediate;
  spec.block_rows = 128;
  spec.swiglu_limit = kNoLimit;
  const int failures = CompareRuns(model.name, spec, 3, 0);
  BackwardTestSpec gate_spec = spec;
  gate_spec.gate_form = true;
  BackwardTestSpec main_grad_spec = gate_spec;
  main_grad_spec.out_dtype = DType::kFp32;
  main_grad_spec.accumulate = true;
  const BackwardTestProblem test(spec, kTile), gate(gate_spec, kTile);
  const BackwardTestProblem main_grad(main_grad_spec, kTile);
  main_grad.Poison();
  const Runner runner(test), gate_runner(gate), main_grad_runner(main_grad);
  PrintRates(model.name, {{"gate+up", &runner, kProductGateUp, {}},
                          {"down_grad", &runner, kProductDownGrad, {}},
                          {"input_grad", &runner, kProductInputGrad, {}},
                          {"dWd", &runner, kProductWeightGrad, {}},
                          {"dWg", &gate_runner, kProductWeightGrad, {}},
                          {"dWg += fp32", &main_grad_runner, kProductWeightGrad, {}}});
  return failures;
}

}  // namespace

int Main(int repeats, bool only_odd) {
  int failures = RunOddShapes(repeats);
  if (!only_odd) {
    for (const Model& model : Models()) failures += RunModel(model);
  }
  printf(failures == 0 ? "all agree\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace mok::testing

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 20;
  return mok::testing::Main(repeats, argc > 2 && std::strcmp(argv[2], "odd") == 0);
}
