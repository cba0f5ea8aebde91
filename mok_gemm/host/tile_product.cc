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
  for (int64_t k = 0; k < depth; k += block) {
    const int64_t here = std::min(block, depth - k);
    body(k, here, std::min(block, depth - k - here));
  }
}

int64_t TileProduct::PanelPitch(int64_t depth) const {
  return CeilDiv<int64_t>(depth, kernels_.elements_per_unit) * kernels_.panel_columns;
}

const char* TileProduct::At(const Operand& operand, int64_t row, int64_t column) const {
  return static_cast<const char*>(operand.data) +
         (row * operand.stride + column) * ElementBytes(kernels_.dtype);
}

PrefetchRange TileProduct::Prefetch(const Operand& operand, int64_t first_row, int64_t first_column,
                                    int64_t rows, int64_t columns) const {
  return {.first = At(operand, first_row, first_column),
          .stride = operand.stride * ElementBytes(kernels_.dtype),
          .num_rows = static_cast<int>(columns > 0 ? rows : 0),
          .row_bytes = columns * ElementBytes(kernels_.dtype)};
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
                                .accumulate = target.accumulate,
                                .prefetch = {target.prefetch[0], target.prefetch[1]}};
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
  ForEachDepthBlock(product.depth, [&](int64_t k, int64_t depth, int64_t next_depth) {
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
                         .accumulate = k > 0,
                         .prefetch = {}};
    const PrefetchRange next[] = {Prefetch(product.b, 0, k + depth, product.columns, next_depth),
                                  Prefetch(product.a, 0, k + depth, product.rows, next_depth)};
    RowBlock rows = {{At(product.b, 0, k), product.b.stride}, product.columns, depth};
    if (c != nullptr) {
      const Operand second = {At({c, product.b.stride}, 0, k), product.b.stride};
      target.prefetch[0] = Prefetch(second, 0, 0, product.columns, depth);
      MultiplyRows(rows, target);
      rows.rows = second;
      target.c += kSecond * kMaxNtRows;
    }
    target.prefetch[0] = next[0];
    target.prefetch[1] = next[1];
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
  ForEachDepthBlock(product.depth, [&](int64_t k, int64_t depth, int64_t next_depth) {
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
                  .accumulate = product.accumulate || k > 0,
                  .prefetch = {Prefetch(product.b, k + depth, 0, next_depth, product.columns),
                               Prefetch(product.a, 0, k + depth, product.rows, next_depth)}});
  });
}

// Both operands are packed into panels; a panel serves as broadcast operand too, its columns being
// the rows, one unit apart.
void TileProduct::MultiplyTn(const Product& product) {
  ForEachDepthBlock(product.depth, [&](int64_t k, int64_t depth, int64_t next_depth) {
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
    const int64_t num_row_panels = CeilDiv(product.rows, kernels_.panel_columns);
    for (int64_t panel = 0; panel < num_row_panels; ++panel) {
      const int64_t row = panel * kernels_.panel_columns;
      // Each row panel fetches its share of the next block.
      const int64_t first = k + depth + next_depth * panel / num_row_panels;
      const int64_t last = k + depth + next_depth * (panel + 1) / num_row_panels;
      kernels_.multiply(
          {.units = pitch / kernels_.panel_columns,
           .rows = rows_.get() + panel * pitch,
           .row_stride = sizeof(float),
           .unit_stride = kernels_.panel_columns * int64_t{sizeof(float)},
           .num_rows =
               static_cast<int>(std::min<int64_t>(kernels_.panel_columns, product.rows - row)),
           .panels = panels_.get(),
           .panel_pitch = pitch,
           .num_columns = product.columns,
           .c = accumulators_.get() + row * kMaxTile,
           .c_stride = kMaxTile,
           .accumulate = product.accumulate || k > 0,
           .prefetch = {Prefetch(product.a, first, 0, last - first, product.rows),
                        Prefetch(product.b, first, 0, last - first, product.columns)}});
    }
  });
}

}  // namespace mok
