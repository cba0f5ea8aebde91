#include "mok_megakernel/sm90/testing/gpu_main.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "mok_core/device/runtime.h"
#include "mok_megakernel/sm90/testing/model_layer.h"

namespace mok::testing {
namespace {

using gpu_main_internal::BoundProgram;

constexpr double kBurstTeraflops = 786, kSustainedTeraflops = 678;
constexpr double kLinkGigabytes = 372;
constexpr int kIterations = 30;

// Name and value of "name=value".
std::pair<std::string, std::string> Split(const std::string& argument) {
  const size_t equals = argument.find('=');
  return {argument.substr(0, equals),
          equals == std::string::npos ? "" : argument.substr(equals + 1)};
}

bool ParseCommonFlag(const std::string& name, const std::string& value, const BoundProgram& program,
                     GpuMainFlags& flags) {
  const struct {
    const char* name;
    bool* flag;
  } kSwitches[] = {{"small", &flags.small},
                   {"model", &flags.model},
                   {"traffic", &flags.traffic},
                   {"--virtual", &flags.virtual_ranks},
                   {"--quick", &flags.quick}};
  for (const auto& entry : kSwitches) {
    if (name == entry.name) return *entry.flag = true;
  }
  if (name == "medium" && program.medium) return flags.medium = true;
  if (name == "--shape") {
    flags.shape = value;
  } else if (name == "--only") {
    flags.only = value;
  } else if (name == "--ranks") {
    flags.ranks = std::atoi(value.c_str());
  } else if (name == "--passes") {
    flags.passes = std::atoi(value.c_str());
  } else {
    return name.starts_with("--") && SetForwardOption(name.substr(2), value, flags.options.forward);
  }
  return true;
}

// How many ranks have a GPU each: as many as asked for, else two and all.
std::vector<int> RanksOnDevices(int devices, int asked) {
  if (asked > 1) return asked <= devices ? std::vector<int>{asked} : std::vector<int>{};
  if (asked == 1 || devices < 2) return {};
  return devices == 2 ? std::vector<int>{2} : std::vector<int>{2, devices};
}

void RunModels(int devices, bool traffic, const GpuMainFlags& flags, const LargeRun& run) {
  for (const ModelShape& shape : kModelShapes) {
    if (!flags.shape.empty() && flags.shape != shape.name) continue;
    const auto spec = [&](int ranks) {
      return traffic ? TrafficLayerSpec(shape, ranks) : ModelLayerSpec(shape, ranks);
    };
    const std::string name = StrCat(shape.name, traffic ? " traffic" : " model");
    if (flags.ranks <= 1) run(spec(1), false, name + ", 1 GPU");
    if (flags.virtual_ranks) {
      for (const int ranks : {2, 8}) {
        run(spec(ranks), false, StrCat(name, ", ", ranks, " virtual ranks"));
      }
    }
    for (const int ranks : RanksOnDevices(devices, flags.ranks)) {
      run(spec(ranks), true, StrCat(name, ", ", ranks, " GPUs"));
    }
  }
}

}  // namespace

void CheckPrinter::operator()(bool ok, const std::string& label, const std::string& detail) {
  if (!ok) ++num_failures_;
  std::printf("%s %-*s %s\n", ok ? "ok  " : "FAIL", label_width_, label.c_str(), detail.c_str());
  std::fflush(stdout);
}

bool SetForwardOption(const std::string& name, const std::string& value, ForwardOptions& options) {
  const int64_t number = std::atoll(value.c_str());
  if (name == "comm_sms") {
    options.num_comm_sms = static_cast<int32_t>(number);
  } else if (name == "sms") {
    options.num_sms = static_cast<int32_t>(number);
  } else if (name == "minibatch") {
    options.minibatch_rows = number;
  } else if (name == "macrobatch") {
    options.macrobatch_rows = number;
  } else {
    return false;
  }
  return true;
}

int gpu_main_internal::Run(int argc, char** argv, const BoundProgram& program, GpuMainFlags& flags,
                           const CheckPrinter& check) {
  for (int i = 1; i < argc; ++i) {
    const auto [name, value] = Split(argv[i]);
    if (program.parse(name, value) || ParseCommonFlag(name, value, program, flags)) continue;
    std::fprintf(stderr, "unknown argument %s\n", argv[i]);
    return 2;
  }
  if (!flags.small && !flags.medium && !flags.model && !flags.traffic) {
    flags.small = flags.model = true;
    flags.medium = program.medium != nullptr;
  }
  const StatusOr<int> devices = runtime::DeviceCount();
  if (!devices.ok() || devices.value() == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  if (flags.small) program.small(devices.value());
  if (flags.medium) program.medium(devices.value());
  if (flags.model) RunModels(devices.value(), false, flags, program.large);
  if (flags.traffic) RunModels(devices.value(), true, flags, program.large);
  const bool ok = check.num_failures() == 0;
  std::printf("%s\n", ok ? "all checks passed" : "CHECKS FAILED");
  return ok ? 0 : 1;
}

LayerSpec SmallSizes() {
  LayerSpec spec;
  spec.topk = 3;
  spec.hidden = 328;
  spec.intermediate = 136;
  spec.shared_intermediate = 72;
  spec.shared_scale = true;
  return spec;
}

void RunSmallCases(const SmallCases& cases, int devices, const std::string& only,
                   const SmallRun& run) {
  const std::vector<int64_t> kTokensOf8 = {100, 0, 3, 250, 17, 128, 129, 73};
  const std::vector<int32_t> kExpertsOf8 = {2, 0, 1, 1, 0, 1, 1, 0};
  DeviceLayerOptions plain;
  plain.own_devices = false;
  const auto run_on = [&](const std::string& ranks, const std::vector<int64_t>& tokens,
                          const std::vector<int32_t>& experts) {
    const auto run_case = [&](LayerSpec spec, const DeviceLayerOptions& options,
                              const std::string& name) {
      spec.tokens = tokens;
      spec.experts = experts;
      if (name.find(only) != std::string::npos) run(spec, options, name);
    };
    run_case(cases.spec, plain, ranks);
    LayerSpec permuted = cases.spec;
    permuted.hidden = 320;
    permuted.intermediate = permuted.shared_intermediate = cases.permuted_intermediate;
    run_case(permuted, plain, ranks + ", permuted");
    DeviceLayerOptions several = plain;
    several.forward.minibatch_rows = 128;
    several.forward.macrobatch_rows = 256;
    run_case(cases.spec, several, ranks + ", several macrobatches");
  };
  run_on("one rank", {700}, {6});
  run_on("2 virtual ranks", {400, 300}, {4, 2});
  run_on("8 virtual ranks", kTokensOf8, kExpertsOf8);
  run_on("64 virtual ranks", cases.tokens_of_64, cases.experts_of_64);
  if (devices < 2) return;
  plain.own_devices = true;
  run_on("2 GPUs", {400, 300}, {4, 2});
  run_on("2 GPUs, one without tokens", {0, 300}, {4, 2});
  if (devices >= 3) run_on("3 GPUs, few tokens", {0, 5, 17}, {1, 0, 5});
  if (devices >= 4) run_on("4 GPUs", {250, 0, 133, 317}, {2, 1, 0, 3});
  if (devices >= 8) run_on("8 GPUs", kTokensOf8, kExpertsOf8);
}

Tensor GatherRows(const Tensor& tensor, int64_t columns, const std::vector<int64_t>& rows) {
  Tensor gathered(tensor.dtype, 0);
  for (const int64_t row : rows) {
    Tensor one(tensor.dtype, columns);
    std::memcpy(one.At(0), tensor.At(row * columns), one.bytes.size());
    gathered.Append(one);
  }
  return gathered;
}

std::vector<PassTimer::Lane> LanesOf(const DeviceLayer& layer, bool own_devices) {
  std::vector<PassTimer::Lane> lanes;
  for (int rank = 0; rank < (own_devices ? layer.num_ranks() : 1); ++rank) {
    lanes.push_back({rank, layer.stream(rank)});
  }
  return lanes;
}

PassTimes MeasurePasses(PassTimer& timer, const std::function<Status()>& launch, int passes,
                        int pause_ms) {
  const auto milliseconds = [&](int count) {
    StatusOr<double> time = timer.Run([&] {
      for (int pass = 0; pass < count; ++pass) MOK_RETURN_IF_ERROR(launch());
      return OkStatus();
    });
    MOK_CHECK(time.ok()) << time.status();
    return time.value() / count;
  };
  const auto pause = [&] { std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms)); };
  pause();
  std::vector<double> single;
  for (int i = 0; i < kWarmUpPasses + kIterations; ++i) {
    const double time = milliseconds(1);
    if (i >= kWarmUpPasses) single.push_back(time);
  }
  std::sort(single.begin(), single.end());
  pause();
  return {single[single.size() / 2], single[0], milliseconds(passes)};
}

PassFloors FloorsOf(double flops, double link_bytes) {
  const double link = link_bytes / (kLinkGigabytes * 1e6);
  return {std::max(flops / (kBurstTeraflops * 1e9), link),
          std::max(flops / (kSustainedTeraflops * 1e9), link)};
}

}  // namespace mok::testing
