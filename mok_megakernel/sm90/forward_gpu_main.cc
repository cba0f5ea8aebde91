// Checks and times the forward kernel on Hopper GPUs.
//
//   forward_gpu_main [small] [model] [traffic] [--shape=kimi] [--comm_sms=0] [--minibatch=0]
//                    [--macrobatch=0] [--sms=0] [--passes=20] [--ranks=0] [--virtual]
//                    [--device_schedule]
//
// small:   the layers of the emulator's test, against float64, on one GPU (1, 2, 8 and 64 virtual
//          ranks) and on 2 (where then one does not come), 3, 4 and 8 GPUs, as far as there are as
//          many. --only=text: those cases whose name contains it; --repeats=3: passes of a case,
//          equal bit for bit.
// model, traffic: the layers of testing/model_layer.h on one GPU (1 rank), on two and on all,
//          sampled tokens against float64, repeats bit for bit, time per pass. --ranks=n: on n GPUs
//          only. --virtual: also 2 and 8 virtual ranks on one GPU. --device_schedule: every pass,
//          timed ones too, builds its schedule first. --config=key=value,...: the same layer again
//          with these choices of the configuration, any number of times; bits have to be equal.
//          --quick: no float64.
//          --trace: what consumers of rank 0 did in one pass; --trace=path: its raw trace as well
//          (last layer and configuration). All times are then those of the kernel that traces.
// The exit status is 1 if any check fails.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/gpu_main.h"
#include "mok_megakernel/sm90/testing/model_layer.h"
#include "mok_megakernel/sm90/testing/pass_timer.h"

