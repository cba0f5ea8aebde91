#include "mok_gemm/host/tile_worker.h"

#include <algorithm>
#include <cstring>

#include "mok_core/status.h"
#include "mok_gemm/host/kernels.h"
#include "mok_gemm/host/tile_product.h"

namespace mok {
namespace {

constexpr int kAccumulatorStride = TileProduct::kMaxTile;

// The limits that the tile constants promise.
static_assert(kHostTileRows <= TileProduct::kMaxNtRows);
static_assert(2 * kHostTileI <= TileProduct::kMaxTile && kHostTileH <= TileProduct::kMaxTile);
static_assert(kHostGradTileRows <= TileProduct::kMaxTile);
static_assert(kHostGradTileColumns <= TileProduct::kMaxTile);

void CheckExtent(const char* what, int64_t value, int64_t limit) {
  MOK_CHECK(value >= 1 && value <= limit)
      << what << ": expected 1 to " << limit << ", got " << value;
}

}  // namespace

class TileWorkerImpl {
 public:
  TileWorkerImpl(Isa isa, DType dtype) : isa(isa), product(KernelsOf(isa, dtype)) {}

  // A matrix of the worker's dtype.
  Destination To(void* data, int64_t stride) const {
    return {.data = data, .stride = stride, .dtype = product.kernels().dtype};
  }

  // A matrix of the worker's dtype that an epilogue touches.
  PrefetchRange Touched(const void* data, int64_t stride, int rows, int columns) const {
    const int64_t bytes = ElementBytes(product.kernels().dtype);
    return {
        .first = data, .stride = stride * bytes, .num_rows = rows, .row_bytes = columns * bytes};
  }

