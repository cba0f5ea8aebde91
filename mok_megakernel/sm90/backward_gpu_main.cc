// Checks and times the backward kernel on Hopper GPUs.
//
//   backward_gpu_main [small] [medium] [model] [traffic] [--shape=kimi] [--ranks=0] [--virtual]
//                     [--quick] [--times] [--passes=20] [--comm_sms=0] [--minibatch=0]
//                     [--macrobatch=0] [--window=0] [--fused_reduce=-1] [--sms=0] [--trace]
//                     [--only=text]
//                     [--pause_ms=0]
//
// small:   the layers of the emulator's test, all gradients against float64, on one GPU (1, 2, 8
//          and 64 virtual ranks) and on 2, 3, 4 and 8 GPUs, as far as there are as many.
//          --only=text: those layers whose name contains it.
// medium:  a layer of many tiles, all gradients against the host engine.
// model, traffic: the layers of testing/model_layer.h on one GPU (1 rank), on two and on all,
//          sampled tokens against float64 (not with --quick), repeats bit for bit, time per pass.
//          --virtual: also 2 and 8 virtual ranks on one GPU. --ranks=n: on n GPUs only. --times:
//          no checks at all. --trace: what consumers of rank 0 did, all times those of the kernel
//          that traces. --pause_ms: before each
//          measurement; a GPU that has drawn its power limit for most of a second is slowed down.
// The exit status is 1 if any check fails.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_megakernel/sm90/testing/device_backward.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/gpu_main.h"
#include "mok_megakernel/sm90/testing/model_layer.h"
#include "mok_megakernel/sm90/testing/pass_timer.h"

namespace mok::testing {
namespace {

constexpr double kRouterTolerance = 1e-2;
constexpr double kEngineTolerance = 5e-3;  // between two correct engines that round differently
constexpr uint32_t kTraceCapacity = 4096;

struct Flags : GpuMainFlags {
  bool times = false, trace = false;
  int pause_ms = 0;
};

CheckPrinter g_check(52);

// Forward and backward of a layer on all ranks.
struct Step {
  Step(const LayerData& data, const DeviceLayerOptions& options,
       const DeviceBackwardOptions& backward_options)
      : layer(data, options, ForwardKernelOf),
        backward(layer, backward_options,
                 backward_options.trace_capacity > 0 ? TracedBackwardKernelOf : BackwardKernelOf) {}

  // Everything poisoned before each pass.
  Status Run() {
    layer.Poison();
    MOK_RETURN_IF_ERROR(layer.LaunchAll());
    MOK_RETURN_IF_ERROR(runtime::Synchronize());
    backward.Poison();
    MOK_RETURN_IF_ERROR(backward.LaunchAll());
    MOK_RETURN_IF_ERROR(runtime::Synchronize());
    MOK_RETURN_IF_ERROR(layer.CheckRecords());
    return backward.CheckRecords();
  }

  DeviceLayer layer;
  DeviceBackward backward;
};

// What a result is compared by.
struct NamedTensor {
  const char* name;
  const Tensor* tensor;
  int64_t columns;
};
std::vector<NamedTensor> GradientsOf(const LayerResult& result, const LayerSpec& spec) {
  std::vector<NamedTensor> tensors = {{"d_x", &result.d_x, spec.hidden},
                                      {"d_topk_weight", &result.d_topk_weight, 0},
                                      {"d_gate", &result.d_gate, spec.hidden},
                                      {"d_up", &result.d_up, spec.hidden},
                                      {"d_down", &result.d_down, spec.intermediate}};
  if (spec.shared_scale) tensors.push_back({"d_shared_scale", &result.d_shared_scale, 0});
  for (size_t rank = 0; rank < result.d_shared_gate.size(); ++rank) {
    tensors.push_back({"d_shared_gate", &result.d_shared_gate[rank], spec.hidden});
    tensors.push_back({"d_shared_up", &result.d_shared_up[rank], spec.hidden});
    tensors.push_back({"d_shared_down", &result.d_shared_down[rank], spec.shared_intermediate});
  }
  return tensors;
}

// The name of the first gradient that differs in bits, or empty.
std::string FirstDifference(const LayerResult& a, const LayerResult& b, const LayerSpec& spec) {
  const std::vector<NamedTensor> left = GradientsOf(a, spec), right = GradientsOf(b, spec);
  if (left.size() != right.size()) return "number of gradients";
  for (size_t i = 0; i < left.size(); ++i) {
    if (!(*left[i].tensor == *right[i].tensor)) return left[i].name;
  }
  return "";
}

// The worst relative error of `actual`, as a multiple of its tolerance.
class WorstError {
 public:
  void Add(const NamedTensor& actual, const std::vector<double>& expected, double tolerance) {
    const bool is_scalar = actual.columns == 0;
    const double error = RelativeError(*actual.tensor, expected);
    const double row = is_scalar ? 0 : WorstRowError(*actual.tensor, expected, actual.columns);
    const double limit = is_scalar ? kRouterTolerance : tolerance;
    const double multiple = std::max(error / limit, row / kRowTolerance);
    if (multiple <= worst_) return;
    worst_ = multiple;
    char text[128];
    std::snprintf(text, sizeof text, "%s: tensor %.2e, worst row %.2e", actual.name, error, row);
    text_ = text;
  }
  bool ok() const { return worst_ <= 1; }
  const std::string& text() const { return text_; }

