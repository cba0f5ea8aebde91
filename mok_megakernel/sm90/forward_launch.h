// Host side of the forward kernel: memory, parameters, launch. Through the host seam, so that the
// same code serves CUDA and the emulator. Nothing here waits for the GPU, and nothing depends on
// token counts but the program's number of token blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/status.h"
#include "mok_megakernel/sm90/forward_config.h"
#include "mok_megakernel/sm90/forward_params.h"
#include "mok_megakernel/sm90/pass_launch.h"

namespace mok {

// Memory of one rank that passes reuse. Zero it once (or at least its first state_bytes()).
struct ForwardScratch : PassMemory {
  BFloat16* h;         // [ring, I]
  BFloat16* y;         // [ring, H]; none of a rank alone
  BFloat16* shared_h;  // [max tokens, Is]
  BFloat16* shared_y;  // [max tokens, H]; none with fused_forward_reduce
};

class ForwardScratchLayout {
 public:
  ForwardScratchLayout(const ForwardLayerShape& shape, const ForwardConfig& config);

  size_t bytes() const { return plan_.bytes(); }
  size_t state_bytes() const { return memory_.bytes(); }
  // `base`: bytes() of device memory, 256-byte aligned.
  ForwardScratch At(void* base) const;

 private:
  PassMemoryLayout memory_;
  MemoryPlan plan_;
  size_t h_, y_, shared_h_, shared_y_;
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

using ForwardKernelInfo = PassKernelInfo;
using ForwardLaunch = PassLaunch;

// The production kernel.
ForwardKernelInfo ForwardKernelOf(ColumnOrder order);
// The one that fills ForwardParams::trace.
ForwardKernelInfo TracedForwardKernelOf(ColumnOrder order);

// Checks what the host can check (errors name the field, what was expected and what was given),
// encodes the tensor maps and fills the parameters. mode is kWhole.
StatusOr<ForwardParams> MakeForwardParams(const ForwardLayerShape& shape,
                                          const ForwardConfig& config,
                                          const ForwardKernelInfo& kernel,
                                          const ForwardArguments& arguments);

Status LaunchForward(const ForwardKernelInfo& kernel, const ForwardParams& params,
                     const ForwardLaunch& launch);

}  // namespace mok