namespace mok::testing {
namespace {

constexpr int kPoisonedRepeats = 3;
constexpr uint32_t kTraceCapacity = 1024;

struct Flags : GpuMainFlags {
  std::string trace;
  int repeats = kPoisonedRepeats;
  std::vector<std::string> configs = {""};
};

CheckPrinter g_check(44);

// One pass of all ranks.
Status RunPass(DeviceLayer& layer) {
  MOK_RETURN_IF_ERROR(layer.LaunchAll());
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  return layer.CheckRecords();
}

// The same with everything poisoned before.
Status RunPoisoned(DeviceLayer& layer) {
  layer.Poison();
  return RunPass(layer);
}

std::string Errors(double tensor, double row) {
  char text[96];
  std::snprintf(text, sizeof text, "error of the tensor %.2e, worst row %.2e", tensor, row);
  return text;
}

void CheckSmall(const LayerSpec& spec, DeviceLayerOptions options, const std::string& name,
                const Flags& flags) {
  const LayerData data(spec);
  const ReferenceResult reference = RunReference(ReferenceInputsOf(data));
  Tensor expected;
  for (const int32_t comm_sms : {0, 4}) {
    options.forward.num_comm_sms = comm_sms;
    options.device_schedule = comm_sms == 0;
    options.fused_forward_reduce = comm_sms == 0 ? 2 : 0;
    DeviceLayer layer(data, options, ForwardKernelOf);
    const std::string label = StrCat(name, ", comm SMs ", comm_sms);
    for (int repeat = 0; repeat < flags.repeats; ++repeat) {
      const Status status = repeat < kPoisonedRepeats ? RunPoisoned(layer) : RunPass(layer);
      if (!status.ok()) return g_check(false, label, StrCat(status));
      const Tensor out = layer.Out();
      if (expected.bytes.empty()) expected = out;
      if (out == expected) continue;
      return g_check(false, label, StrCat("repeat ", repeat, " differs in bits"));
    }
    const double error = RelativeError(expected, reference.out);
    const double row = WorstRowError(expected, reference.out, spec.hidden);
    g_check(error <= kTensorTolerance && row <= kRowTolerance, label, Errors(error, row));
  }
}

// A rank whose peer never comes reports it within the timeout, and its kernel ends.
void CheckMissingPeer(const LayerSpec& spec, DeviceLayerOptions options, const Flags& flags) {
  const std::string name = "2 GPUs, one does not come";
  if (name.find(flags.only) == std::string::npos) return;
  options.timeout_ns = 50'000'000;
  const LayerData data(spec);
  DeviceLayer layer(data, options, ForwardKernelOf);
  const Status before = RunPoisoned(layer);
  const auto begin = std::chrono::steady_clock::now();
  const bool ran = layer.Launch(0, PassMode::kWhole).ok() && runtime::Synchronize().ok();
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  const std::string report = StrCat(layer.CheckRecords());
  const bool named = report.find("for rank 1 at the entry of pass 2") != std::string::npos;
  g_check(before.ok() && ran && named && time.count() < 1000, name,
          StrCat(report, "; after ", time.count(), " ms"));
}

void RunSmall(int devices, const Flags& flags) {
  SmallCases cases = {SmallSizes(), 160, {}, {}};
  cases.spec.swiglu_limit = 7;
  for (int rank = 0; rank < 64; ++rank) {
    cases.tokens_of_64.push_back(rank * 37 % 50);
    cases.experts_of_64.push_back(rank % 3);
  }
  RunSmallCases(cases, devices, flags.only,
                [&](const LayerSpec& spec, const DeviceLayerOptions& options,
                    const std::string& name) { CheckSmall(spec, options, name, flags); });
  if (devices < 2) return;
  LayerSpec spec = cases.spec;
  spec.tokens = {0, 300};
  spec.experts = {4, 2};
  CheckMissingPeer(spec, {}, flags);
}

void PrintTimes(DeviceLayer& layer, PassTimer& timer, const LayerData& data, int passes) {
  const PassTimes times = MeasurePasses(timer, [&] { return layer.LaunchAll(); }, passes, 0);
  const double flops = layer.flops();
  const PassFloors floors = FloorsOf(flops, BusiestLinkBytes(data));
  std::printf(
      "     single %.3f ms, best %.3f (%.2fx of %.3f)  back to back %.3f ms, %.0f TFLOP/s (%.2fx "
      "of %.3f)\n",
      times.median, times.best, times.median / floors.burst, floors.burst, times.queued,
      flops / times.queued * 1e-9, times.queued / floors.sustained, floors.sustained);
  std::fflush(stdout);
}

// Prints what consumers did and writes num_warps, capacity, counts, events; little endian.
void Trace(DeviceLayer& layer, PassTimer& timer, const DeviceLayerOptions& options,
           const std::string& path) {
  const auto run = [&] { MOK_CHECK(timer.Run([&] { return layer.LaunchAll(); }).ok()); };
  for (int i = 0; i < kWarmUpPasses; ++i) run();
  layer.Poison();
  run();
  std::printf("%s", layer.trace().SummaryOfConsumers().c_str());
  if (path.empty()) return;
  const TraceBuffer::Trace trace = layer.trace().Read();
  std::ofstream file(path, std::ios::binary);
  const uint32_t head[2] = {static_cast<uint32_t>(trace.counts.size()), options.trace_capacity};
  const auto write = [&](const void* data, size_t bytes) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  write(head, sizeof head);
  write(trace.counts.data(), trace.counts.size() * sizeof trace.counts[0]);
  for (size_t warp = 0; warp < trace.counts.size(); ++warp) {
    const uint32_t count = std::min(trace.counts[warp], options.trace_capacity);
    write(&trace.events[warp * options.trace_capacity], count * sizeof(DeviceTraceEvent));
  }
}

bool SetOption(const std::string& name, const std::string& value, DeviceLayerOptions& options) {
  const int64_t number = std::atoll(value.c_str());
  const auto small = static_cast<int32_t>(number);
  if (SetForwardOption(name, value, options.forward)) return true;
  if (name == "panel") {
    options.output_panel_blocks = small;
  } else if (name == "gate_up_panel") {
    options.gate_up_panel_blocks = small;
  } else if (name == "exchange_tiles") {
    options.exchange_tiles = small;
  } else if (name == "reduce_tiles") {
    options.token_reduce_tiles = small;
  } else if (name == "fused_reduce") {
    options.fused_forward_reduce = small;
  } else if (name == "chunk") {
    options.chunk_bytes = static_cast<uint32_t>(number);
  } else if (name == "interval") {
    options.push_interval_ns = static_cast<uint64_t>(number);
  } else if (name == "interval_beside_pulls") {
    options.push_interval_beside_pulls_ns = static_cast<uint64_t>(number);
  } else if (name == "push_gbps") {
    options.device.push_gigabytes_per_second = static_cast<double>(number);
  } else if (name == "device_schedule") {
    options.device_schedule = value.empty() || number != 0;
  } else {
    return false;
  }
  return true;
}

// "key=value,key=value" on top of `options`.
bool SetOptions(const std::string& text, DeviceLayerOptions& options) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const size_t equals = item.find('=');
    const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
    if (!SetOption(item.substr(0, equals), value, options)) return false;
    begin = end + 1;
  }
  return true;
}

