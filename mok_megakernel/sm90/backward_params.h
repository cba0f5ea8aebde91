// Parameters of the Hopper backward kernel, shared by host and device code. Letters as in
// forward_params.h: T tokens of this rank, H hidden, I intermediate, Is that of the shared expert,
// E local experts, K top-k; "ring" is the number of ring rows. All pointers are device memory of
// this rank unless they say otherwise; matrices are bf16 and contiguous.
#pragma once

#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/device_trace_params.h"
#include "mok_core/device/types.h"
#include "mok_core/dtype.h"
#include "mok_gemm/sm90/backward_task.h"
#include "mok_megakernel/sm90/pass_params.h"
#include "mok_schedule/device/device_schedule.h"
#include "mok_schedule/program_shape.h"

namespace mok {

// GateUp again, for rows whose g and u are lost.
struct RecomputeMatrices {
  TensorMap x;            // [rows, H] RecomputeDispatch, caller -> GateUp
  TensorMap gate_weight;  // Wg [experts, I, H], as the forward loads it
  TensorMap up_weight;    // Wu [experts, I, H]
  BFloat16* gate;         // [rows, I] -> DownGrad, which may put d_gate there
  BFloat16* up;           // [rows, I] -> DownGrad, which may put d_up there
  BFloat16* h;            // [rows, I] where w * h comes next; nobody reads h
  int32_t hidden;
  int32_t intermediate;
  float swiglu_limit;  // > 0, +infinity: plain
};

// The GEMMs of the routed experts over ring rows, or of the shared expert over tokens.
struct BackwardExperts {
  RecomputeMatrices recompute;
  DownGradMatrices down_grad;  // d_out: ReverseCombine, caller ->; d_gate, d_up, w * h, partials ->
  InputGradMatrices input_grad;         // -> d_x: ReverseDispatch, TokenReduce
  WeightGradMatrices weight_grad_down;  // -> caller; out null: not wanted
  WeightGradMatrices weight_grad_gate;
  WeightGradMatrices weight_grad_up;
};

struct BackwardParams {
  struct Shape {
    ProgramShape program;  // complete but for ring.num_row_blocks, which the schedule holds
    int32_t hidden;
    int32_t topk;
    int64_t num_tokens;  // T
    PassMode mode;
    int32_t num_comm_sms;  // blocks that only exchange; 0: a warp of every block
  } shape;

  struct Tokens {
    const void* expert_ids;        // [T, K] of id_bytes each: caller -> TokenReduce; -1: no route
    const BFloat16* routes;        // [T * K, H] peers' ReverseDispatch -> TokenReduce
    const float* d_router;         // [T * K] peers' ReverseDispatch -> TokenReduce
    const BFloat16* shared_d_x;    // [T, H] SharedInputGrad -> TokenReduce; may be d_x; has_shared:
                                   // else not read
    const float* d_scale_partial;  // [T, scale_parts] SharedDownGrad -> TokenReduce
    BFloat16* d_x;                 // [T, H] TokenReduce -> caller
    float* d_topk_weight;          // [T, K] TokenReduce -> caller; 0 where there is no route
    float* d_shared_scale;         // [T] TokenReduce -> caller; has_shared_scale: else not written
    int32_t scale_parts;           // SharedDownGrad tiles of a row
    int32_t id_bytes;              // 4 or 8
    bool has_shared;
    bool has_shared_scale;
  } tokens;

  BackwardExperts routed;  // rows: the ring; of input_grad.d_x: a window
  BackwardExperts shared;  // rows: T, one expert

  struct Exchange {
    RowExchange recompute_dispatch;  // every rank's x -> x of the ring
    RowExchange reverse_combine;     // every rank's d_out -> d_out of the ring
    RowExchange reverse_dispatch;    // d_x of the window -> every rank's routes
    ScalarPull router_weights;       // every rank's [T * K] -> [ring], with reverse_combine
    ScalarPush d_router;             // partials of the ring -> every rank's [T * K]
    RankMeeting meeting;
    int32_t d_x_rows;                // of the window: ProgramShape::d_x_slots() row blocks
    uint32_t chunk_bytes;            // of the staging of a co-resident warp
    uint32_t dedicated_chunk_bytes;  // of a warp of a block that only exchanges
  } exchange;

  DeviceSchedule schedule;  // schedule kernel -> scheduler and exchange warps
  PassSignals signals;
  DeviceTraceParams trace;  // a role per warp, see TraceKind; empty unless the kernel traces
  float one;                // 1: the scale of a shared expert that has none
};

}  // namespace mok
