// Host side of the forward kernel: memory, parameters, launch. Through the host seam, so that the
// same code serves CUDA and the emulator. Nothing here waits for the GPU, and nothing depends on
// token counts but the program's number of token blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/status.h"
#include "mok_megakernel/sm90/forward_config.h"
#include "mok_megakernel/sm90/forward_params.h"

namespace mok {

// Memory of one rank that passes reuse. Zero it once (or at least its first state_bytes()).
struct ForwardScratch {
  ForwardState* state;
  uint32_t* abort_flag;
  uint64_t* counters;
  BFloat16* h;         // [ring, I]
  BFloat16* y;         // [ring, H]
  BFloat16* shared_h;  // [max tokens, Is]
  BFloat16* shared_y;  // [max tokens, H]
};

class ForwardScratchLayout {
 public:
  ForwardScratchLayout(const ForwardLayerShape& shape, const ForwardConfig& config);

  size_t bytes() const { return bytes_; }
  size_t state_bytes() const { return begin_[kH]; }
  // `base`: bytes() of device memory, 256-byte aligned.
  ForwardScratch At(void* base) const;

 private:
  enum Part { kState, kAbortFlag, kCounters, kH, kY, kSharedH, kSharedY, kNumParts };
  size_t begin_[kNumParts] = {};
  size_t bytes_ = 0;
};

// Everything of one call on one rank. Device memory; shapes as in ForwardParams.
struct ForwardArguments {
  struct Tokens {
    int64_t num_tokens = 0;
    const BFloat16* x = nullptr;          // [T, H]
    const float* topk_weight = nullptr;   // [T, K]
    const void* expert_ids = nullptr;     // [T, K]
    int32_t id_bytes = 8;                 // 4 or 8
    const float* shared_scale = nullptr;  // [T]; null: 1
    BFloat16* out = nullptr;              // [T, H]
  } tokens;
  struct Weights {
    const BFloat16* gate = nullptr;         // [E, I, H]
    const BFloat16* up = nullptr;           // [E, I, H]
    const BFloat16* down = nullptr;         // [E, H, I]
    const BFloat16* shared_gate = nullptr;  // [Is, H]
    const BFloat16* shared_up = nullptr;    // [Is, H]
    const BFloat16* shared_down = nullptr;  // [H, Is]
  } weights;
  // What the backward needs: one per live forward, the caller's.
  struct Context {
    BFloat16* ring_x = nullptr;       // [ring, H]
    BFloat16* ring_gate = nullptr;    // [ring, I]
    BFloat16* ring_up = nullptr;      // [ring, I]
    BFloat16* shared_gate = nullptr;  // [T, Is]
    BFloat16* shared_up = nullptr;    // [T, Is]
  } context;
  // Memory of every rank, as this rank sees it. This rank's own x may be the caller's tensor.
  struct Peers {
    int32_t rank = 0;
    const BFloat16* x_of_rank[kMaxExchangeRanks] = {};  // [T_r, H]
    BFloat16* routes_of_rank[kMaxExchangeRanks] = {};   // [max tokens * K, H]
    uint64_t* flags_of_rank[kMaxExchangeRanks] = {};    // RankMeeting::FlagBytes, zero at first
  } peers;
  DeviceSchedule schedule = {};
  ForwardScratch scratch = {};
  DeviceWaitRecord* record = nullptr;  // mapped host memory
  uint64_t timeout_ns = 0;             // of meetings; counters of this GPU wait twice as long
  float swiglu_limit = 0;              // > 0; +infinity: plain
};

// What a launch needs to know of a kernel.
struct ForwardKernelInfo {
  const void* address;
  size_t shared_bytes;
  int32_t tile_columns;  // of its GEMM
  uint32_t max_chunk_bytes, max_dedicated_chunk_bytes;
};

// The production kernel.
ForwardKernelInfo ForwardKernelOf(ColumnOrder order);

// Checks what the host can check (errors name the field, what was expected and what was given),
// encodes the tensor maps and fills the parameters. mode is kWhole.
StatusOr<ForwardParams> MakeForwardParams(const ForwardLayerShape& shape,
                                          const ForwardConfig& config,
                                          const ForwardKernelInfo& kernel,
                                          const ForwardArguments& arguments);

struct ForwardLaunch {
  ForwardMode mode = ForwardMode::kWhole;
  int32_t num_blocks = 1;
  int device = 0;
  void* stream = nullptr;
};
Status LaunchForward(const ForwardKernelInfo& kernel, const ForwardParams& params,
                     const ForwardLaunch& launch);

// Ok, or kDeadlineExceeded: names the missing rank if it was a meeting that ran out of time. After
// the kernel has ended.
Status CheckForwardRecord(const DeviceWaitRecord& record);

}  // namespace mok