 private:
  double worst_ = -1;
  std::string text_;
};

Tensor SumOf(const std::vector<Tensor>& parts) {
  Tensor sum(DType::kFp32, parts.empty() ? 0 : parts[0].size());
  for (int64_t i = 0; i < sum.size(); ++i) {
    double value = 0;
    for (const Tensor& part : parts) value += part.Get(i);
    sum.Set(i, value);
  }
  return sum;
}

void CheckReference(const LayerData& data, const LayerResult& result, const std::string& label) {
  const LayerSpec& spec = data.spec;
  const ReferenceResult reference = RunReference(ReferenceInputsOf(data));
  WorstError worst;
  worst.Add({"d_x", &result.d_x, spec.hidden}, reference.d_x, kTensorTolerance);
  worst.Add({"d_topk_weight", &result.d_topk_weight, 0}, reference.d_topk_weight, 0);
  worst.Add({"d_shared_scale", &result.d_shared_scale, 0}, reference.d_shared_scale, 0);
  worst.Add({"d_gate", &result.d_gate, spec.hidden}, reference.d_gate, kTensorTolerance);
  worst.Add({"d_up", &result.d_up, spec.hidden}, reference.d_up, kTensorTolerance);
  worst.Add({"d_down", &result.d_down, spec.intermediate}, reference.d_down, kTensorTolerance);
  const Tensor gate = SumOf(result.d_shared_gate), up = SumOf(result.d_shared_up);
  const Tensor down = SumOf(result.d_shared_down);
  worst.Add({"d_shared_gate", &gate, spec.hidden}, reference.d_shared_gate, kTensorTolerance);
  worst.Add({"d_shared_up", &up, spec.hidden}, reference.d_shared_up, kTensorTolerance);
  worst.Add({"d_shared_down", &down, spec.shared_intermediate}, reference.d_shared_down,
            kTensorTolerance);
  g_check(worst.ok(), label, worst.text());
}

// Placements, recomputation and repeats have the same bits, and these are right.
void CheckSmall(const LayerSpec& spec, DeviceLayerOptions options, const std::string& name) {
  const LayerData data(spec);
  LayerResult expected;
  for (const int32_t comm_sms : {0, 4}) {
    for (const int kept : {1, 0}) {
      options.forward.num_comm_sms = comm_sms;
      options.device_schedule = comm_sms == 0;
      options.fused_backward_reduce = spec.shared_intermediate > 0 && comm_sms == 0 ? 2 : 0;
      Step step(data, options, {.kept_macrobatches = kept, .own_state = kept == 0});
      const std::string label = StrCat(name, ", comm SMs ", comm_sms, ", kept ", kept);
      for (int repeat = 0; repeat < 2; ++repeat) {
        const Status status = step.Run();
        if (!status.ok()) return g_check(false, label, StrCat(status));
        const LayerResult result = step.backward.Result();
        if (expected.d_x.bytes.empty()) expected = result;
        const std::string difference = FirstDifference(result, expected, spec);
        if (difference.empty()) continue;
        return g_check(false, label, StrCat(difference, " of repeat ", repeat, " differs in bits"));
      }
    }
  }
  CheckReference(data, expected, name);
}

void RunSmall(int devices, const Flags& flags) {
  const SmallCases cases = {SmallSizes(), 288, std::vector<int64_t>(64, 12),
                            std::vector<int32_t>(64, 1)};
  RunSmallCases(cases, devices, flags.only, CheckSmall);
}

void RunMedium(int devices, const Flags& flags) {
  LayerSpec spec;
  spec.tokens = {700, 900};
  spec.experts = {3, 4};
  spec.topk = 4;
  spec.hidden = 2880;
  spec.intermediate = 1096;
  spec.shared_intermediate = 520;
  spec.shared_scale = true;
  const LayerData data(spec);
  RunOptions host_options;
  host_options.threads = 8;
  const LayerResult host = RunLayer(data, host_options);
  for (const int64_t macrobatch : {0, 1024}) {
    DeviceLayerOptions options;
    options.own_devices = devices >= 2;
    options.forward = flags.options.forward;
    if (macrobatch > 0) options.forward.macrobatch_rows = macrobatch;
    Step step(data, options, {});
    const std::string label = StrCat("medium, ", devices >= 2 ? "2 GPUs" : "2 virtual ranks",
                                     ", macrobatch ", step.layer.config(0).ring_rows());
    const Status status = step.Run();
    if (!status.ok()) return g_check(false, label, StrCat(status));
    const LayerResult result = step.backward.Result();
    const std::vector<NamedTensor> actual = GradientsOf(result, spec);
    const std::vector<NamedTensor> expected = GradientsOf(host, spec);
    WorstError worst;
    for (size_t i = 0; i < actual.size(); ++i) {
      worst.Add(actual[i], expected[i].tensor->ToDoubles(), kEngineTolerance);
    }
    g_check(worst.ok(), label, worst.text());
  }
}

void PrintTimes(PassTimer& timer, const char* name, const std::function<Status()>& launch,
                const Flags& flags, const PassFloors& floors) {
  const PassTimes times = MeasurePasses(timer, launch, flags.passes, flags.pause_ms);
  std::printf("     %-18s single %.3f ms (%.2fx of %.3f)  back to back %.3f ms (%.2fx of %.3f)\n",
              name, times.median, times.median / floors.burst, floors.burst, times.queued,
              times.queued / floors.sustained, floors.sustained);
  std::fflush(stdout);
}

void TimeSteps(Step& step, const LayerData& data, bool own_devices, const Flags& flags) {
  PassTimer timer(LanesOf(step.layer, own_devices));
  // A backward multiplies twice as much as a forward and exchanges as much; nothing is computed
  // again.
  const double forward = step.layer.flops(), bytes = BusiestLinkBytes(data);
  DeviceBackward again(step.layer, {.grad_dtype = DType::kBf16, .keeps_context = true},
                       BackwardKernelOf);
  MOK_CHECK(step.layer.LaunchAll().ok());
  const auto backward = [&] { return again.LaunchAll(); };
  PrintTimes(timer, "backward", backward, flags, FloorsOf(2 * forward, bytes));
  const auto both = [&] {
    MOK_RETURN_IF_ERROR(step.layer.LaunchAll());
    return step.backward.LaunchAll();
  };
  PrintTimes(timer, "forward + backward", both, flags, FloorsOf(3 * forward, 2 * bytes));
}

void CheckSample(const LayerData& data, const LayerResult& result, const std::string& name) {
  const LayerSpec& spec = data.spec;
  const std::vector<int64_t> tokens = SampleTokens(spec.num_tokens(), 24);
  const Tensor d_x = GatherRows(result.d_x, spec.hidden, tokens);
  const Tensor d_weight = GatherRows(result.d_topk_weight, spec.topk, tokens);
  const GradientRows reference = ReferenceGradientRows(data, tokens);
  WorstError worst;
  worst.Add({"d_x", &d_x, spec.hidden}, reference.d_x, kTensorTolerance);
  worst.Add({"d_topk_weight", &d_weight, 0}, reference.d_topk_weight, 0);
  g_check(worst.ok(), name, worst.text());
}

void RunLarge(const LayerSpec& spec, bool own_devices, const std::string& name,
              const Flags& flags) {
  const LayerData data = MakeLargeLayer(spec);
  DeviceLayerOptions options = flags.options;
  options.own_devices = own_devices;
  const uint32_t capacity = flags.trace ? kTraceCapacity : 0;
  Step step(data, options, {.grad_dtype = DType::kBf16, .trace_capacity = capacity});
  std::printf("     %s: %s\n", name.c_str(), step.layer.config(0).ToString().c_str());
  LayerResult expected;
  for (int repeat = 0; repeat < 2; ++repeat) {
    const Status status = step.Run();
    if (!status.ok()) return g_check(false, name, StrCat(status));
    if (flags.times) break;
    LayerResult result = step.backward.Result();
    if (repeat == 0) {
      expected = std::move(result);
      if (!flags.quick) CheckSample(data, expected, name);
      continue;
    }
    const std::string difference = FirstDifference(result, expected, spec);
    g_check(difference.empty(), name + ", repeat", difference.empty() ? "same bits" : difference);
  }
  TimeSteps(step, data, own_devices, flags);
  if (!flags.trace) return;
  step.backward.Poison();
  MOK_CHECK(step.layer.LaunchAll().ok() && step.backward.LaunchAll().ok());
  MOK_CHECK(runtime::Synchronize().ok());
  std::printf("%s", step.backward.trace().SummaryOfConsumers().c_str());
}

bool ParseFlag(const std::string& name, const std::string& value, Flags& flags) {
  const int64_t number = std::atoll(value.c_str());
  if (name == "--trace") return flags.trace = true;
  if (name == "--times") return flags.times = true;
  if (name == "--pause_ms") {
    flags.pause_ms = static_cast<int>(number);
  } else if (name == "--fused_reduce") {
    flags.options.fused_backward_reduce = static_cast<int32_t>(number);
  } else if (name == "--window") {
    flags.options.d_x_window_blocks = number;
  } else {
    return false;
  }
  return true;
}

}  // namespace
}  // namespace mok::testing

int main(int argc, char** argv) {
  using namespace mok::testing;
  return RunGpuMain<Flags>(argc, argv, {ParseFlag, RunSmall, RunMedium, RunLarge}, g_check);
}
