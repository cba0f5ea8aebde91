#include "mok_gemm/host/tile_product.h"

#include <algorithm>

#include "mok_core/bits.h"

namespace mok {
namespace {

// Units of a K block. With 32-column panels a panel is 32 KiB and a group of 13 rows 13 KiB: both
// fit the 48 KiB L1 data cache of current cores, all panels of a tile half of their L2 or less.
constexpr int64_t kBlockUnits = 256;

// Rows packed for broadcasting are this many floats longer than a K block, so that rows do not
// compete for the same cache sets.
constexpr int64_t kRowPadding = 16;

}  // namespace

TileProduct::TileProduct(const KernelTable& kernels)
    : kernels_(kernels),
      panels_(kMaxTile * kBlockUnits),
      rows_(kMaxTile * (kBlockUnits + kRowPadding)),
      transposed_(kMaxTile * kMaxNtRows),
      accumulators_(kMaxTile * kMaxTile) {}

template <class Body>
void TileProduct::ForEachDepthBlock(int64_t depth, const Body& body) const {
  const int64_t block = kBlockUnits * kernels_.elements_per_unit;
  for (int64_t k = 0; k < depth; k += block) body(k, std::min(block, depth - k));
}

int64_t TileProduct::PanelPitch(int64_t depth) const {
  return CeilDiv<int64_t>(depth, kernels_.elements_per_unit) * kernels_.panel_columns;
}

const char* TileProduct::At(const Operand& operand, int64_t row, int64_t column) const {
  return static_cast<const char*>(operand.data) +
         (row * operand.stride + column) * ElementBytes(kernels_.dtype);
}

// A row of units is used where it lies. What is not made of whole units, a last odd element or
// everything that has to be widened, is packed first.
void TileProduct::MultiplyRows(const RowBlock& rows, const PanelBlock& target) {
  MultiplyArguments multiply = {.units = 0,
                                .rows = rows.rows.data,
                                .row_stride = rows.rows.stride * ElementBytes(kernels_.dtype),
                                .unit_stride = sizeof(float),
                                .num_rows = rows.count,
                                .panels = target.panels,
                                .panel_pitch = target.pitch,
                                .num_columns = target.columns,
                                .c = target.c,
                                .c_stride = target.c_stride,
                                .accumulate = target.accumulate};
  int64_t done = 0;
  if (kernels_.rows_are_units) {
    multiply.units = rows.depth / kernels_.elements_per_unit;
    done = multiply.units * kernels_.elements_per_unit;
    if (multiply.units > 0) kernels_.multiply(multiply);
    if (done == rows.depth) return;
    multiply.accumulate |= multiply.units > 0;
    multiply.panels += multiply.units * kernels_.panel_columns;
  }
  const int64_t units = CeilDiv<int64_t>(rows.depth - done, kernels_.elements_per_unit);
  const int64_t pitch = RoundUp<int64_t>(units, kernels_.lanes) + kRowPadding;
  kernels_.pack_rows({.source = At(rows.rows, 0, done),
                      .stride = rows.rows.stride,
                      .depth = rows.depth - done,
                      .count = rows.count,
                      .packed = rows_.get(),
                      .pitch = pitch});
  multiply.units = units;
  multiply.rows = rows_.get();
  multiply.row_stride = pitch * static_cast<int64_t>(sizeof(float));
  kernels_.multiply(multiply);
}

void TileProduct::MultiplyNt(const Product& product) { MultiplyNtTwice(product, nullptr); }

// The rows of b are many and used once per tile, the rows of a are few: so b is the broadcast
// operand, read where it lies, and only a is packed. The product comes out transposed.
void TileProduct::MultiplyNtTwice(const Product& product, const void* c) {
  constexpr int kSecond = kMaxTile / 2;
  ForEachDepthBlock(product.depth, [&](int64_t k, int64_t depth) {
    kernels_.pack_transposed({.source = At(product.a, 0, k),
                              .stride = product.a.stride,
                              .depth = depth,
                              .count = product.rows,
                              .packed = panels_.get(),
                              .pitch = PanelPitch(depth)});
    PanelBlock target = {.panels = panels_.get(),
                         .pitch = PanelPitch(depth),
                         .columns = product.rows,
                         .c = transposed_.get(),
                         .c_stride = kMaxNtRows,
                         .accumulate = k > 0};
    RowBlock rows = {{At(product.b, 0, k), product.b.stride}, product.columns, depth};
    MultiplyRows(rows, target);
    if (c == nullptr) return;
    rows.rows.data = At({c, product.b.stride}, 0, k);
    target.c += kSecond * kMaxNtRows;
    MultiplyRows(rows, target);
  });
  TransposeArguments transpose = {.in = transposed_.get(),
                                  .in_stride = kMaxNtRows,
                                  .rows = product.rows,
                                  .columns = product.columns,
                                  .out = accumulators_.get(),
                                  .out_stride = kMaxTile};
  kernels_.transpose(transpose);
  if (c == nullptr) return;
  transpose.in += kSecond * kMaxNtRows;
  transpose.out += kSecond;
  kernels_.transpose(transpose);
}

void TileProduct::MultiplyNn(const Product& product) {
  ForEachDepthBlock(product.depth, [&](int64_t k, int64_t depth) {
    kernels_.pack_interleaved({.source = At(product.b, k, 0),
                               .stride = product.b.stride,
                               .depth = depth,
                               .count = product.columns,
                               .packed = panels_.get(),
                               .pitch = PanelPitch(depth)});
    MultiplyRows({{At(product.a, 0, k), product.a.stride}, product.rows, depth},
                 {.panels = panels_.get(),
                  .pitch = PanelPitch(depth),
                  .columns = product.columns,
                  .c = accumulators_.get(),
                  .c_stride = kMaxTile,
                  .accumulate = product.accumulate || k > 0});
  });
}

// Both operands are packed into panels; a panel serves as broadcast operand too, its columns being
// the rows, one unit apart.
void TileProduct::MultiplyTn(const Product& product) {
  ForEachDepthBlock(product.depth, [&](int64_t k, int64_t depth) {
    const int64_t pitch = PanelPitch(depth);
    PackArguments pack = {.source = At(product.a, k, 0),
                          .stride = product.a.stride,
                          .depth = depth,
                          .count = product.rows,
                          .packed = rows_.get(),
                          .pitch = pitch};
    kernels_.pack_interleaved(pack);
    pack.source = At(product.b, k, 0);
    pack.stride = product.b.stride;
    pack.count = product.columns;
    pack.packed = panels_.get();
    kernels_.pack_interleaved(pack);
    for (int row = 0; row < product.rows; row += kernels_.panel_columns) {
      const int64_t unit_stride = kernels_.panel_columns * static_cast<int64_t>(sizeof(float));
      kernels_.multiply({.units = pitch / kernels_.panel_columns,
                         .rows = rows_.get() + row / kernels_.panel_columns * pitch,
                         .row_stride = sizeof(float),
                         .unit_stride = unit_stride,
                         .num_rows = std::min(kernels_.panel_columns, product.rows - row),
                         .panels = panels_.get(),
                         .panel_pitch = pitch,
                         .num_columns = product.columns,
                         .c = accumulators_.get() + static_cast<int64_t>(row) * kMaxTile,
                         .c_stride = kMaxTile,
                         .accumulate = product.accumulate || k > 0});
    }
  });
}

}  // namespace mok
