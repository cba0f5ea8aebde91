// TileWorker: the GEMM tiles of the MoE layer with their epilogues, on one host thread.
//
// Numerics. Products are accumulated in fp32, one accumulator per output element, K ascending; the
// accumulator is rounded once (RNE) to the operand dtype. Hence the bits of an output element
// depend on its own row, its own column and K only: not on the tile's position or size, the other
// rows, the thread, or what the worker ran before. They do depend on the ISA:
//  - kPortable: separate multiply and add; kAvx2, kAvx512: fused multiply-add;
//  - kAvx512Bf16 with bf16 operands: VDPBF16PS takes K in pairs (2j, 2j + 1) and accumulates the
//    odd product first, then the even one, each by a fused multiply-add rounded to nearest even.
//    Denormal inputs count as zero and denormal results become zero, whatever MXCSR says. An odd K
//    is completed with a pair partner of zero.
// Memory beyond `rows`, `columns` and K is never read or written, so it may hold NaN.
//
// Dtypes. The worker's dtype (kBf16 or kFp32) is the element type behind every `void*` below,
// WeightGradTile::out excepted. All pointers are at the tile's first element, all strides count
// elements from one row to the next. No alignment beyond the element's own is required.
#ifndef MOK_GEMM_HOST_TILE_WORKER_H_
#define MOK_GEMM_HOST_TILE_WORKER_H_

#include <cstdint>
#include <memory>

#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_gemm/host/isa.h"

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

class TileWorkerImpl;

// One per thread (not thread-safe); owns the packing scratch (about 1 MiB, allocated once). Nothing
// survives from one tile to the next: operands are packed K block by K block, at a cost of 2 to 3 %
// of a 128-row tile, so there is no weight cache that a caller would have to invalidate.
class TileWorker {
 public:
  // `isa` must be supported and `dtype` kBf16 or kFp32 (checked: a violation ends the process).
  TileWorker(Isa isa, DType dtype);
  ~TileWorker();
  TileWorker(TileWorker&&) noexcept;
  TileWorker& operator=(TileWorker&&) noexcept;

  Isa isa() const;
  DType dtype() const;

  void GateUp(const GateUpTile& tile);
  void Down(const DownTile& tile);
  void DownGrad(const DownGradTile& tile);
  void InputGrad(const InputGradTile& tile);
  void WeightGrad(const WeightGradTile& tile);

 private:
  std::unique_ptr<TileWorkerImpl> impl_;
};

}  // namespace mok

#endif  // MOK_GEMM_HOST_TILE_WORKER_H_
