// Everything the tasks of one pass read and write on one rank, nested by stage. Filled once before
// the pass starts and constant while it runs. Shapes use the letters of mok.h; "ring" is the number
// of ring rows. Matrices are contiguous; a matrix of all experts stacks them by rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_comm/transfer.h"
#include "mok_core/dtype.h"
#include "mok_core/view.h"
#include "mok_gemm/host/isa.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"

namespace mok {

struct LayerShape {
  int64_t num_tokens = 0;           // T
  int64_t hidden = 0;               // H
  int64_t intermediate = 0;         // I
  int64_t shared_intermediate = 0;  // Is, 0: no shared expert
  int topk = 1;                     // K
  DType dtype = DType::kBf16;
  float swiglu_limit = 0;  // > 0, infinity: plain
  Isa isa = Isa::kPortable;
};

struct TokenParams {
  ConstUntypedMatrix x;       // [T, H] caller -> SharedGateUp, shared weight gradients
  ConstUntypedMatrix d_out;   // [T, H] caller -> SharedDownGrad, SharedWeightGradDown; backward
  const float* topk_weight;   // [T, K] caller -> TokenReduce of the forward
  const float* shared_scale;  // [T] or null: one
  const int32_t* expert_ids;  // [T, K] schedule -> TokenReduce; -1: no route
  UntypedMatrix reduced;      // [T, H] TokenReduce -> caller: out or d_x
  float* d_topk_weight;       // [T, K] TokenReduce -> caller; backward
  float* d_shared_scale;      // [T] TokenReduce -> caller; null without shared_scale; backward
};

struct ExpertParams {
  ConstUntypedMatrix gate;  // [E * I, H]
  ConstUntypedMatrix up;    // [E * I, H]
  ConstUntypedMatrix down;  // [E * H, I]
};

// Destinations of weight gradients, shaped as the weights; a null one is not computed.
struct ExpertGradParams {
  UntypedMatrix gate;
  UntypedMatrix up;
  UntypedMatrix down;
  bool accumulate = false;
};

// The caller's context.
struct RingParams {
  UntypedMatrix x;            // [ring, H] Dispatch -> GateUp, WeightGradGateUp
  UntypedMatrix gate;         // [ring, I] GateUp -> DownGrad
  UntypedMatrix up;           // [ring, I] GateUp -> DownGrad
  UntypedMatrix shared_gate;  // [T, Is] SharedGateUp -> SharedDownGrad
  UntypedMatrix shared_up;    // [T, Is] SharedGateUp -> SharedDownGrad
};

// Scratch of the forward; see ScratchRegions for producers and readers.
struct ForwardScratch {
  UntypedMatrix activation;         // [ring, I]
  UntypedMatrix y;                  // [ring, H]
  UntypedMatrix shared_activation;  // [T, Is]
  UntypedMatrix shared_y;           // [T, H]
};

// Scratch of the backward; see ScratchRegions.
struct BackwardScratch {
  UntypedMatrix d_out;                 // [ring, H]
  UntypedMatrix d_gate;                // [ring, I]
  UntypedMatrix d_up;                  // [ring, I]
  UntypedMatrix weighted_h;            // [ring, I]
  UntypedMatrix d_x;                   // [ring, H]
  MatrixView<float> d_router_partial;  // [ring, tiles over I]
  float* router_weight;                // [ring]
  float* d_router;                     // [ring]
  UntypedMatrix shared_d_gate;         // [T, Is]
  UntypedMatrix shared_d_up;           // [T, Is]
  UntypedMatrix shared_weighted_h;     // [T, Is]
  UntypedMatrix shared_d_x;            // [T, H]
  MatrixView<float> d_scale_partial;   // [T, tiles over Is]
  MatrixView<float> carry_gate;        // [I, H]
  MatrixView<float> carry_up;          // [I, H]
  MatrixView<float> carry_down;        // [H, I]
};

// What crosses ranks.
struct ExchangeParams {
  RowTable table;             // rows of this rank's experts: who sent them
  PeerBuffers x;              // [T_r, H] of every rank -> Dispatch, RecomputeDispatch
  PeerBuffers d_out;          // [T_r, H] of every rank -> ReverseCombine
  PeerBuffers topk_weight;    // fp32 [T_r * K] of every rank -> ReverseCombine
  PeerBuffers rows;           // [T_r * K, H] on every rank: Combine, ReverseDispatch -> TokenReduce
  PeerBuffers d_topk_weight;  // fp32 [T_r * K] on every rank: ReverseDispatch -> TokenReduce
};

// The rows that TokenReduce sums, one per route. As a rule they are what Combine or ReverseDispatch
// of all ranks have put into the heap of this one, at the route's own place. A single rank whose
// ring holds all rows leaves them in the ring: nobody else wants them, and nothing overwrites them.
struct ReduceRows {
  const std::byte* base;        // [T * K, H], or [ring, H]
  const int32_t* row_of_route;  // [T, K] ring row of each route; null: the route itself
  bool stay_in_ring() const { return row_of_route != nullptr; }
};

// Memory that is filled before the entry barrier: with a tensor of the caller that peers read (its
// place in the heap), or with zeros (the rows of the caller's ring behind its last row block).
struct StagedCopy {
  std::byte* destination;
  const std::byte* source;  // null: zeros
  size_t bytes;
};
inline constexpr int kMaxStagedCopies = 4;

// Points into itself once filled: stays where it is.
struct PassParams {
  PassParams() = default;
  PassParams(const PassParams&) = delete;
  PassParams& operator=(const PassParams&) = delete;

  LayerShape shape;
  RingPlan ring_plan;
  RoutingTableView table;
  TokenParams tokens;
  ExpertParams routed;
  ExpertParams shared;
  RingParams ring;
  bool clear_spare_rows = false;  // forward: zeros to rows of `ring` that hold no route
  ForwardScratch forward;
  BackwardScratch backward;
  ExpertGradParams d_routed;
  ExpertGradParams d_shared;
  ExchangeParams exchange;
  ReduceRows reduce_rows;
  const float* local_d_topk_weight;  // this rank's [T * K] of exchange.d_topk_weight
  StagedCopy staged[kMaxStagedCopies];
  int num_staged = 0;
  // Storage for exchange.{x, d_out, topk_weight}.bases of a single rank, whose tensors are read in
  // place.
  std::byte* in_place[3] = {};
};

}  // namespace mok
