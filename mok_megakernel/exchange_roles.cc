// The four exchanges, driven by the reader: pulls and pushes of one row block.
#include "mok_megakernel/row_range.h"
#include "mok_megakernel/task_roles.h"

namespace mok {
namespace {

LocalRows RingRows(const UntypedMatrix& matrix, int64_t first_row) {
  return {matrix.At(first_row, 0), matrix.row_bytes(), matrix.row_bytes()};
}

RowTable TableRows(const PassParams& params, const BlockRows& rows) {
  return params.exchange.table.Block(rows.table_row, rows.rows);
}

}  // namespace

void RunDispatch(const PassParams& params, const Task& task) {
  const BlockRows rows = RowsOfBlock(params, task);
  PullRows(TableRows(params, rows), params.shape.topk, params.exchange.x,
           RingRows(params.ring.x, rows.ring_row));
  ClearSpareRows(params, params.ring.x, rows, {0, static_cast<int>(params.shape.hidden)});
}

void RunCombine(const PassParams& params, const Task& task) {
  if (params.reduce_rows.stay_in_ring()) return;
  const BlockRows rows = RowsOfBlock(params, task);
  PushRows(TableRows(params, rows), RingRows(params.forward.y, rows.ring_row),
           params.exchange.rows);
}

void RunReverseCombine(const PassParams& params, const Task& task) {
  const BlockRows rows = RowsOfBlock(params, task);
  const RowTable table = TableRows(params, rows);
  PullRows(table, params.shape.topk, params.exchange.d_out,
           RingRows(params.backward.d_out, rows.ring_row));
  PullScalars(table, params.exchange.topk_weight, params.backward.router_weight + rows.ring_row);
}

void RunReverseDispatch(const PassParams& params, const Task& task) {
  const BlockRows rows = RowsOfBlock(params, task);
  const RowTable table = TableRows(params, rows);
  if (!params.reduce_rows.stay_in_ring()) {
    PushRows(table, RingRows(params.backward.d_x, rows.ring_row), params.exchange.rows);
  }
  // The router gradient of a row: its tiles' partial sums, tiles ascending.
  const MatrixView<float>& partial = params.backward.d_router_partial;
  float* d_router = params.backward.d_router + rows.ring_row;
  for (int row = 0; row < rows.rows; ++row) {
    const float* partial_row = partial.Row(rows.ring_row + row);
    float sum = 0;
    for (int64_t tile = 0; tile < partial.columns; ++tile) sum += partial_row[tile];
    d_router[row] = sum;
  }
  PushScalars(table, d_router, params.exchange.d_topk_weight);
}

}  // namespace mok
