// Parameters of the Hopper forward kernel, shared by host and device code. Letters as in mok.h: T
// tokens of this rank, H hidden, I intermediate, Is that of the shared expert, E local experts, K
// top-k; "ring" is the number of ring rows. All pointers are device memory of this rank unless they
// say otherwise; matrices are bf16 and contiguous.
#pragma once

#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/device_trace_params.h"
#include "mok_core/device/types.h"
#include "mok_core/dtype.h"
#include "mok_megakernel/sm90/pass_params.h"
#include "mok_schedule/device/device_schedule.h"
#include "mok_schedule/program_shape.h"

namespace mok {

struct ForwardParams {
  struct Shape {
    ProgramShape program;  // complete but for ring.num_row_blocks, which the schedule holds
    int32_t hidden;
    int32_t intermediate;
    int32_t shared_intermediate;  // 0: no shared expert
    int32_t topk;
    int64_t num_tokens;  // T
    float swiglu_limit;  // > 0, +infinity: plain
    PassMode mode;
    int32_t num_comm_sms;  // blocks that only exchange; 0: a warp of every block
  } shape;

  struct Tokens {
    TensorMap x;                // [T, H] caller -> SharedGateUp
    const float* topk_weight;   // [T, K] caller -> TokenReduce, or SharedDown if that is fused
    const void* expert_ids;     // [T, K] of id_bytes each: caller -> TokenReduce; -1: no route
    const float* shared_scale;  // [T] caller -> TokenReduce; has_shared_scale: else not read
    const BFloat16* routes;     // [T * K, H] own Down, peers' Combine -> TokenReduce
    BFloat16* out;              // [T, H] TokenReduce -> caller
    int32_t id_bytes;           // 4 or 8
    bool has_shared_scale;
  } tokens;

  struct Weights {          // caller -> the GEMM of the same name
    TensorMap gate;         // [E, I, H]
    TensorMap up;           // [E, I, H]
    TensorMap down;         // [E, H, I]
    TensorMap shared_gate;  // [1, Is, H]
    TensorMap shared_up;    // [1, Is, H]
    TensorMap shared_down;  // [1, H, Is]
  } weights;

  struct Ring {
    TensorMap x;           // [ring, H] Dispatch -> GateUp
    TensorMap activation;  // [ring, I] GateUp -> Down
    BFloat16* gate;        // [ring, I] GateUp -> backward
    BFloat16* up;          // [ring, I] GateUp -> backward
    BFloat16* h;           // [ring, I] what `activation` maps
    BFloat16* y;           // [ring, H] of other ranks' tokens: Down -> Combine
  } ring;

  struct Shared {
    TensorMap activation;  // [T, Is] SharedGateUp -> SharedDown
    BFloat16* gate;        // [T, Is] SharedGateUp -> backward
    BFloat16* up;          // [T, Is] SharedGateUp -> backward
    BFloat16* h;           // [T, Is] what `activation` maps
    BFloat16* y;           // [T, H] SharedDown -> TokenReduce; unused if these are fused
  } shared;

  struct Exchange {
    RowExchange dispatch;  // every rank's x -> ring.x
    RowExchange combine;   // ring.y -> every other rank's routes
    RankMeeting meeting;
    uint32_t chunk_bytes;            // of the staging of a co-resident warp
    uint32_t dedicated_chunk_bytes;  // of a warp of a block that only exchanges
  } exchange;

  DeviceSchedule schedule;  // schedule kernel -> scheduler and exchange warps

  PassSignals signals;
  DeviceTraceParams trace;  // a role per warp, see TraceKind; empty unless the kernel traces
};

}  // namespace mok