void CheckSample(const LayerData& data, const Tensor& out, const std::string& name) {
  const LayerSpec& spec = data.spec;
  const std::vector<int64_t> tokens = SampleTokens(spec.num_tokens(), 32);
  const Tensor sample = GatherRows(out, spec.hidden, tokens);
  const std::vector<double> reference = ReferenceRows(data, tokens);
  const double error = RelativeError(sample, reference);
  const double row = WorstRowError(sample, reference, spec.hidden);
  g_check(error <= kTensorTolerance && row <= kRowTolerance, name, Errors(error, row));
}

void RunLarge(const LayerSpec& spec, bool own_devices, const std::string& name,
              const Flags& flags) {
  const LayerData data = MakeLargeLayer(spec);
  Tensor expected;
  for (const std::string& config : flags.configs) {
    DeviceLayerOptions options = flags.options;
    options.own_devices = own_devices;
    MOK_CHECK(SetOptions(config, options)) << config;
    const bool traces = options.trace_capacity > 0;
    DeviceLayer layer(data, options, traces ? TracedForwardKernelOf : ForwardKernelOf);
    std::printf("     %s %s: %s\n", name.c_str(), config.c_str(),
                layer.config(0).ToString().c_str());
    for (int repeat = 0; repeat < kPoisonedRepeats; ++repeat) {
      const Status status = RunPoisoned(layer);
      if (!status.ok()) return g_check(false, name, StrCat(status));
      const Tensor out = layer.Out();
      if (expected.bytes.empty()) {
        expected = out;
        if (!flags.quick) CheckSample(data, out, name);
      }
      if (!(out == expected)) g_check(false, name, StrCat(config, ": differs in bits"));
    }
    PassTimer timer(LanesOf(layer, own_devices));
    if (traces) Trace(layer, timer, options, flags.trace);
    PrintTimes(layer, timer, data, flags.passes);
  }
}

bool ParseFlag(const std::string& name, const std::string& value, Flags& flags) {
  DeviceLayerOptions ignored;
  if (name == "--repeats") {
    flags.repeats = std::atoi(value.c_str());
  } else if (name == "--trace") {
    flags.trace = value;
    flags.options.trace_capacity = kTraceCapacity;
  } else if (name == "--config") {
    flags.configs.push_back(value);
    return SetOptions(value, ignored);
  } else {
    return name.starts_with("--") && SetOption(name.substr(2), value, flags.options);
  }
  return true;
}

}  // namespace
}  // namespace mok::testing

int main(int argc, char** argv) {
  using namespace mok::testing;
  return RunGpuMain<Flags>(argc, argv, {ParseFlag, RunSmall, nullptr, RunLarge}, g_check);
}
