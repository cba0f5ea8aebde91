// What one output tile of the backward's GEMMs is made of. Plain data, as GemmTask: a scheduler
// writes it, producer and consumers read it.
//
//   kDownGrad    dhu = dout Wd, then the SwiGLU backward: dg, du, w * h, router-weight partials
//   kInputGrad   dx = dg Wg + du Wu, one product with K = 2 I
//   kWeightGrad  dW = A^T B over the rows of one expert in one macrobatch
//
// Operands are the row-major matrices that the forward uses, without transposed copies: what is
// contiguous along M or N instead of K is an MN-major operand of the multiply. Their tiles in
// shared memory are boxes of 64 columns by 64 rows of K, 128 bytes a row.
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/device/types.h"
#include "mok_core/dtype.h"
#include "mok_core/macros.h"
#include "mok_gemm/sm90/gemm_config.h"
#include "mok_gemm/sm90/gemm_task.h"

namespace mok {

enum class BackwardGemm : int32_t { kDownGrad, kInputGrad, kWeightGrad };

// Operands and size of a tile of C = A B (kDownGrad, kInputGrad: A [rows, K], B [experts, K, N]) or
// C = A^T B (kWeightGrad: A [rows of K, M], B [rows of K, N]). All maps are 64 x 64 boxes:
// ActivationMapSpec for matrices of rows, ContractedWeightMapSpec for weights (tensor_maps.h).
struct ProductTile {
  const TensorMap* a[2];  // of each range of K
  const TensorMap* b[2];
  int32_t num_ranges;  // 1; kInputGrad 2: dg Wg, then du Wu
  int32_t k_blocks;    // of each range: ceil(K / Config::kTileK); kWeightGrad: >= 0
  int32_t a_start;     // first row of the tile in A; kWeightGrad: first column
  int32_t b_column;    // first column of the tile in B
  int32_t b_expert;    // kWeightGrad: unused
  int32_t first_k;     // kWeightGrad: first row of K in A and B; else 0
  int32_t last_k;      // kWeightGrad: valid rows of the last K block, 1 .. kTileK. Rows beyond them
                       // may hold anything and count as zeros. Else kTileK.
  int32_t rows;        // valid rows of the output tile, 1 .. kTileM
  int32_t columns;     // valid columns, a multiple of 8, 1 .. kTileN
  int32_t b_halves;    // 1: at most kHalfN columns, the second half of B is left out; else 2
};

// Pointers are at the tile's first element, 16-byte aligned; strides count elements.
struct DownGradEpilogue {
  const TensorMap* gate;       // [rows, I] g and u as GateUp saved them: ActivationMapSpec
  const TensorMap* up;         //
  const float* router_weight;  // [rows]
  int32_t router_weight_step;  // 1; 0: one weight for all rows
  float swiglu_limit;          // > 0, +infinity: no clamp
  BFloat16* d_gate;            // [rows, columns]
  BFloat16* d_up;              // [rows, columns]
  BFloat16* weighted_h;        // [rows, columns] bf16(w * h)
  int64_t stride;              // of the three, a multiple of 8
  float* router_partial;       // [rows]: sum over the tile's columns of dhu * h
  int64_t router_partial_stride;
};

struct InputGradEpilogue {
  BFloat16* d_x;  // [rows, columns]
  int64_t stride;
  OwnRows own_rows;
};

// What becomes of a weight gradient's fp32 sum.
struct WeightGradEpilogue {
  void* out;  // [rows, columns] of out_dtype; not touched with carry_out, nor, when accumulating,
              // by a tile without rows of K
  int64_t out_stride;
  DType out_dtype;  // kBf16 or kFp32
  bool accumulate;  // out += sum: one fp32 addition, rounded once to out_dtype
  bool carry_in;    // the sum starts from `carry`
  bool carry_out;   // the sum goes to `carry`, and not to out
  float* carry;     // kCarryTileElements of this tile, in the order of the accumulators
};

// One tile. The union's member is that of `kind`.
struct BackwardTask {
  ProductTile product;
  union {
    DownGradEpilogue down_grad;
    InputGradEpilogue input_grad;
    WeightGradEpilogue weight_grad;
  };
  BackwardGemm kind;
};

// fp32 elements of the carry buffer that a tile needs, whatever its valid part: the carry of a
// weight [M, N] has WeightGradShape::tiles() times as many, tile after tile.
template <class Config>
inline constexpr int64_t kCarryTileElements = int64_t{Config::kTileM} * Config::kTileN;

template <class Config>
MOK_HOST_DEVICE constexpr int32_t KBlocks(int32_t k) {
  return CeilDiv(k, int32_t{Config::kTileK});
}

// Whole operands: members of a kernel's parameters.

struct DownGradMatrices {
  TensorMap d_out;   // [rows, H], ActivationMapSpec
  TensorMap weight;  // Wd [experts, H, I], ContractedWeightMapSpec
  TensorMap gate;    // [rows, I], ActivationMapSpec
  TensorMap up;      // [rows, I], ActivationMapSpec
  int32_t hidden, intermediate;
  const float* router_weight;  // [rows], or one with step 0
  int32_t router_weight_step;
  float swiglu_limit;
  // [rows, I], contiguous; d_gate and d_up may be gate and up: a tile reads what it overwrites.
  BFloat16 *d_gate, *d_up, *weighted_h;
  float* router_partial;  // [rows, ceil(I / kTileN)]
};

struct InputGradMatrices {
  TensorMap d_gate, d_up;  // [rows, I], ActivationMapSpec
  TensorMap gate, up;      // Wg, Wu [experts, I, H], ContractedWeightMapSpec
  int32_t hidden, intermediate;
  BFloat16* d_x;  // [rows, H], contiguous; its rows need not be those of A
};

// dW [experts, m, n] = a^T b, over the rows of each expert.
struct WeightGradMatrices {
  TensorMap a;  // [rows, m], ActivationMapSpec: dout for dWd; dg, du for dWg, dWu
  TensorMap b;  // [rows, n], ActivationMapSpec: w * h for dWd; x for dWg, dWu
  int32_t m, n;
  void* out;  // [experts, m, n] of out_dtype, contiguous
  DType out_dtype;
  bool accumulate;
  float* carry;  // of one expert: WeightGradShape::tiles() * kCarryTileElements
};

// Which rows of which expert.
struct RowBlockPlace {
  int32_t row;     // first row of the block in A and in the outputs
  int32_t rows;    // valid, 1 .. kTileM
  int32_t expert;  // of the weights
};

// Tiles of one expert's weight gradient, in an order in which about 132 adjacent tiles form a
// square: panels of kPanelTiles tiles of M; inside a panel N outer, M inner.
template <class Config>
struct WeightGradShape {
  static constexpr int32_t kPanelTiles = 16;
  int32_t tiles_m, tiles_n;

