// Where everything lies in a workspace's two allocations: the symmetric heap, which peers read and
// write, and the scratch memory of this rank alone. Each layout is declared here and nowhere else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/dtype.h"
#include "mok_schedule/task.h"

namespace mok {

// What a workspace was created for; the same on every rank but `rank`.
struct WorkspaceShape {
  int rank = 0;
  int ep_size = 1;         // R
  int64_t max_tokens = 0;  // largest T of any rank
  int64_t hidden = 0;      // H
  int topk = 1;            // K
  DType dtype = DType::kBf16;
};

// Byte offsets into the symmetric heap, the same on all ranks. One rank alone reads its callers'
// tensors in place: the staging regions (*) are empty when R is 1.
struct HeapRegions {
  size_t barrier = 0;      // RankBarrier: arrivals of every rank
  size_t handshake = 0;    // RankMessage of one HandshakeRecord
  size_t routes = 0;       // RouteAllGather
  size_t data = 0;         // everything from here on is data, free to be poisoned between passes
  size_t x = 0;            // (*) [max_tokens, H]: this rank's x -> dispatch of every rank
  size_t d_out = 0;        // (*) [max_tokens, H]: this rank's d_out -> reverse combine of all ranks
  size_t topk_weight = 0;  // (*) fp32 [max_tokens, K] -> reverse combine of all ranks
  size_t rows = 0;         // [max_tokens * K, H]: combine, reverse dispatch of all ranks -> reduce
  size_t d_topk_weight = 0;  // fp32 [max_tokens * K]: reverse dispatch of all ranks -> reduce
  size_t bytes = 0;
};

HeapRegions LayOutHeap(const WorkspaceShape& shape);

// What the scratch memory of one pass depends on.
struct ScratchShape {
  Pass pass = Pass::kForward;
  DType dtype = DType::kBf16;
  int64_t ring_rows = 0;            // rows of the ring, used or not
  int64_t num_tokens = 0;           // largest T
  int64_t hidden = 0;               // H
  int64_t intermediate = 0;         // I
  int64_t shared_intermediate = 0;  // Is
  int64_t intermediate_tiles = 0;   // tiles over I, then over Is
  int64_t shared_intermediate_tiles = 0;
  int64_t num_counters = 0;  // of the task program
  bool carries = false;      // backward: more than one macrobatch
};

// Byte offsets into the scratch memory of one pass; regions of the other pass are empty. "ring"
// stands for ring_rows; rows of a ring region belong to the ring slot of the same row.
struct ScratchRegions {
  // Forward.
  size_t activation = 0;         // [ring, I] h: GateUp -> Down
  size_t y = 0;                  // [ring, H]: Down -> Combine
  size_t shared_activation = 0;  // [T, Is]: SharedGateUp -> SharedDown
  size_t shared_y = 0;           // [T, H]: SharedDown -> TokenReduce
  // Backward.
  size_t d_out = 0;              // [ring, H]: ReverseCombine -> DownGrad, WeightGradDown
  size_t router_weight = 0;      // fp32 [ring]: ReverseCombine -> DownGrad
  size_t d_gate = 0;             // [ring, I]: DownGrad -> InputGrad, WeightGradGateUp
  size_t d_up = 0;               // [ring, I]: as d_gate
  size_t weighted_h = 0;         // [ring, I]: DownGrad -> WeightGradDown; also takes the h that
                                 // RecomputeGateUp makes and nobody reads
  size_t d_router_partial = 0;   // fp32 [ring, tiles over I]: DownGrad -> ReverseDispatch
  size_t d_router = 0;           // fp32 [ring]: inside ReverseDispatch
  size_t d_x = 0;                // [ring, H]: InputGrad -> ReverseDispatch
  size_t shared_d_gate = 0;      // [T, Is]: SharedDownGrad -> SharedInputGrad, SharedWeightGrad*
  size_t shared_d_up = 0;        // [T, Is]: as shared_d_gate
  size_t shared_weighted_h = 0;  // [T, Is]: as weighted_h
  size_t d_scale_partial = 0;    // fp32 [T, tiles over Is]: SharedDownGrad -> TokenReduce
  size_t shared_d_x = 0;         // [T, H]: SharedInputGrad -> TokenReduce
  // fp32 partial weight gradients of the one expert that crosses a macrobatch boundary:
  size_t carry_down = 0;  // [H, I]
  size_t carry_gate = 0;  // [I, H]
  size_t carry_up = 0;    // [I, H]
  // Both. Last, since the number of counters varies with the routing and the rest does not: a page
  // once touched serves the next pass as well.
  size_t counters = 0;  // Counter [num_counters], zero when a pass begins
  size_t bytes = 0;
};

ScratchRegions LayOutScratch(const ScratchShape& shape);

}  // namespace mok
