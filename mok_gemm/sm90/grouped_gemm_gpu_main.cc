// For a machine with a Hopper GPU: the production kernels on odd shapes and on the four models'
// shapes, against float64; NaN-poisoned outputs; 100 runs with equal bits; rates.
//
//   grouped_gemm_gpu_main [repeats [odd]]  exit status 0: everything agrees
//
// "odd": only the small odd shapes, for compute-sanitizer.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "mok_core/device/runtime.h"
#include "mok_gemm/sm90/gemm_checksum.h"
#include "mok_gemm/sm90/gemm_test_problem.h"
#include "mok_gemm/sm90/grouped_gemm.h"
#include "mok_gemm/sm90/tensor_maps.h"

namespace mok::testing {
namespace {

constexpr auto kStore = GemmEpilogue::kStore, kSwiGlu = GemmEpilogue::kSwiGlu;
constexpr float kNoLimit = std::numeric_limits<float>::infinity();
constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr uint32_t kNumBlocks = 132;  // SMs of an H100 or H200; other grids are tested too
constexpr int kTimedLaunches = 20;

void Check(const Status& status) { MOK_CHECK(status.ok()) << status; }

// The kernel of one problem in one column order, ready to launch.
class Runner {
 public:
  Runner(const GemmTestProblem& test, ColumnOrder order)
      : kernel_(GroupedGemmKernel(order, test.spec().epilogue)),
        params_(MakeGroupedGemmParams(test.problem(), kernel_).value()) {
    static void* const record =
        runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value();
    static void* const abort_flag =
        runtime::AllocateDevice(0, sizeof(uint32_t), "abort_flag").value();
    Check(runtime::Fill(abort_flag, 0, sizeof(uint32_t)));
    record_ = static_cast<DeviceWaitRecord*>(record);
    params_.wait = {record_, static_cast<uint32_t*>(abort_flag), kTimeoutNs, 0};
  }

  void Launch(uint32_t num_blocks) const {
    Check(LaunchGroupedGemm(kernel_, params_, {.num_blocks = num_blocks}));
  }
  void Synchronize() const {
    const Status status = runtime::Synchronize();
    Check(CheckDeviceWaitRecord(*record_, {GroupedGemmRoleName, nullptr}));
    Check(status);
  }
  double TeraflopsPerSecond(double flops) const {
    Launch(kNumBlocks);
    Synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kTimedLaunches; ++i) Launch(kNumBlocks);
    Synchronize();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    return flops * kTimedLaunches / seconds.count() / 1e12;
  }

 private:
  GroupedGemmKernelInfo kernel_;
  GroupedGemmParams params_;
  DeviceWaitRecord* record_;
};

class Checksummer {
 public:
  Checksummer()
      : sum_(static_cast<uint64_t*>(runtime::AllocateDevice(0, sizeof(uint64_t), "sum").value())) {}

  uint64_t Of(const GemmTestProblem& test) const {
    const GroupedGemmProblem& problem = test.problem();
    Check(runtime::Fill(sum_, 0, sizeof(uint64_t)));
    for (const BFloat16* output : {problem.out, problem.gate, problem.up}) {
      if (output == nullptr) continue;
      const ChecksumParams params{reinterpret_cast<const uint32_t*>(output),
                                  static_cast<uint64_t>(problem.rows * problem.out_stride / 2),
                                  sum_};
      runtime::LaunchConfig config;
      config.grid = {4 * kNumBlocks, 1, 1};
      config.block = {kChecksumThreads, 1, 1};
      Check(runtime::LaunchKernelAddress(ChecksumKernel(), config, &params, sizeof params));
    }
    Check(runtime::Synchronize());
    uint64_t sum;
    Check(runtime::CopyToHost(&sum, sum_, sizeof sum));
    return sum;
  }