  MOK_HOST_DEVICE constexpr WeightGradShape(int32_t m, int32_t n)
      : tiles_m(CeilDiv(m, int32_t{Config::kTileM})),
        tiles_n(CeilDiv(n, int32_t{Config::kTileN})) {}
  MOK_HOST_DEVICE constexpr int32_t tiles() const { return tiles_m * tiles_n; }

  struct Place {
    int32_t tile_m, tile_n;
  };
  MOK_HOST_DEVICE constexpr Place Find(int32_t tile) const {
    const int32_t panel = tile / (kPanelTiles * tiles_n);
    const int32_t first = panel * kPanelTiles, in_panel = tile - first * tiles_n;
    const int32_t rest = tiles_m - first, height = rest < kPanelTiles ? rest : kPanelTiles;
    return {first + in_panel % height, in_panel / height};
  }
};

// A part of an expert's rows whose products go into its weight gradient.
struct WeightGradPlace {
  int32_t expert;  // of the output
  int32_t row;     // first row in A and B
  int32_t rows;    // >= 0, with a carry >= 1; the rows behind the last one, up to a multiple of
                   // kTileK, may hold anything, but exist in A and B or lie beyond their ends
  bool carry_in, carry_out;
};

namespace gemm_internal {

template <class Config>
MOK_HOST_DEVICE constexpr int32_t TileColumns(int32_t width, int32_t column) {
  return width - column < Config::kTileN ? width - column : Config::kTileN;
}
template <class Config>
MOK_HOST_DEVICE constexpr int32_t HalvesOfB(int32_t columns) {
  return columns > Config::kHalfN ? 2 : 1;
}

// What the products of a row block with weights have in common; the caller adds maps and ranges.
template <class Config>
MOK_HOST_DEVICE constexpr ProductTile ProductOfRows(const RowBlockPlace& place, int32_t k,
                                                    int32_t column, int32_t columns) {
  return {.a = {},
          .b = {},
          .num_ranges = 0,
          .k_blocks = KBlocks<Config>(k),
          .a_start = place.row,
          .b_column = column,
          .b_expert = place.expert,
          .first_k = 0,
          .last_k = Config::kTileK,
          .rows = place.rows,
          .columns = columns,
          .b_halves = HalvesOfB<Config>(columns)};
}

}  // namespace gemm_internal

// Fills `task` for columns tile * kTileN .. of a row block.
template <class Config>
MOK_HOST_DEVICE void FillDownGrad(const DownGradMatrices& m, const RowBlockPlace& place,
                                  int32_t tile, BackwardTask& task) {
  const int32_t column = tile * Config::kTileN;
  const int32_t columns = gemm_internal::TileColumns<Config>(m.intermediate, column);
  const int32_t tiles = CeilDiv(m.intermediate, int32_t{Config::kTileN});
  const int64_t offset = int64_t{place.row} * m.intermediate + column;
  task.kind = BackwardGemm::kDownGrad;
  task.product = gemm_internal::ProductOfRows<Config>(place, m.hidden, column, columns);
  task.product.a[0] = task.product.a[1] = &m.d_out;
  task.product.b[0] = task.product.b[1] = &m.weight;
  task.product.num_ranges = 1;
  task.down_grad = {.gate = &m.gate,
                    .up = &m.up,
                    .router_weight = m.router_weight + int64_t{place.row} * m.router_weight_step,
                    .router_weight_step = m.router_weight_step,
                    .swiglu_limit = m.swiglu_limit,
                    .d_gate = m.d_gate + offset,
                    .d_up = m.d_up + offset,
                    .weighted_h = m.weighted_h + offset,
                    .stride = m.intermediate,
                    .router_partial = m.router_partial + int64_t{place.row} * tiles + tile,
                    .router_partial_stride = tiles};
}

// Fills `task` for columns tile * kTileN .. of a row block whose results begin at row `d_x_row`,
// all of them there: own_rows is for the caller to change.
template <class Config>
MOK_HOST_DEVICE void FillInputGrad(const InputGradMatrices& m, const RowBlockPlace& place,
                                   int32_t d_x_row, int32_t tile, BackwardTask& task) {
  const int32_t column = tile * Config::kTileN;
  const int32_t columns = gemm_internal::TileColumns<Config>(m.hidden, column);
  task.kind = BackwardGemm::kInputGrad;
  task.product = gemm_internal::ProductOfRows<Config>(place, m.intermediate, column, columns);
  task.product.a[0] = &m.d_gate;
  task.product.a[1] = &m.d_up;
  task.product.b[0] = &m.gate;
  task.product.b[1] = &m.up;
  task.product.num_ranges = 2;
  task.input_grad = {m.d_x + int64_t{d_x_row} * m.hidden + column, m.hidden, {-1, nullptr}};
}

// Fills `task` for tile `tile` (WeightGradShape order) of an expert.
template <class Config>
MOK_HOST_DEVICE void FillWeightGrad(const WeightGradMatrices& m, const WeightGradPlace& place,
                                    int32_t tile, BackwardTask& task) {
  const WeightGradShape<Config> shape(m.m, m.n);
  const auto at = shape.Find(tile);
  const int32_t row = at.tile_m * Config::kTileM, column = at.tile_n * Config::kTileN;
  const int32_t rest = m.m - row, blocks = KBlocks<Config>(place.rows);
  const int32_t columns = gemm_internal::TileColumns<Config>(m.n, column);
  task.kind = BackwardGemm::kWeightGrad;
  task.product = {.a = {&m.a, &m.a},
                  .b = {&m.b, &m.b},
                  .num_ranges = 1,
                  .k_blocks = blocks,
                  .a_start = row,
                  .b_column = column,
                  .b_expert = 0,
                  .first_k = place.row,
                  .last_k = place.rows - (blocks - 1) * Config::kTileK,
                  .rows = rest < Config::kTileM ? rest : Config::kTileM,
                  .columns = columns,
                  .b_halves = gemm_internal::HalvesOfB<Config>(columns)};
  const int64_t offset = (int64_t{place.expert} * m.m + row) * m.n + column;
  task.weight_grad = {
      .out = static_cast<unsigned char*>(m.out) + offset * ElementBytes(m.out_dtype),
      .out_stride = m.n,
      .out_dtype = m.out_dtype,
      .accumulate = m.accumulate,
      .carry_in = place.carry_in,
      .carry_out = place.carry_out,
      .carry = place.carry_in || place.carry_out
                   ? m.carry + int64_t{tile} * kCarryTileElements<Config>
                   : nullptr};
}

}  // namespace mok
