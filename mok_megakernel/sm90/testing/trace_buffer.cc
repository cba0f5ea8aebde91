#include "mok_megakernel/sm90/testing/trace_buffer.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "mok_core/device/runtime.h"
#include "mok_megakernel/sm90/pass_params.h"
#include "mok_schedule/task.h"

namespace mok::testing {
namespace {

struct KindTimes {
  int64_t count = 0;
  std::array<double, kNumTracePhases> microseconds = {}, kilocycles = {};
};

// What consumers did, from their events in order.
class ConsumerSummary {
 public:
  // The next event of a warp; `before`: the warp's last one, or null.
  void Add(const DeviceTraceEvent& event, const DeviceTraceEvent* before) {
    const auto phase = static_cast<size_t>(event.kind % kNumTracePhases);
    KindTimes& kind = kinds_[static_cast<size_t>(event.kind / kNumTracePhases)];
    const double time = static_cast<double>(event.end_ns - event.begin_ns) * 1e-3;
    kind.microseconds[phase] += time;
    if (phase == static_cast<size_t>(TracePhase::kWait)) {
      waited_ += time;
      ++kind.count;
    }
    first_ = std::min(first_, event.begin_ns);
    last_ = std::max(last_, event.end_ns);
    if (before == nullptr) return;
    const double cycles = static_cast<double>(event.end_cycles - before->end_cycles);
    kind.kilocycles[phase] += cycles * 1e-3;
    cycles_ += cycles;
    nanoseconds_ += static_cast<double>(event.end_ns - before->end_ns);
  }

  std::string Text(double num_warps) const {
    std::string text;
    for (int i = 0; i < kNumTaskKinds; ++i) {
      const KindTimes& kind = kinds_[static_cast<size_t>(i)];
      if (kind.count > 0) text += Line(static_cast<TaskKind>(i), kind);
    }
    if (last_ == 0) return text;
    char line[160];
    std::snprintf(line, sizeof line, "%.1f us, of which waiting %.1f; %.0f kcycles at %.3f GHz\n",
                  static_cast<double>(last_ - first_) * 1e-3, waited_ / num_warps,
                  cycles_ / num_warps * 1e-3, cycles_ / std::max(nanoseconds_, 1.0));
    return text + line;
  }

 private:
  static std::string Line(TaskKind kind, const KindTimes& times) {
    const auto count = static_cast<double>(times.count);
    const auto& us = times.microseconds;
    const auto& cycles = times.kilocycles;
    char line[200];
    std::snprintf(line, sizeof line,
                  "%-24s %6lld tasks: wait %7.2f, work %7.2f, store %6.2f us;  %7.2f, %7.2f, %6.2f "
                  "kcycles\n",
                  TaskKindName(kind), static_cast<long long>(times.count), us[0] / count,
                  us[1] / count, us[2] / count, cycles[0] / count, cycles[1] / count,
                  cycles[2] / count);
    return line;
  }

  std::array<KindTimes, kNumTaskKinds> kinds_;
  uint64_t first_ = UINT64_MAX, last_ = 0;
  double waited_ = 0, cycles_ = 0, nanoseconds_ = 0;
};

}  // namespace

TraceBuffer::TraceBuffer(int device, int num_blocks, uint32_t capacity)
    : num_warps_(static_cast<size_t>(num_blocks) * kTraceRoles) {
  const auto warps = static_cast<int64_t>(num_warps_);
  params_.events = static_cast<DeviceTraceEvent*>(memory_.Allocate(
      device, warps * capacity * static_cast<int64_t>(sizeof(DeviceTraceEvent)), "trace"));
  params_.counts = static_cast<uint32_t*>(memory_.AllocateZeroed(
      device, warps * static_cast<int64_t>(sizeof(uint32_t)), "trace counts"));
  params_.capacity = capacity;
  params_.num_roles = kTraceRoles;
}

void TraceBuffer::Clear() const {
  MustSucceed(runtime::Fill(params_.counts, 0, num_warps_ * sizeof(uint32_t)));
}

TraceBuffer::Trace TraceBuffer::Read() const {
  Trace trace;
  trace.events.resize(num_warps_ * params_.capacity);
  trace.counts.resize(num_warps_);
  MustSucceed(runtime::CopyToHost(trace.events.data(), params_.events,
                                  trace.events.size() * sizeof(DeviceTraceEvent)));
  MustSucceed(runtime::CopyToHost(trace.counts.data(), params_.counts,
                                  trace.counts.size() * sizeof(uint32_t)));
  return trace;
}

std::string TraceBuffer::SummaryOfConsumers() const {
  const auto [events, counts] = Read();
  ConsumerSummary summary;
  for (size_t warp = 0; warp < num_warps_; warp += kTraceRoles) {
    const DeviceTraceEvent* of_warp = &events[warp * params_.capacity];
    const uint32_t count = std::min(counts[warp], params_.capacity);
    for (uint32_t i = 0; i < count; ++i) {
      summary.Add(of_warp[i], i > 0 ? &of_warp[i - 1] : nullptr);
    }
  }
  return summary.Text(static_cast<double>(num_warps_) / kTraceRoles);
}

}  // namespace mok::testing