  const Isa isa;
  TileProduct product;
};

TileWorker::TileWorker(Isa isa, DType dtype)
    : impl_(std::make_unique<TileWorkerImpl>(isa, dtype)) {}
TileWorker::~TileWorker() = default;
TileWorker::TileWorker(TileWorker&&) noexcept = default;
TileWorker& TileWorker::operator=(TileWorker&&) noexcept = default;

Isa TileWorker::isa() const { return impl_->isa; }
DType TileWorker::dtype() const { return impl_->product.kernels().dtype; }

void TileWorker::GateUp(const GateUpTile& tile) {
  CheckExtent("GateUp rows", tile.rows, kHostTileRows);
  CheckExtent("GateUp columns", tile.columns, kHostTileI);
  CheckExtent("GateUp hidden", tile.hidden, INT64_MAX);
  TileProduct& product = impl_->product;
  PrefetchList outputs;
  for (int i = 0; void* output : {tile.gate, tile.up, tile.activation}) {
    outputs.ranges[i++] = impl_->Touched(output, tile.out_stride, tile.rows, tile.columns);
  }
  const GateUpAccumulators accumulators =
      product.MultiplyNtTwice({.a = {tile.x, tile.x_stride},
                               .b = {tile.w_gate, tile.w_stride},
                               .rows = tile.rows,
                               .columns = tile.columns,
                               .depth = tile.hidden,
                               .epilogue = outputs},
                              tile.w_up);
  product.kernels().swiglu_forward(tile, accumulators);
}

void TileWorker::Down(const DownTile& tile) {
  CheckExtent("Down rows", tile.rows, kHostTileRows);
  CheckExtent("Down columns", tile.columns, kHostTileH);
  CheckExtent("Down intermediate", tile.intermediate, INT64_MAX);
  impl_->product.MultiplyNt(
      {.a = {tile.h, tile.h_stride},
       .b = {tile.w_down, tile.w_stride},
       .rows = tile.rows,
       .columns = tile.columns,
       .depth = tile.intermediate,
       .destination = impl_->To(tile.y, tile.y_stride),
       .epilogue = {{impl_->Touched(tile.y, tile.y_stride, tile.rows, tile.columns)}}});
}

void TileWorker::DownGrad(const DownGradTile& tile) {
  CheckExtent("DownGrad rows", tile.rows, kHostTileRows);
  CheckExtent("DownGrad columns", tile.columns, kHostTileI);
  CheckExtent("DownGrad hidden", tile.hidden, INT64_MAX);
  TileProduct& product = impl_->product;
  PrefetchList touched;
  for (int i = 0; const void* input : {tile.gate, tile.up}) {
    touched.ranges[i++] = impl_->Touched(input, tile.act_stride, tile.rows, tile.columns);
  }
  for (int i = 2; void* output : {tile.d_gate, tile.d_up, tile.weighted_h}) {
    touched.ranges[i++] = impl_->Touched(output, tile.d_stride, tile.rows, tile.columns);
  }
  product.MultiplyNn({.a = {tile.d_out, tile.d_out_stride},
                      .b = {tile.w_down, tile.w_stride},
                      .rows = tile.rows,
                      .columns = tile.columns,
                      .depth = tile.hidden,
                      .epilogue = touched});
  product.kernels().swiglu_backward(
      tile, {.d_hidden = product.accumulators(), .stride = kAccumulatorStride});
}

void TileWorker::InputGrad(const InputGradTile& tile) {
  CheckExtent("InputGrad rows", tile.rows, kHostTileRows);
  CheckExtent("InputGrad columns", tile.columns, kHostTileH);
  CheckExtent("InputGrad intermediate", tile.intermediate, INT64_MAX);
  TileProduct& product = impl_->product;
  TileProduct::Product gate = {.a = {tile.d_gate, tile.d_stride},
                               .b = {tile.w_gate, tile.w_stride},
                               .rows = tile.rows,
                               .columns = tile.columns,
                               .depth = tile.intermediate};
  TileProduct::Product up = gate;
  up.a.data = tile.d_up;
  up.b.data = tile.w_up;
  up.accumulate = true;
  up.destination = impl_->To(tile.d_x, tile.d_x_stride);
  gate.epilogue = product.FirstBlockNn(up);
  product.MultiplyNn(gate);
  product.MultiplyNn(up);
}

void TileWorker::WeightGrad(const WeightGradTile& tile) {
  CheckExtent("WeightGrad m", tile.m, kHostGradTileRows);
  CheckExtent("WeightGrad n", tile.n, kHostGradTileColumns);
  MOK_CHECK(tile.rows >= 0) << "WeightGrad rows: expected 0 or more, got " << tile.rows;
  MOK_CHECK(tile.carry_out == nullptr || tile.rows % kHostGradSplitRows == 0)
      << "WeightGrad rows before a split: expected a multiple of " << kHostGradSplitRows << ", got "
      << tile.rows;
  const bool empty = tile.rows == 0 && tile.carry_in == nullptr;
  if (empty && tile.carry_out == nullptr && tile.accumulate) return;
  TileProduct& product = impl_->product;
  Destination destination = {.data = tile.out,
                             .stride = tile.out_stride,
                             .dtype = tile.out_dtype,
                             .accumulate = tile.accumulate};
  if (tile.carry_out != nullptr) {
    destination = {.data = tile.carry_out, .stride = tile.carry_stride, .dtype = DType::kFp32};
  }
  if (tile.carry_in != nullptr) {
    for (int row = 0; row < tile.m; ++row) {
      std::memcpy(product.accumulators() + row * kAccumulatorStride,
                  tile.carry_in + row * tile.carry_stride, sizeof(float) * tile.n);
    }
  } else if (tile.rows == 0) {
    std::fill_n(product.accumulators(), tile.m * kAccumulatorStride, 0.0f);
  }
  if (tile.rows == 0) {
    product.kernels().store({.c = product.accumulators(),
                             .c_stride = kAccumulatorStride,
                             .rows = tile.m,
                             .columns = tile.n,
                             .destination = destination});
    return;
  }
  product.MultiplyTn({.a = {tile.a, tile.a_stride},
                      .b = {tile.b, tile.b_stride},
                      .rows = tile.m,
                      .columns = tile.n,
                      .depth = tile.rows,
                      .accumulate = tile.carry_in != nullptr,
                      .destination = destination});
}

}  // namespace mok
