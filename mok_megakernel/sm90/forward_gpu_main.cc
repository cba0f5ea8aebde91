// Checks and times the forward kernel on Hopper GPUs.
//
//   forward_gpu_main [small] [model] [traffic] [--shape=kimi] [--comm_sms=0] [--minibatch=0]
//                    [--macrobatch=0] [--sms=0] [--passes=20] [--virtual] [--device_schedule]
//
// small:   the layers of the emulator's test, against float64, on one GPU (1, 2 and 8 virtual
//          ranks) and, if there are two, on two.
// model, traffic: the layers of testing/model_layer.h on one GPU (1 rank) and on two GPUs, sampled
//          tokens against float64, repeats bit for bit, time per pass. --virtual: also 2 and 8
//          virtual ranks on one GPU. --device_schedule: every pass, timed ones too, builds its
//          schedule first.
// The exit status is 1 if any check fails.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/model_layer.h"

namespace mok::testing {
namespace {

constexpr double kTensorTolerance = 4e-3;
constexpr double kRowTolerance = 2e-2;
constexpr double kBurstTeraflops = 786, kSustainedTeraflops = 678;
constexpr double kLinkGigabytes = 372;

struct Flags {
  bool small = false, model = false, traffic = false, virtual_ranks = false;
  bool device_schedule = false;
  std::string shape;
  int passes = 20;
  ForwardOptions forward;
};

int g_failures = 0;

void Check(bool ok, const std::string& label, const std::string& detail) {
  if (!ok) ++g_failures;
  std::printf("%s %-44s %s\n", ok ? "ok  " : "FAIL", label.c_str(), detail.c_str());
  std::fflush(stdout);
}

// One pass of all ranks with everything poisoned before.
Status RunPoisoned(DeviceLayer& layer) {
  layer.Poison();
  MOK_RETURN_IF_ERROR(layer.LaunchAll());
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  return layer.CheckRecords();
}

double SecondsOf(DeviceLayer& layer, int passes) {
  const auto begin = std::chrono::steady_clock::now();
  for (int pass = 0; pass < passes; ++pass) MOK_CHECK(layer.LaunchAll().ok());
  MOK_CHECK(runtime::Synchronize().ok());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string Errors(double tensor, double row) {
  char text[96];
  std::snprintf(text, sizeof text, "error of the tensor %.2e, worst row %.2e", tensor, row);
  return text;
}

void CheckSmall(const LayerSpec& spec, DeviceLayerOptions options, const std::string& name) {
  const LayerData data(spec);
  const ReferenceResult reference = RunReference(ReferenceInputsOf(data));
  Tensor expected;
  for (const int32_t comm_sms : {0, 4}) {
    options.forward.num_comm_sms = comm_sms;
    options.device_schedule = comm_sms == 0;
    DeviceLayer layer(data, options, ForwardKernelOf);
    const std::string label = StrCat(name, ", comm SMs ", comm_sms);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Status status = RunPoisoned(layer);
      if (!status.ok()) return Check(false, label, StrCat(status));
      const Tensor out = layer.Out();
      if (expected.bytes.empty()) expected = out;
      if (out == expected) continue;
      return Check(false, label, StrCat("repeat ", repeat, " differs in bits"));
    }
    const double error = RelativeError(expected, reference.out);
    const double row = WorstRowError(expected, reference.out, spec.hidden);
    Check(error <= kTensorTolerance && row <= kRowTolerance, label, Errors(error, row));
  }
}

void RunSmall(int devices) {
  LayerSpec spec;
  spec.topk = 3;
  spec.hidden = 328;
  spec.intermediate = 136;
  spec.shared_intermediate = 72;
  spec.shared_scale = true;
  spec.swiglu_limit = 7;
  DeviceLayerOptions options;
  options.own_devices = false;
  const auto run = [&](const std::string& name) {
    CheckSmall(spec, options, name);
    LayerSpec permuted = spec;
    permuted.hidden = 320;
    permuted.intermediate = permuted.shared_intermediate = 160;
    CheckSmall(permuted, options, name + ", permuted");
    DeviceLayerOptions several = options;
    several.forward.minibatch_rows = 128;
    several.forward.macrobatch_rows = 256;
    CheckSmall(spec, several, name + ", several macrobatches");
  };
  spec.tokens = {700};
  spec.experts = {6};
  run("one rank");
  spec.tokens = {400, 300};
  spec.experts = {4, 2};
  run("2 virtual ranks");
  spec.tokens = {100, 0, 3, 250, 17, 128, 129, 73};
  spec.experts = {2, 0, 1, 1, 0, 1, 1, 0};
  run("8 virtual ranks");
  if (devices < 2) return;
  options.own_devices = true;
  spec.tokens = {400, 300};
  spec.experts = {4, 2};
  run("2 GPUs");
  spec.tokens = {0, 300};
  run("2 GPUs, one without tokens");
}

void PrintTimes(DeviceLayer& layer, const LayerData& data, int passes) {
  SecondsOf(layer, 3);
  std::vector<double> single;
  for (int i = 0; i < 9; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    single.push_back(SecondsOf(layer, 1));
  }
  std::sort(single.begin(), single.end());
  const double sustained = SecondsOf(layer, passes) / passes;
  const double flops = layer.flops(), link = BusiestLinkBytes(data) / (kLinkGigabytes * 1e9);
  const double burst_floor = std::max(flops / (kBurstTeraflops * 1e12), link);
  const double floor = std::max(flops / (kSustainedTeraflops * 1e12), link);
  std::printf(
      "     single %.3f ms (%.2fx of %.3f)  back to back %.3f ms, %.0f TFLOP/s (%.2fx of "
      "%.3f)\n",
      single[4] * 1e3, single[4] / burst_floor, burst_floor * 1e3, sustained * 1e3,
      flops / sustained * 1e-12, sustained / floor, floor * 1e3);
}

void RunLarge(const LayerSpec& spec, bool own_devices, const std::string& name,
              const Flags& flags) {
  const LayerData data = MakeLargeLayer(spec);
  DeviceLayerOptions options;
  options.own_devices = own_devices;
  options.forward = flags.forward;
  options.device_schedule = flags.device_schedule;
  DeviceLayer layer(data, options, ForwardKernelOf);
  std::printf("     %s\n", layer.config(0).ToString().c_str());
  Tensor expected;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Status status = RunPoisoned(layer);
    if (!status.ok()) return Check(false, name, StrCat(status));
    const Tensor out = layer.Out();
    if (repeat == 0) expected = out;
    if (!(out == expected)) return Check(false, name, "a repeat differs in bits");
  }
  const std::vector<int64_t> tokens = SampleTokens(spec.num_tokens(), 32);
  Tensor sample(DType::kBf16, 0);
  for (const int64_t token : tokens) {
    Tensor row(DType::kBf16, spec.hidden);
    std::memcpy(row.At(0), expected.At(token * spec.hidden), row.bytes.size());
    sample.Append(row);
  }
  const std::vector<double> reference = ReferenceRows(data, tokens);
  const double error = RelativeError(sample, reference);
  const double row = WorstRowError(sample, reference, spec.hidden);
  Check(error <= kTensorTolerance && row <= kRowTolerance, name, Errors(error, row));
  PrintTimes(layer, data, flags.passes);
}

void RunModels(int devices, bool traffic, const Flags& flags) {
  for (const ModelShape& shape : kModelShapes) {
    if (!flags.shape.empty() && flags.shape != shape.name) continue;
    const auto spec = [&](int ranks) {
      return traffic ? TrafficLayerSpec(shape, ranks) : ModelLayerSpec(shape, ranks);
    };
    const std::string name = StrCat(shape.name, traffic ? " traffic" : " model");
    RunLarge(spec(1), false, name + ", 1 GPU", flags);
    if (flags.virtual_ranks) {
      for (const int ranks : {2, 8}) {
        RunLarge(spec(ranks), false, StrCat(name, ", ", ranks, " virtual ranks"), flags);
      }
    }
    if (devices >= 2) RunLarge(spec(2), true, name + ", 2 GPUs", flags);
  }
}

bool ParseFlag(const std::string& argument, Flags& flags) {
  const size_t equals = argument.find('=');
  const std::string name = argument.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
  const int64_t number = std::atoll(value.c_str());
  if (name == "small") {
    flags.small = true;
  } else if (name == "model") {
    flags.model = true;
  } else if (name == "traffic") {
    flags.traffic = true;
  } else if (name == "--virtual") {
    flags.virtual_ranks = true;
  } else if (name == "--device_schedule") {
    flags.device_schedule = true;
  } else if (name == "--shape") {
    flags.shape = value;
  } else if (name == "--passes") {
    flags.passes = static_cast<int>(number);
  } else if (name == "--comm_sms") {
    flags.forward.num_comm_sms = static_cast<int32_t>(number);
  } else if (name == "--sms") {
    flags.forward.num_sms = static_cast<int32_t>(number);
  } else if (name == "--minibatch") {
    flags.forward.minibatch_rows = number;
  } else if (name == "--macrobatch") {
    flags.forward.macrobatch_rows = number;
  } else {
    return false;
  }
  return true;
}

int Main(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    if (ParseFlag(argv[i], flags)) continue;
    std::fprintf(stderr, "unknown argument %s\n", argv[i]);
    return 2;
  }
  if (!flags.small && !flags.model && !flags.traffic) flags.small = flags.model = true;
  const StatusOr<int> devices = runtime::DeviceCount();
  if (!devices.ok() || devices.value() == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  if (flags.small) RunSmall(devices.value());
  if (flags.model) RunModels(devices.value(), false, flags);
  if (flags.traffic) RunModels(devices.value(), true, flags);
  std::printf("%s\n", g_failures == 0 ? "all checks passed" : "CHECKS FAILED");
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace mok::testing

int main(int argc, char** argv) { return mok::testing::Main(argc, argv); }
