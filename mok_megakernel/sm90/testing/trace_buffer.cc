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
  std::array<double, kNumTracePhases> microseconds = {};
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
  std::array<KindTimes, kNumTaskKinds> kinds;
  uint64_t first = UINT64_MAX, last = 0;
  double waited = 0;
  for (size_t warp = 0; warp < num_warps_; warp += kTraceRoles) {
    const uint32_t count = std::min(counts[warp], params_.capacity);
    for (uint32_t i = 0; i < count; ++i) {
      const DeviceTraceEvent& event = events[warp * params_.capacity + i];
      const int phase = event.kind % kNumTracePhases;
      KindTimes& kind = kinds[static_cast<size_t>(event.kind / kNumTracePhases)];
      const double time = static_cast<double>(event.end_ns - event.begin_ns) * 1e-3;
      kind.microseconds[static_cast<size_t>(phase)] += time;
      const bool waits = phase == static_cast<int>(TracePhase::kWait);
      if (waits) waited += time;
      if (waits) ++kind.count;
      first = std::min(first, event.begin_ns);
      last = std::max(last, event.end_ns);
    }
  }
  std::string text;
  char line[160];
  for (int i = 0; i < kNumTaskKinds; ++i) {
    const KindTimes& kind = kinds[static_cast<size_t>(i)];
    if (kind.count == 0) continue;
    const auto count = static_cast<double>(kind.count);
    std::snprintf(line, sizeof line, "%-24s %6lld tasks: wait %7.2f, work %7.2f, store %6.2f us\n",
                  TaskKindName(static_cast<TaskKind>(i)), static_cast<long long>(kind.count),
                  kind.microseconds[0] / count, kind.microseconds[1] / count,
                  kind.microseconds[2] / count);
    text += line;
  }
  if (last == 0) return text;
  const double blocks = static_cast<double>(num_warps_) / kTraceRoles;
  const double total = static_cast<double>(last - first) * 1e-3;
  std::snprintf(line, sizeof line, "%.1f us, of which waiting %.1f\n", total, waited / blocks);
  return text + line;
}

}  // namespace mok::testing
