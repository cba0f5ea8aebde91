// Shared memory of a pass's kernel, its warps, and what its roles tell each other. Templates over
// the pass's Config (Sm90PassConfig) and parameters (ForwardParams, BackwardParams).
#pragma once

#include <cstdint>

#include "mok_comm/sm90/row_mover.h"
#include "mok_core/device/device.h"
#include "mok_core/device/device_trace.h"
#include "mok_core/device/wait.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_gemm/sm90/task_queue.h"
#include "mok_megakernel/sm90/pass_params.h"
#include "mok_schedule/program_view.h"

namespace mok {

// GEMM tile, what the scheduler hands out, whether the roles trace what they do, and the planted
// bug of tests. Tracing costs 1 to 2 % also where it is switched off at run time: kernels that ship
// do not hold it.
template <class GemmConfig, class WorkType, PassBug kBugValue = PassBug::kNone,
          ExchangeBug kExchangeBugValue = ExchangeBug::kNone, bool kTracesValue = false>
struct Sm90PassConfig {
  using Gemm = GemmConfig;
  // Plain data with the pass as kPass; `kind`, of which kEnd ends the roles; `signal`, the counter
  // to increment once the tile is stored, or -1; `late_counter`, which its epilogue awaits, or
  // null; `task_kind` and `task` for reports.
  using Work = WorkType;
  static constexpr Pass kPass = WorkType::kPass;
  static constexpr PassBug kBug = kBugValue;
  static constexpr ExchangeBug kExchangeBug = kExchangeBugValue;
  static constexpr bool kTraces = kTracesValue;

  static constexpr int kQueueDepth = 2;
  // A row of 4,096 bf16.
  static constexpr uint32_t kChunkBytes = 8192;
  static_assert(Gemm::kTileM == kRowBlock, "a row block is one tile high");
};

// Warps of a block: consumers first, then one warpgroup for everything else. In a block that only
// exchanges, even warps pull and odd ones push.
inline constexpr int kPassWarps = 12;
inline constexpr int kPassThreads = 32 * kPassWarps;
inline constexpr int kProducerWarp = 8;
inline constexpr int kSchedulerWarp = 9;
inline constexpr int kPullWarp = 10;
inline constexpr int kPushWarp = 11;

template <class Config>
using PassQueue = TaskQueue<typename Config::Work, Config::kQueueDepth>;

template <class Config>
struct PassStorage {
  using Gemm = typename Config::Gemm;
  static constexpr uint32_t kDedicatedChunkBytes =
      sizeof(GemmStages<Gemm>) / (kPassWarps * kStagingChunks) / 128 * 128;

  union {
    GemmStages<Gemm> stages;
    // A block that only exchanges has no GEMM: its stages are the staging of its warps.
    unsigned char dedicated_chunks[kPassWarps][kStagingChunks][kDedicatedChunkBytes];
  };
  alignas(128) unsigned char chunks[2][kStagingChunks][Config::kChunkBytes];  // pull, push
  GemmBarriers<Gemm> barriers;
  TaskQueueStorage<typename Config::Work, Config::kQueueDepth> queue;
  uint64_t chunk_full[kPassWarps][kStagingChunks];  // of each exchange warp: bulk load -> the warp
  uint64_t pulling;                                 // pull warp -> push warp, see RowMover
  ProgramView program;                              // written before the roles start
};
inline constexpr size_t kMaxBlockSharedBytes = 232448;  // 227 KiB, of sm_90

// A role's waits, and what to report while it works on a task.
template <class Params>
MOK_DEVICE DeviceWait WaitOf(const Params& p, PassRole role) {
  return DeviceWait(p.signals.wait, static_cast<int32_t>(role));
}

// One warp's trace; used by its first lane.
template <class Config, bool kTraces = Config::kTraces>
class PassTracer {
 public:
  explicit MOK_DEVICE PassTracer(const DeviceTraceParams& trace)
      : tracer_(trace, BlockIndex().x, ThreadIndex().x / 32) {}

  MOK_DEVICE uint64_t Now() const { return tracer_.Now(); }
  // From begin_ns until now; returns now.
  MOK_DEVICE uint64_t Record(int32_t task_kind, TracePhase phase, int64_t task, uint64_t begin_ns) {
    tracer_.Record(TraceKind(task_kind, phase), static_cast<int32_t>(task), begin_ns);
    return Now();
  }

 private:
  DeviceTracer tracer_;
};
template <class Config>
class PassTracer<Config, false> {
 public:
  explicit MOK_DEVICE PassTracer(const DeviceTraceParams& /*trace*/) {}
  MOK_DEVICE uint64_t Now() const { return 0; }
  MOK_DEVICE uint64_t Record(int32_t /*task_kind*/, TracePhase /*phase*/, int64_t /*task*/,
                             uint64_t /*begin_ns*/) {
    return 0;
  }
};

// Whether the pass does anything. If not, as all ranks that run it find, no rank has rows, and one
// may have heard of the error and not run it (RefusalState).
template <class Params>
MOK_DEVICE bool PassTakesPart(const Params& p) {
  return TakesPart(*p.schedule.result, p.signals.state->refusals);
}

// Whether the ranks meet in this launch. Not where stream order stands in for it.
template <class Config, class Params>
MOK_DEVICE bool MeetsPeers(const Params& p) {
  return p.shape.mode == PassMode::kWhole &&
         (PassTakesPart(p) || Config::kBug == PassBug::kLostMeets);
}

}  // namespace mok
