// How a forward runs on a Hopper GPU: every choice that is not the caller's, made by one pure
// function.
#pragma once

#include <cstdint>
#include <string>

#include "mok_core/status.h"
#include "mok_gemm/sm90/gemm_config.h"

namespace mok {

// What a configuration depends on. The same on every call of a layer, whatever the batch.
struct ForwardLayerShape {
  int64_t max_tokens = 0;           // of any rank
  int64_t hidden = 0;               // H, a multiple of 8
  int64_t intermediate = 0;         // I, a multiple of 8
  int64_t shared_intermediate = 0;  // Is, a multiple of 8; 0: no shared expert
  int32_t topk = 1;
  int32_t num_experts = 0;        // of all ranks
  int32_t num_local_experts = 0;  // of this rank
  int32_t ep_size = 1;
};

struct HopperDevice {
  int32_t num_sms = 132;
  // What the SMs may push through the links of this GPU. 95 % of the measured 357 GB/s: above it
  // pushes fill the queues that the GEMM's loads need (prototype of two H200).
  double push_gigabytes_per_second = 340;
};

// The caller's wishes; 0 stands for the heuristic.
struct ForwardOptions {
  int32_t num_sms = 0;       // blocks of the grid, at most those of the device
  int32_t num_comm_sms = 0;  // 0: exchange warps beside the GEMM
  int64_t minibatch_rows = 0;
  int64_t macrobatch_rows = 0;
};

struct ForwardConfig {
  ColumnOrder order = ColumnOrder::kNatural;
  int32_t num_blocks = 1;
  int32_t num_comm_sms = 0;
  int64_t minibatch_blocks = 1;
  int64_t macrobatch_blocks = 1;      // of the ring
  int32_t output_panel_blocks = 0;    // see ProgramShape
  int32_t gate_up_panel_blocks = 0;   // likewise
  int64_t d_x_window_blocks = 1;      // likewise; here never 0
  bool one_macrobatch = false;        // whatever the routing: the ring has room for all rows
  int32_t exchange_tiles = 1;         // per row block
  int32_t token_reduce_tiles = 1;     // per token block
  int32_t fused_forward_reduce = 0;   // ProgramShape::fused_reduce_width of the forward
  int32_t fused_backward_reduce = 0;  // and of the backward
  uint32_t chunk_bytes = 16;          // a row is cut into equal chunks of at most 8 KiB
  uint32_t dedicated_chunk_bytes = 16;
  uint64_t push_interval_ns = 0;  // between two remote chunks of one warp; 0: not paced
  uint64_t push_interval_beside_pulls_ns = 0;  // see RowExchange

  int64_t ring_rows() const;
  int64_t d_x_rows() const;  // of the backward's window
  std::string ToString() const;
  friend bool operator==(const ForwardConfig&, const ForwardConfig&) = default;
};

// Pure. kInvalidArgument names the field of shape or options, its value and what is allowed.
StatusOr<ForwardConfig> SelectForwardConfig(const ForwardLayerShape& shape,
                                            const HopperDevice& device,
                                            const ForwardOptions& options);

}  // namespace mok
