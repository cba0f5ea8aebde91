// GEMM tiles of the backward that go along rows, and the reductions that end the backward.
#include <algorithm>
#include <array>

#include "mok_gemm/host/token_reduce.h"
#include "mok_megakernel/row_range.h"
#include "mok_megakernel/task_roles.h"

namespace mok {
namespace {

// Factors of the shared expert's rows where it has no scale.
constexpr std::array<float, kRowBlock> kOnes = [] {
  std::array<float, kRowBlock> ones{};
  ones.fill(1.0f);
  return ones;
}();

struct DownGradOperands {
  ConstUntypedMatrix d_out;   // [., H]
  UntypedMatrix gate;         // [., I], in
  UntypedMatrix up;           // [., I], in
  UntypedMatrix d_gate;       // [., I], out
  UntypedMatrix d_up;         // [., I], out
  UntypedMatrix weighted_h;   // [., I], out
  MatrixView<float> partial;  // [., tiles], out
  const float* weight;        // [rows]: factor of each row
  int64_t first_row;
  int rows;
  int64_t first_weight_row;
};

void RunDownGradTile(const PassParams& params, const ExpertParams& weights,
                     const DownGradOperands& operands, int64_t tile, TileWorker& worker) {
  const int64_t row = operands.first_row;
  const Range columns = TileRange(tile, kHostTileI, operands.gate.columns);
  worker.DownGrad({
      .d_out = operands.d_out.At(row, 0),
      .d_out_stride = operands.d_out.row_stride,
      .rows = operands.rows,
      .hidden = params.shape.hidden,
      .w_down = weights.down.At(operands.first_weight_row, columns.begin),
      .w_stride = weights.down.row_stride,
      .columns = columns.count,
      .gate = operands.gate.At(row, columns.begin),
      .up = operands.up.At(row, columns.begin),
      .act_stride = operands.gate.row_stride,
      .router_weight = operands.weight,
      .swiglu_limit = params.shape.swiglu_limit,
      .d_gate = operands.d_gate.At(row, columns.begin),
      .d_up = operands.d_up.At(row, columns.begin),
      .weighted_h = operands.weighted_h.At(row, columns.begin),
      .d_stride = operands.d_gate.row_stride,
      .d_router_partial = &operands.partial(row, tile),
      .d_router_stride = operands.partial.row_stride,
  });
}

struct InputGradOperands {
  UntypedMatrix d_gate;  // [., I], in
  UntypedMatrix d_up;    // [., I], in
  UntypedMatrix d_x;     // [., H], out
  int64_t first_row;
  int rows;
  int64_t first_weight_row;
};

void RunInputGradTile(const ExpertParams& weights, const InputGradOperands& operands,
                      const Range& columns, TileWorker& worker) {
  const int64_t row = operands.first_row;
  worker.InputGrad({
      .d_gate = operands.d_gate.At(row, 0),
      .d_up = operands.d_up.At(row, 0),
      .d_stride = operands.d_gate.row_stride,
      .rows = operands.rows,
      .intermediate = operands.d_gate.columns,
      .w_gate = weights.gate.At(operands.first_weight_row, columns.begin),
      .w_up = weights.up.At(operands.first_weight_row, columns.begin),
      .w_stride = weights.gate.row_stride,
      .columns = columns.count,
      .d_x = operands.d_x.At(row, columns.begin),
      .d_x_stride = operands.d_x.row_stride,
  });
}

}  // namespace

void RunDownGrad(const PassParams& params, const Task& task, TileWorker& worker) {
  const BlockRows rows = RowsOfBlock(params, task);
  const BackwardScratch& scratch = params.backward;
  RunDownGradTile(
      params, params.routed,
      {scratch.d_out, params.ring.gate, params.ring.up, scratch.d_gate, scratch.d_up,
       scratch.weighted_h, scratch.d_router_partial, scratch.router_weight + rows.ring_row,
       rows.ring_row, rows.rows, task.expert * params.shape.hidden},
      task.tile, worker);
}

void RunSharedDownGrad(const PassParams& params, const Task& task, TileWorker& worker) {
  const Range tokens = TokensOfBlock(params, task);
  const BackwardScratch& scratch = params.backward;
  const float* scale = params.tokens.shared_scale;
  RunDownGradTile(
      params, params.shared,
      {params.tokens.d_out, params.ring.shared_gate, params.ring.shared_up, scratch.shared_d_gate,
       scratch.shared_d_up, scratch.shared_weighted_h, scratch.d_scale_partial,
       scale != nullptr ? scale + tokens.begin : kOnes.data(), tokens.begin, tokens.count, 0},
      task.tile, worker);
}

void RunInputGrad(const PassParams& params, const Task& task, TileWorker& worker) {
  const BlockRows rows = RowsOfBlock(params, task);
  const BackwardScratch& scratch = params.backward;
  RunInputGradTile(params.routed,
                   {scratch.d_gate, scratch.d_up, scratch.d_x, rows.ring_row, rows.rows,
                    task.expert * params.shape.intermediate},
                   TileRange(task.tile, kHostTileH, params.shape.hidden), worker);
}

void RunSharedInputGrad(const PassParams& params, const Task& task, TileWorker& worker) {
  const Range tokens = TokensOfBlock(params, task);
  const BackwardScratch& scratch = params.backward;
  RunInputGradTile(params.shared,
                   {scratch.shared_d_gate, scratch.shared_d_up, scratch.shared_d_x, tokens.begin,
                    tokens.count, 0},
                   TileRange(task.tile, kHostTileH, params.shape.hidden), worker);
}

void RunBackwardReduce(const PassParams& params, const Task& task) {
  const Range tokens = TokensOfReduceTile(params, task);
  if (tokens.count == 0) return;  // behind the last token
  const TokenParams& token_params = params.tokens;
  const int64_t first_route = tokens.begin * params.shape.topk;
  const int64_t num_routes = tokens.count * int64_t{params.shape.topk};
  const UntypedMatrix& shared_d_x = params.backward.shared_d_x;
  const UntypedMatrix& d_x = token_params.reduced;
  const bool has_shared = params.shape.shared_intermediate > 0;
  // No factors: dx rows carry the router weight, and the shared scale, since DownGrad.
  TokenReduce(params.shape.isa, {
                                    .tokens = tokens.count,
                                    .hidden = params.shape.hidden,
                                    .topk = params.shape.topk,
                                    .dtype = params.shape.dtype,
                                    .shared = has_shared ? shared_d_x.At(tokens.begin, 0) : nullptr,
                                    .shared_stride = shared_d_x.row_stride,
                                    .y = FirstRow(params.reduce_rows, first_route, d_x.row_bytes()),
                                    .y_stride = d_x.row_stride,
                                    .y_rows = RowsOfRoutes(params.reduce_rows, first_route),
                                    .expert_ids = token_params.expert_ids + first_route,
                                    .out = d_x.At(tokens.begin, 0),
                                    .out_stride = d_x.row_stride,
                                });
  // Routes that do not exist have received nothing: their entries of the heap hold anything.
  for (int64_t route = first_route; route < first_route + num_routes; ++route) {
    token_params.d_topk_weight[route] =
        token_params.expert_ids[route] < 0 ? 0.0f : params.local_d_topk_weight[route];
  }
  if (token_params.d_shared_scale == nullptr) return;
  const MatrixView<float>& partial = params.backward.d_scale_partial;
  for (int64_t token = tokens.begin; token < tokens.begin + tokens.count; ++token) {
    float sum = 0;  // tiles ascending
    for (int64_t tile = 0; tile < partial.columns; ++tile) sum += partial(token, tile);
    token_params.d_shared_scale[token] = sum;
  }
}

}  // namespace mok
