// GEMM tiles of the forward, and the reductions that end the forward.
#include "mok_core/bits.h"
#include "mok_gemm/host/token_reduce.h"
#include "mok_megakernel/row_range.h"
#include "mok_megakernel/task_roles.h"

namespace mok {
namespace {

// The operands of a GateUp tile, routed or shared: `rows` rows from `first_row` of x, g, u and h,
// against rows first_weight_row + columns of the stacked weights.
struct GateUpOperands {
  ConstUntypedMatrix x;
  UntypedMatrix gate;
  UntypedMatrix up;
  UntypedMatrix h;
  int64_t first_row;
  int rows;
  int64_t first_weight_row;
};

void RunGateUpTile(const PassParams& params, const ExpertParams& weights,
                   const GateUpOperands& operands, const Range& columns, TileWorker& worker) {
  const int64_t weight_row = operands.first_weight_row + columns.begin;
  worker.GateUp({
      .x = operands.x.At(operands.first_row, 0),
      .x_stride = operands.x.row_stride,
      .rows = operands.rows,
      .hidden = params.shape.hidden,
      .w_gate = weights.gate.At(weight_row, 0),
      .w_up = weights.up.At(weight_row, 0),
      .w_stride = weights.gate.row_stride,
      .columns = columns.count,
      .gate = operands.gate.At(operands.first_row, columns.begin),
      .up = operands.up.At(operands.first_row, columns.begin),
      .activation = operands.h.At(operands.first_row, columns.begin),
      .out_stride = operands.gate.row_stride,
      .swiglu_limit = params.shape.swiglu_limit,
  });
}

struct DownOperands {
  UntypedMatrix h;
  UntypedMatrix y;
  int64_t first_row;
  int rows;
  int64_t first_weight_row;
};

void RunDownTile(const ExpertParams& weights, const DownOperands& operands, const Range& columns,
                 TileWorker& worker) {
  worker.Down({
      .h = operands.h.At(operands.first_row, 0),
      .h_stride = operands.h.row_stride,
      .rows = operands.rows,
      .intermediate = operands.h.columns,
      .w_down = weights.down.At(operands.first_weight_row + columns.begin, 0),
      .w_stride = weights.down.row_stride,
      .columns = columns.count,
      .y = operands.y.At(operands.first_row, columns.begin),
      .y_stride = operands.y.row_stride,
  });
}

}  // namespace

TileCounts CountTiles(const LayerShape& shape) {
  const auto tiles = [](int64_t extent, int tile) {
    return static_cast<int32_t>(CeilDiv<int64_t>(extent, tile));
  };
  const int32_t grad_rows_h = tiles(shape.hidden, kHostGradTileRows);
  const int32_t grad_columns_h = tiles(shape.hidden, kHostGradTileColumns);
  TileCounts counts;
  counts.token_reduce = kRowBlock / kReduceTokens;
  counts.intermediate = tiles(shape.intermediate, kHostTileI);
  counts.hidden = tiles(shape.hidden, kHostTileH);
  counts.weight_grad_down = grad_rows_h * tiles(shape.intermediate, kHostGradTileColumns);
  counts.weight_grad_gate_up = 2 * tiles(shape.intermediate, kHostGradTileRows) * grad_columns_h;
  counts.shared_intermediate = tiles(shape.shared_intermediate, kHostTileI);
  counts.shared_weight_grad_down =
      grad_rows_h * tiles(shape.shared_intermediate, kHostGradTileColumns);
  counts.shared_weight_grad_gate_up =
      2 * tiles(shape.shared_intermediate, kHostGradTileRows) * grad_columns_h;
  return counts;
}

void RunGateUp(const PassParams& params, const UntypedMatrix& h, const Task& task,
               TileWorker& worker) {
  const BlockRows rows = RowsOfBlock(params, task);
  const Range columns = TileRange(task.tile, kHostTileI, params.shape.intermediate);
  RunGateUpTile(params, params.routed,
                {params.ring.x, params.ring.gate, params.ring.up, h, rows.ring_row, rows.rows,
                 task.expert * params.shape.intermediate},
                columns, worker);
  ClearSpareRows(params, params.ring.gate, rows, columns);
  ClearSpareRows(params, params.ring.up, rows, columns);
}

void RunSharedGateUp(const PassParams& params, const UntypedMatrix& h, const Task& task,
                     TileWorker& worker) {
  const Range tokens = TokensOfBlock(params, task);
  RunGateUpTile(params, params.shared,
                {params.tokens.x, params.ring.shared_gate, params.ring.shared_up, h, tokens.begin,
                 tokens.count, 0},
                TileRange(task.tile, kHostTileI, params.shape.shared_intermediate), worker);
}

void RunDown(const PassParams& params, const Task& task, TileWorker& worker) {
  const BlockRows rows = RowsOfBlock(params, task);
  RunDownTile(params.routed,
              {params.forward.activation, params.forward.y, rows.ring_row, rows.rows,
               task.expert * params.shape.hidden},
              TileRange(task.tile, kHostTileH, params.shape.hidden), worker);
}

void RunSharedDown(const PassParams& params, const Task& task, TileWorker& worker) {
  const Range tokens = TokensOfBlock(params, task);
  RunDownTile(
      params.shared,
      {params.forward.shared_activation, params.forward.shared_y, tokens.begin, tokens.count, 0},
      TileRange(task.tile, kHostTileH, params.shape.hidden), worker);
}

void RunForwardReduce(const PassParams& params, const Task& task) {
  const Range tokens = TokensOfReduceTile(params, task);
  if (tokens.count == 0) return;  // behind the last token
  const TokenParams& token_params = params.tokens;
  const int64_t first_route = tokens.begin * params.shape.topk;
  const UntypedMatrix& shared_y = params.forward.shared_y;
  const UntypedMatrix& out = token_params.reduced;
  const bool has_shared = params.shape.shared_intermediate > 0;
  const bool has_scale = token_params.shared_scale != nullptr;
  TokenReduce(params.shape.isa,
              {
                  .tokens = tokens.count,
                  .hidden = params.shape.hidden,
                  .topk = params.shape.topk,
                  .dtype = params.shape.dtype,
                  .shared = has_shared ? shared_y.At(tokens.begin, 0) : nullptr,
                  .shared_stride = shared_y.row_stride,
                  .shared_scale = has_scale ? token_params.shared_scale + tokens.begin : nullptr,
                  .y = FirstRow(params.reduce_rows, first_route, out.row_bytes()),
                  .y_stride = out.row_stride,
                  .y_rows = RowsOfRoutes(params.reduce_rows, first_route),
                  .expert_ids = token_params.expert_ids + first_route,
                  .weights = token_params.topk_weight + first_route,
                  .out = out.At(tokens.begin, 0),
                  .out_stride = out.row_stride,
              });
}

}  // namespace mok