 private:
  uint64_t* sum_;
};

struct NamedSpec {
  const char* name;
  GemmTestSpec spec;
};

// Tails in every dimension, short tiles, empty experts.
std::vector<NamedSpec> OddSpecs() {
  return {
      {"odd store", {kStore, {1, 0, 64, 65, 300}, 1032, 776, 5, 1, 8, kNoLimit, 1}},
      {"odd swiglu", {kSwiGlu, {129, 7, 0, 255}, 2040, 136, 1, 1, 16, 1.5f, 2}},
      {"multiple of 32", {kSwiGlu, {513, 63}, 328, 416, 0, 128, 0, kNoLimit, 3}},
      {"tiny", {kStore, {3}, 8, 8, 0, 1, 0, kNoLimit, 4}},
  };
}

// One rank of EP = 64 with 2048 tokens per GPU.
std::vector<NamedSpec> ModelSpecs() {
  struct Model {
    const char* name;
    int64_t hidden, intermediate;
    std::vector<int32_t> counts;
  };
  const Model models[] = {
      {"kimi", 7168, 2048, {2731, 2731, 2731, 2731, 2730, 2730}},
      {"glm", 6144, 2048, {4096, 4096, 4096, 4096}},
      {"qwen", 4096, 1024, {2560, 2560, 2560, 2560, 2560, 2560, 2560, 2560}},
      {"deepseek", 7168, 3072, {2048, 2048, 2048, 2048, 2048, 2048}},
  };
  std::vector<NamedSpec> specs;
  for (const Model& model : models) {
    specs.push_back(
        {model.name,
         {kSwiGlu, model.counts, model.hidden, model.intermediate, 0, 128, 0, kNoLimit, 5}});
    specs.push_back(
        {model.name,
         {kStore, model.counts, model.intermediate, model.hidden, 0, 128, 0, kNoLimit, 6}});
  }
  return specs;
}

// All column orders, several grids, `repeats` runs; returns how many disagree.
int RunSpec(const NamedSpec& named, int repeats) {
  const GemmTestProblem test(named.spec);
  const Checksummer checksummer;
  const int threads = static_cast<int>(std::thread::hardware_concurrency());
  int failures = 0;
  uint64_t expected = 0;
  for (ColumnOrder order : {ColumnOrder::kNatural, ColumnOrder::kPermuted}) {
    const bool natural = order == ColumnOrder::kNatural;
    if (!natural && SelectColumnOrder(named.spec.width) != order) continue;
    const Runner runner(test, order);
    test.Poison();
    runner.Launch(kNumBlocks);
    runner.Synchronize();
    const std::string error = test.Compare(8, threads);
    if (natural) expected = checksummer.Of(test);
    int different = 0;
    for (int i = 0; i < repeats; ++i) {
      test.Poison();
      runner.Launch(i % 2 == 0 ? kNumBlocks : 1 + static_cast<uint32_t>(i) * 37 % kNumBlocks);
      runner.Synchronize();
      if (checksummer.Of(test) != expected) ++different;
    }
    printf("%-14s %-9s %s %6.1f TFLOP/s  %d of %d runs differ  %s\n", named.name,
           natural ? "natural" : "permuted", named.spec.epilogue == kSwiGlu ? "swiglu" : "store ",
           runner.TeraflopsPerSecond(test.flops()), different, repeats,
           error.empty() ? "ok" : error.c_str());
    fflush(stdout);
    failures += (error.empty() ? 0 : 1) + different;
  }
  return failures;
}

}  // namespace

int Main(int repeats, bool only_odd) {
  int failures = 0;
  for (const NamedSpec& spec : OddSpecs()) failures += RunSpec(spec, repeats);
  if (!only_odd) {
    for (const NamedSpec& spec : ModelSpecs()) failures += RunSpec(spec, repeats);
  }
  printf(failures == 0 ? "all agree\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace mok::testing

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 100;
  return mok::testing::Main(repeats, argc > 2 && std::strcmp(argv[2], "odd") == 0);
}
