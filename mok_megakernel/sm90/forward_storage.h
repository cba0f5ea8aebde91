// Shared memory of the forward kernel, its warps, and what its roles tell each other.
#pragma once

#include <cstdint>

#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_gemm/sm90/task_queue.h"
#include "mok_megakernel/sm90/forward_params.h"
#include "mok_schedule/program_view.h"

namespace mok {

// GEMM tile, and the planted bug of tests.
template <class GemmConfig, ForwardBug kBugValue = ForwardBug::kNone,
          ExchangeBug kExchangeBugValue = ExchangeBug::kNone>
struct Sm90ForwardConfig {
  using Gemm = GemmConfig;
  static constexpr ForwardBug kBug = kBugValue;
  static constexpr ExchangeBug kExchangeBug = kExchangeBugValue;

  static constexpr int kQueueDepth = 2;
  // 7 KiB: half a row of 7,168 bf16.
  static constexpr uint32_t kChunkBytes = 7168;
  static_assert(Gemm::kTileM == kRowBlock, "a row block is one tile high");
};

// Warps of a block: consumers first, then one warpgroup for everything else. In a block that only
// exchanges, even warps pull and odd ones push.
inline constexpr int kForwardWarps = 12;
inline constexpr int kForwardThreads = 32 * kForwardWarps;
inline constexpr int kProducerWarp = 8;
inline constexpr int kSchedulerWarp = 9;
inline constexpr int kPullWarp = 10;
inline constexpr int kPushWarp = 11;

// What a scheduler hands to the producer and the consumers of its block.
enum class WorkKind : int32_t { kEnd, kGemm, kSwiGluGemm, kReduce };
struct ForwardWork {
  GemmTask gemm;  // kGemm, kSwiGluGemm
  WorkKind kind;
  int32_t first_token;  // kReduce
  int32_t num_tokens;   // kReduce: may be 0
  int32_t signal;       // counter to increment once the tile is stored; -1: none
  int32_t task_kind;    // for reports
  int64_t task;
};

template <class Config>
using ForwardQueue = TaskQueue<ForwardWork, Config::kQueueDepth>;

template <class Config>
struct ForwardStorage {
  using Gemm = typename Config::Gemm;
  static constexpr uint32_t kDedicatedChunkBytes =
      sizeof(GemmStages<Gemm>) / kForwardWarps / 128 * 128;

  union {
    GemmStages<Gemm> stages;
    // A block that only exchanges has no GEMM: its stages are staging, one chunk per warp.
    unsigned char dedicated_chunks[kForwardWarps][kDedicatedChunkBytes];
  };
  alignas(128) unsigned char chunks[2][Config::kChunkBytes];  // pull, push
  GemmBarriers<Gemm> barriers;
  TaskQueueStorage<ForwardWork, Config::kQueueDepth> queue;
  uint64_t chunk_full[kForwardWarps];  // of each exchange warp: bulk load -> the warp
  ProgramView program;                 // written before the roles start
};
inline constexpr size_t kMaxBlockSharedBytes = 232448;  // 227 KiB, of sm_90

// A role's waits, and what to report while it works on a task.
MOK_DEVICE DeviceWait WaitOf(const ForwardParams& p, ForwardRole role) {
  return DeviceWait(p.signals.wait, static_cast<int32_t>(role));
}

// Counters that the launch leaves out: its meetings and reductions are separated by stream order.
MOK_DEVICE bool MeetsPeers(const ForwardParams& p) { return p.shape.mode == ForwardMode::kWhole; }

}  // namespace mok
