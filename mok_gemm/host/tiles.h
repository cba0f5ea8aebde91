// What the tiles of the MoE layer compute on the host: their sizes and arguments.
//
// Dtypes. The worker's dtype (kBf16 or kFp32) is the element type behind every `void*` below,
// WeightGradTile::out excepted. All pointers are at the tile's first element, all strides count
// elements from one row to the next. No alignment beyond the element's own is required.
#pragma once

#include <cstdint>

#include "mok_core/dtype.h"

namespace mok {

// Largest tiles. Any size from 1 up to these is valid; the engine counts tiles with CeilDiv.
inline constexpr int kHostTileRows = 128;         // Rows of every tile but WeightGrad's.
inline constexpr int kHostTileI = 128;            // Columns of I of a GateUp or DownGrad tile.
inline constexpr int kHostTileH = 256;            // Columns of H of a Down or InputGrad tile.
inline constexpr int kHostGradTileRows = 256;     // Rows of a weight gradient tile.
inline constexpr int kHostGradTileColumns = 256;  // Columns of a weight gradient tile.

// A weight-gradient accumulation may be split over several calls (carry_out of one is carry_in of
// the next) only at multiples of this many rows, so that no pair of VDPBF16PS straddles a split.
inline constexpr int kHostGradSplitRows = 2;

// g = x Wg^T, u = x Wu^T, h = silu(min(g, limit)) * clip(u, -limit, limit) from the rounded g, u.
struct GateUpTile {
  const void* x = nullptr;  // [rows, hidden]
  int64_t x_stride = 0;
  int rows = 0;  // 1 .. kHostTileRows
  int64_t hidden = 0;
  const void* w_gate = nullptr;  // [columns, hidden]: rows of the tile's columns of I
  const void* w_up = nullptr;    // [columns, hidden]
  int64_t w_stride = 0;
  int columns = 0;             // 1 .. kHostTileI
  void* gate = nullptr;        // [rows, columns], out: g before the clamp
  void* up = nullptr;          // [rows, columns], out: u before the clamp
  void* activation = nullptr;  // [rows, columns], out: h
  int64_t out_stride = 0;      // of gate, up and activation
  float swiglu_limit = 0.0f;   // > 0; +infinity: no clamp
};

// y = h Wd^T.
struct DownTile {
  const void* h = nullptr;  // [rows, intermediate]
  int64_t h_stride = 0;
  int rows = 0;  // 1 .. kHostTileRows
  int64_t intermediate = 0;
  const void* w_down = nullptr;  // [columns, intermediate]: rows of the tile's columns of H
  int64_t w_stride = 0;
  int columns = 0;    // 1 .. kHostTileH
  void* y = nullptr;  // [rows, columns], out
  int64_t y_stride = 0;
};

// dhu = d_out Wd (kept in fp32); with h, silu and the clamp recomputed in fp32 from g and u:
//   d_router_partial[r] = sum over the tile's columns of dhu * h   (h rounded to the dtype)
//   dh = router_weight[r] * dhu;  dg, du = SwiGLU backward(g, u, dh), zero where the clamp is
//   active (a value equal to the bound is not clamped: torch.clamp's convention)
//   weighted_h = router_weight[r] * h.
// The sum's order depends on `columns` and the ISA only: column c is added into lane c mod L (L
// lanes per vector) with c ascending, then the lanes are added as a binary tree.
struct DownGradTile {
  const void* d_out = nullptr;  // [rows, hidden], without the router weight
  int64_t d_out_stride = 0;
  int rows = 0;  // 1 .. kHostTileRows
  int64_t hidden = 0;
  const void* w_down = nullptr;  // [hidden, columns]: the tile's columns of I
  int64_t w_stride = 0;
  int columns = 0;             // 1 .. kHostTileI
  const void* gate = nullptr;  // [rows, columns]: g, u as GateUp saved them
  const void* up = nullptr;    // [rows, columns]
  int64_t act_stride = 0;
  const float* router_weight = nullptr;  // [rows]
  float swiglu_limit = 0.0f;             // > 0; +infinity: no clamp
  void* d_gate = nullptr;                // [rows, columns], out
  void* d_up = nullptr;                  // [rows, columns], out
  void* weighted_h = nullptr;            // [rows, columns], out
  int64_t d_stride = 0;                  // of d_gate, d_up and weighted_h
  float* d_router_partial = nullptr;     // [rows], out: this tile's share of the router gradient
  int64_t d_router_stride = 0;
};

// d_x = d_gate Wg + d_up Wu: one accumulation with K = 2I, all of d_gate Wg first.
struct InputGradTile {
  const void* d_gate = nullptr;  // [rows, intermediate]
  const void* d_up = nullptr;    // [rows, intermediate]
  int64_t d_stride = 0;          // of d_gate and d_up
  int rows = 0;                  // 1 .. kHostTileRows
  int64_t intermediate = 0;
  const void* w_gate = nullptr;  // [intermediate, columns]: the tile's columns of H
  const void* w_up = nullptr;    // [intermediate, columns]
  int64_t w_stride = 0;
  int columns = 0;      // 1 .. kHostTileH
  void* d_x = nullptr;  // [rows, columns], out
  int64_t d_x_stride = 0;
};

// acc = (carry_in or 0) + sum over rows ascending of a[r, :]^T b[r, :]. With carry_out acc is
// stored there and `out` is not touched; else out = acc, or out += acc with `accumulate` (one
// fp32 addition, rounded once to out_dtype). Split only at multiples of kHostGradSplitRows rows.
// rows == 0 without carry_in: with `accumulate` out is left alone (neither read nor written), else
// it becomes exactly zero.
struct WeightGradTile {
  const void* a = nullptr;  // [rows, m]
  int64_t a_stride = 0;
  const void* b = nullptr;  // [rows, n]
  int64_t b_stride = 0;
  int64_t rows = 0;                 // >= 0
  int m = 0;                        // 1 .. kHostGradTileRows
  int n = 0;                        // 1 .. kHostGradTileColumns
  const float* carry_in = nullptr;  // [m, n] fp32, or null: start at zero
  float* carry_out = nullptr;       // [m, n] fp32 (may be carry_in), or null: finish into out
  int64_t carry_stride = 0;         // of carry_in and carry_out
  void* out = nullptr;              // [m, n] of out_dtype
  int64_t out_stride = 0;
  DType out_dtype = DType::kBf16;  // kBf16 or kFp32
  bool accumulate = false;
};

// out[t] = round(shared[t] * shared_scale[t] + sum over k ascending of weights[t, k] * y[t * topk +
// k]), in fp32, rounded once to `dtype`. Forward: y are the combined expert outputs. Backward: y
// are the routed dx rows, weights and shared_scale null. All pointers are at the first token.
struct TokenReduceTile {
  int64_t tokens = 0;            // >= 0
  int64_t hidden = 0;            // H
  int topk = 0;                  // K, >= 0
  DType dtype = DType::kBf16;    // of shared, y and out: kBf16 or kFp32
  const void* shared = nullptr;  // [tokens, hidden], or null: the sum starts at zero
  int64_t shared_stride = 0;
  const float* shared_scale = nullptr;  // [tokens], or null: one
  const void* y = nullptr;              // [tokens * topk, hidden]; with y_rows any number of rows
  int64_t y_stride = 0;
  const int32_t* y_rows = nullptr;      // [tokens, topk] the row of y of each route, or null: rows
                                        // in the order of the routes
  const int32_t* expert_ids = nullptr;  // [tokens, topk]; -1: no route, its row is never read
  const float* weights = nullptr;       // [tokens, topk], or null: one
  void* out = nullptr;                  // [tokens, hidden], may alias shared
  int64_t out_stride = 0;
};

}  // namespace mok
