// What the programs that check and time a pass on GPUs have in common: flags, the small layers, the
// layers of real models, the measurement.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/pass_timer.h"

namespace mok::testing {

inline constexpr double kTensorTolerance = 4e-3;
inline constexpr double kRowTolerance = 2e-2;

// Prints a line for each check and counts those that fail.
class CheckPrinter {
 public:
  explicit CheckPrinter(int label_width) : label_width_(label_width) {}
  void operator()(bool ok, const std::string& label, const std::string& detail);
  int num_failures() const { return num_failures_; }

 private:
  int label_width_;
  int num_failures_ = 0;
};

// Flags that all programs know.
struct GpuMainFlags {
  bool small = false, medium = false, model = false, traffic = false;
  bool virtual_ranks = false;  // model, traffic: also 2 and 8 ranks on one GPU
  bool quick = false;          // ... no float64
  int ranks = 0;               // ... 1: on one GPU only; n: on n GPUs only
  std::string shape;           // ... only of this name
  int passes = 20;             // in a queue that is timed
  std::string only;            // small: cases whose name contains it
  DeviceLayerOptions options;  // model, traffic
};

// Sets what --comm_sms, --sms, --minibatch and --macrobatch stand for. False: another name.
bool SetForwardOption(const std::string& name, const std::string& value, ForwardOptions& options);

// A layer, whether each rank has a GPU of its own, and what to call it.
using LargeRun =
    std::function<void(const LayerSpec& spec, bool own_devices, const std::string& name)>;

// A program. Flags: GpuMainFlags and more.
template <class Flags>
struct GpuProgram {
  // Takes a flag of its own, before those that all programs know. False: it is none.
  bool (*parse)(const std::string& name, const std::string& value, Flags& flags);
  void (*small)(int devices, const Flags& flags);
  void (*medium)(int devices, const Flags& flags);  // may be null
  void (*large)(const LayerSpec& spec, bool own_devices, const std::string& name,
                const Flags& flags);
};

namespace gpu_main_internal {

// GpuProgram with its flags bound.
struct BoundProgram {
  std::function<bool(const std::string& name, const std::string& value)> parse;
  std::function<void(int devices)> small, medium;
  LargeRun large;
};
int Run(int argc, char** argv, const BoundProgram& program, GpuMainFlags& flags,
        const CheckPrinter& check);

}  // namespace gpu_main_internal

// Parses and runs what the flags say, or everything but `traffic`. Returns the exit status.
template <class Flags>
int RunGpuMain(int argc, char** argv, const GpuProgram<Flags>& program, const CheckPrinter& check) {
  Flags flags;
  gpu_main_internal::BoundProgram bound;
  bound.parse = [&](const std::string& name, const std::string& value) {
    return program.parse(name, value, flags);
  };
  bound.small = [&](int devices) { program.small(devices, flags); };
  if (program.medium != nullptr) {
    bound.medium = [&](int devices) { program.medium(devices, flags); };
  }
  bound.large = [&](const LayerSpec& spec, bool own_devices, const std::string& name) {
    program.large(spec, own_devices, name, flags);
  };
  return gpu_main_internal::Run(argc, argv, bound, flags, check);
}

// The small layers: these sizes on 1, 2, 8 and 64 ranks that share a GPU and, as far as there are
// as many, on 2, 3, 4 and 8 GPUs.
struct SmallCases {
  LayerSpec spec;  // but for tokens and experts
  int64_t permuted_intermediate;
  std::vector<int64_t> tokens_of_64;
  std::vector<int32_t> experts_of_64;
};
// Sizes that are no multiple of any tile, with a shared expert that is scaled.
LayerSpec SmallSizes();
using SmallRun = std::function<void(const LayerSpec& spec, const DeviceLayerOptions& options,
                                    const std::string& name)>;
// Runs the cases whose name contains `only`.
void RunSmallCases(const SmallCases& cases, int devices, const std::string& only,
                   const SmallRun& run);

// Rows of a [T, columns] tensor.
Tensor GatherRows(const Tensor& tensor, int64_t columns, const std::vector<int64_t>& rows);

// The streams of the layer's ranks.
std::vector<PassTimer::Lane> LanesOf(const DeviceLayer& layer, bool own_devices);

// Milliseconds.
struct PassTimes {
  double median, best;  // of single passes, the protocol of DESIGN section 11
  double queued;        // mean of a queue of passes
};
// pause_ms: before each of the two; a GPU that has drawn its power limit for most of a second is
// slowed down.
PassTimes MeasurePasses(PassTimer& timer, const std::function<Status()>& launch, int passes,
                        int pause_ms);
inline constexpr int kWarmUpPasses = 6;

// The least milliseconds of so many operations of the busiest rank and bytes of the busiest link
// direction, at the rates of DESIGN section 11.
struct PassFloors {
  double burst, sustained;
};
PassFloors FloorsOf(double flops, double link_bytes);

}  // namespace mok::testing
