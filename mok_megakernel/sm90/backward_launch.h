// Host side of the backward kernel: memory, parameters, launch. Through the host seam, so that the
// same code serves CUDA and the emulator. Nothing here waits for the GPU, and nothing depends on
// token counts but the program's number of token blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_megakernel/sm90/backward_params.h"
#include "mok_megakernel/sm90/forward_config.h"
#include "mok_megakernel/sm90/forward_launch.h"
#include "mok_megakernel/sm90/pass_launch.h"

namespace mok {

// Memory of one rank that passes reuse; need not be initialised but for its PassMemory, which is at
// the same place in the scratch of the forward. A rank's forward and backward may share PassMemory
// and flags, or each have its own; the rest may be the same memory as the forward's scratch.
struct BackwardScratch : PassMemory {
  BFloat16* d_out;          // [ring, H]
  BFloat16* weighted_h;     // [ring, I]
  BFloat16* d_x;            // [config.d_x_rows(), H]; none of a rank alone
  float* router_weight;     // [ring]
  float* d_router_partial;  // [ring, DownGrad tiles]
  // Of one expert each, in opaque order; null where no batch has more than one macrobatch.
  float* carry_gate;
  float* carry_up;
  float* carry_down;
  BFloat16* shared_weighted_h;  // [max tokens, Is]
  float* d_scale_partial;       // [max tokens, SharedDownGrad tiles]
};

class BackwardScratchLayout {
 public:
  BackwardScratchLayout(const ForwardLayerShape& shape, const ForwardConfig& config,
                        const PassKernelInfo& kernel);

  size_t bytes() const { return plan_.bytes(); }
  size_t state_bytes() const { return memory_.bytes(); }
  // `base`: bytes() of device memory, 256-byte aligned.
  BackwardScratch At(void* base) const;

 private:
  enum Part {
    kDOut,
    kWeightedH,
    kDX,
    kRouterWeight,
    kDRouterPartial,
    kCarryGate,
    kCarryUp,
    kCarryDown,
    kSharedWeightedH,
    kDScalePartial,
    kNumParts
  };

  PassMemoryLayout memory_;
  MemoryPlan plan_;
  size_t begin_[kNumParts] = {};
  bool carries_;
};

// Everything of one call on one rank. Device memory.
struct BackwardArguments {
  struct Tokens {
    int64_t num_tokens = 0;
    const BFloat16* x = nullptr;          // [T, H] as given to the forward
    const BFloat16* d_out = nullptr;      // [T, H]
    const void* expert_ids = nullptr;     // [T, K]
    int32_t id_bytes = 8;                 // 4 or 8
    const float* shared_scale = nullptr;  // [T]; null: 1
    BFloat16* d_x = nullptr;              // [T, H] written; overlaps no input
    float* d_topk_weight = nullptr;       // [T, K] written; 0 where there is no route
    float* d_shared_scale = nullptr;      // [T] written; null exactly when shared_scale is
  } tokens;
  ForwardArguments::Weights weights;
  // As the forward left it; overwritten: another backward has to compute everything again.
  ForwardArguments::Context context;
  // Memory for the gradients of gate and up, shapes as there. Null: in their place. With it, a
  // batch of one macrobatch leaves the context as it was, unless kept_macrobatches is 0: for
  // programs that measure a backward again and again on one forward.
  struct GateUpGrads {
    BFloat16* gate = nullptr;
    BFloat16* up = nullptr;
    BFloat16* shared_gate = nullptr;
    BFloat16* shared_up = nullptr;
  } d_gate_up;
  // 1: the context is the forward's; 0: its contents are lost, everything is computed again from x.
  int32_t kept_macrobatches = 1;
  // Shapes as the weights. A null pointer skips the gradient of that weight. Experts without rows:
  // exact zeros, or, when accumulating, the bits that are there.
  struct WeightGrads {
    void* gate = nullptr;
    void* up = nullptr;
    void* down = nullptr;
    DType dtype = DType::kBf16;  // kBf16 or kFp32
    bool accumulate = false;     // added to what is there: in fp32, rounded once
  };
  WeightGrads d_routed, d_shared;
  // Memory of every rank, as this rank sees it. This rank's own inputs may be the caller's tensors.
  struct Peers {
    int32_t rank = 0;
    const BFloat16* x_of_rank[kMaxExchangeRanks] = {};         // [T_r, H]
    const BFloat16* d_out_of_rank[kMaxExchangeRanks] = {};     // [T_r, H]
    const float* topk_weight_of_rank[kMaxExchangeRanks] = {};  // [T_r * K]
    BFloat16* routes_of_rank[kMaxExchangeRanks] = {};          // [max tokens * K, H]
    float* d_router_of_rank[kMaxExchangeRanks] = {};           // [max tokens * K]
    uint64_t* flags_of_rank[kMaxExchangeRanks] = {};  // RankMeeting::FlagBytes, zero at first
  } peers;
  DeviceSchedule schedule = {};
  BackwardScratch scratch = {};
  DeviceWaitRecord* record = nullptr;  // mapped host memory
  uint64_t timeout_ns = 0;             // of meetings; counters of this GPU wait twice as long
  float swiglu_limit = 0;              // > 0; +infinity: plain
};

// The production kernel. config.order of the forward, whose GateUp it repeats.
PassKernelInfo BackwardKernelOf(ColumnOrder order);
// The one that fills BackwardParams::trace.
PassKernelInfo TracedBackwardKernelOf(ColumnOrder order);

// Checks what the host can check (errors name the field, what was expected and what was given),
// encodes the tensor maps and fills the parameters. mode is kWhole. shape, config: the forward's.
StatusOr<BackwardParams> MakeBackwardParams(const ForwardLayerShape& shape,
                                            const ForwardConfig& config,
                                            const PassKernelInfo& kernel,
                                            const BackwardArguments& arguments);

Status LaunchBackward(const PassKernelInfo& kernel, const BackwardParams& params,
                      const PassLaunch& launch);

}  // namespace mok
