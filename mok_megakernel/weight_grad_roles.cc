// Weight gradients: one tile of one expert's gradient, summed over the rows that the expert has in
// one macrobatch. Rows are added in the order of the routing table, and the partial sum of an
// expert that crosses into the next macrobatch travels in fp32, so the bits do not depend on where
// macrobatches end.
#include "mok_megakernel/row_range.h"
#include "mok_megakernel/task_roles.h"

namespace mok {
namespace {

// out[first_out_row + i, j] (+)= sum over rows of a[row, i] * b[row, j].
struct WeightGradOperands {
  ConstUntypedMatrix a;
  ConstUntypedMatrix b;
  int64_t first_row;
  int64_t rows;
  UntypedMatrix out;
  int64_t first_out_row;
  bool accumulate;
  MatrixView<float> carry;  // [columns of a, columns of b]
  bool carry_in;
  bool carry_out;
};

void RunWeightGradTile(const WeightGradOperands& operands, int64_t tile, TileWorker& worker) {
  if (operands.out.data == nullptr) return;  // the caller does not want this gradient
  const int64_t tiles_n = (operands.b.columns + kHostGradTileColumns - 1) / kHostGradTileColumns;
  const Range m = TileRange(tile / tiles_n, kHostGradTileRows, operands.a.columns);
  const Range n = TileRange(tile % tiles_n, kHostGradTileColumns, operands.b.columns);
  const bool carries = operands.carry_in || operands.carry_out;
  float* carry = carries ? &operands.carry(m.begin, n.begin) : nullptr;
  // Without rows the operands may be null.
  const bool empty = operands.rows == 0;
  worker.WeightGrad({
      .a = empty ? nullptr : operands.a.At(operands.first_row, m.begin),
      .a_stride = operands.a.row_stride,
      .b = empty ? nullptr : operands.b.At(operands.first_row, n.begin),
      .b_stride = operands.b.row_stride,
      .rows = operands.rows,
      .m = m.count,
      .n = n.count,
      .carry_in = operands.carry_in ? carry : nullptr,
      .carry_out = operands.carry_out ? carry : nullptr,
      .carry_stride = operands.carry.row_stride,
      .out = operands.out.At(operands.first_out_row + m.begin, n.begin),
      .out_stride = operands.out.row_stride,
      .out_dtype = operands.out.dtype,
      .accumulate = operands.accumulate,
  });
}

int64_t RingRowOfPiece(const PassParams& params, const WeightGradPiece& piece) {
  return params.ring_plan.slot_of_block(piece.first_block) * int64_t{kRowBlock};
}

// Tiles of the gate and the up gradient alternate: both read the same rows of x.
struct GateUpTileIndex {
  bool is_up;
  int64_t tile;
};
GateUpTileIndex SplitGateUpTile(int64_t tile) { return {tile % 2 != 0, tile / 2}; }

}  // namespace

void RunWeightGradDown(const PassParams& params, const WeightGradPiece& piece, const Task& task,
                       TileWorker& worker) {
  RunWeightGradTile(
      {params.backward.d_out, params.backward.weighted_h, RingRowOfPiece(params, piece),
       piece.num_rows, params.d_routed.down, task.expert * params.shape.hidden,
       params.d_routed.accumulate, params.backward.carry_down, piece.carry_in, piece.carry_out},
      task.tile, worker);
}

void RunWeightGradGateUp(const PassParams& params, const WeightGradPiece& piece, const Task& task,
                         TileWorker& worker) {
  const GateUpTileIndex index = SplitGateUpTile(task.tile);
  const BackwardScratch& scratch = params.backward;
  RunWeightGradTile(
      {index.is_up ? scratch.d_up : scratch.d_gate, params.ring.x, RingRowOfPiece(params, piece),
       piece.num_rows, index.is_up ? params.d_routed.up : params.d_routed.gate,
       task.expert * params.shape.intermediate, params.d_routed.accumulate,
       index.is_up ? scratch.carry_up : scratch.carry_gate, piece.carry_in, piece.carry_out},
      index.tile, worker);
}

void RunSharedWeightGradDown(const PassParams& params, const Task& task, TileWorker& worker) {
  RunWeightGradTile({params.tokens.d_out,
                     params.backward.shared_weighted_h,
                     0,
                     params.shape.num_tokens,
                     params.d_shared.down,
                     0,
                     params.d_shared.accumulate,
                     {},
                     false,
                     false},
                    task.tile, worker);
}

void RunSharedWeightGradGateUp(const PassParams& params, const Task& task, TileWorker& worker) {
  const GateUpTileIndex index = SplitGateUpTile(task.tile);
  const BackwardScratch& scratch = params.backward;
  RunWeightGradTile({index.is_up ? scratch.shared_d_up : scratch.shared_d_gate,
                     params.tokens.x,
                     0,
                     params.shape.num_tokens,
                     index.is_up ? params.d_shared.up : params.d_shared.gate,
                     0,
                     params.d_shared.accumulate,
                     {},
                     false,
                     false},
                    index.tile, worker);
}

}  // namespace mok
