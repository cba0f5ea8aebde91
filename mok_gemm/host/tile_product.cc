#include "mok_gemm/host/tile_product.h"

#include <algorithm>

#include "mok_core/bits.h"

namespace mok {
namespace {

// Units of a K block. With 32 columns a panel is 32 KiB and stays in the 48 KiB L1 data cache of
// current cores, while groups of 13 rows, 13 KiB each, pass by.
constexpr int64_t kBlockUnits = 256;
constexpr int64_t kMaxPanelColumns = 32;

// Packed rows are this many floats further apart than a K block is long, so that they do not
// compete for the same cache sets.
constexpr int64_t kRowPadding = 16;
constexpr int64_t kRowPitch = kBlockUnits + kRowPadding;

constexpr int kMinNtRowsToPrefetch = 48;

}  // namespace

TileProduct::TileProduct(const KernelTable& kernels)
    : kernels_(kernels),
      panel_(kMaxPanelColumns * kBlockUnits),
      rows_(kMaxTile * kRowPitch),
      transposed_(kMaxTile * kMaxNtRows),
      accumulators_(kMaxTile * kMaxTile) {}

template <class Body>
void TileProduct::ForEachDepthBlock(int64_t depth, const Body& body) const {
  const int64_t block = kBlockUnits * kernels_.elements_per_unit;
  for (int64_t k = 0; k < depth; k += block) {
    const int64_t here = std::min(block, depth - k);
    body(DepthBlock{k, here, std::min(block, depth - k - here)});
  }
}

template <class Body>
void TileProduct::ForEachPanel(int count, const Body& body) const {
  const int num_panels = CeilDiv(count, kernels_.panel_columns);
  for (int panel = 0; panel < num_panels; ++panel) {
    const int first = panel * kernels_.panel_columns;
    const auto share = [&](PrefetchRange range) {
      const int64_t begin = range.num_rows * panel / num_panels;
      range.first = static_cast<const char*>(range.first) + begin * range.stride;
      range.num_rows = range.num_rows * (panel + 1) / num_panels - begin;
      return range;
    };
    body(first, std::min(kernels_.panel_columns, count - first), share);
  }
}

const char* TileProduct::At(const Operand& operand, int64_t row, int64_t column) const {
  return static_cast<const char*>(operand.data) +
         (row * operand.stride + column) * ElementBytes(kernels_.dtype);
}

PrefetchRange TileProduct::Range(const Operand& operand, int64_t row, int64_t column, int64_t rows,
                                 int64_t columns) const {
  return {.first = At(operand, row, column),
          .stride = operand.stride * ElementBytes(kernels_.dtype),
          .num_rows = columns > 0 ? rows : 0,
          .row_bytes = columns * ElementBytes(kernels_.dtype)};
}

// A row of units is used where it lies. What is not made of whole units, a last odd element or
// everything that has to be widened, is packed.
TileProduct::Rows TileProduct::MakeRows(const Operand& operand, int count, int64_t depth,
                                        float* scratch) const {
  Rows rows;
  rows.count = count;
  int64_t done = 0;
  if (kernels_.rows_are_units) {
    const int64_t units = depth / kernels_.elements_per_unit;
    rows.parts[0] = {operand.data, operand.stride * ElementBytes(kernels_.dtype), units};
    done = units * kernels_.elements_per_unit;
  }
  if (done < depth) {
    kernels_.pack_rows({.source = At(operand, 0, done),
                        .stride = operand.stride,
                        .depth = depth - done,
                        .count = count,
                        .packed = scratch,
                        .pitch = kRowPitch});
    rows.parts[1] = {scratch, kRowPitch * int64_t{sizeof(float)},
                     CeilDiv<int64_t>(depth - done, kernels_.elements_per_unit)};
  }
  return rows;
}

void TileProduct::MultiplyPanel(const Rows& rows, const PanelTarget& target) const {
  MultiplyArguments multiply = {.units = 0,
                                .rows = nullptr,
                                .row_stride = 0,
                                .unit_stride = rows.unit_stride,
                                .num_rows = rows.count,
                                .panel = panel_.get(),
                                .num_columns = target.num_columns,
                                .c = target.c,
                                .c_stride = target.c_stride,
                                .accumulate = target.accumulate,
                                .prefetch = {target.prefetch[0], target.prefetch[1]}};
  for (const auto& part : rows.parts) {
    if (part.units == 0) continue;
    multiply.rows = part.data;
    multiply.row_stride = part.stride;
    multiply.units = part.units;
    kernels_.multiply(multiply);
    multiply.panel += part.units * kernels_.panel_columns;
    multiply.accumulate = true;
  }
}

void TileProduct::MultiplyNt(const Product& product) { MultiplyNtTwice(product, nullptr); }

// The rows of b are many and used once per tile, the rows of a are few: so b is the broadcast
// operand, read where it lies, and only a is packed. The product comes out transposed.
void TileProduct::MultiplyNtTwice(const Product& product, const void* c) {
  constexpr int kSecond = kMaxTile / 2;
  const Operand rights[] = {product.b, {c, product.b.stride}};
  const int num_rights = c == nullptr ? 1 : 2;
  // Few rows give too little work to hide the fetch behind, and the processor's own prefetching
  // follows the rows of b well; the short rows of the other products it does not.
  const bool fetch = product.rows > kMinNtRowsToPrefetch;
  ForEachDepthBlock(product.depth, [&](const DepthBlock& block) {
    Rows rows[2];
    for (int i = 0; i < num_rights; ++i) {
      rows[i] = MakeRows({At(rights[i], 0, block.k), rights[i].stride}, product.columns,
                         block.depth, rows_.get() + i * kSecond * kRowPitch);
    }
    ForEachPanel(product.rows, [&](int first, int columns, const auto& share) {
      kernels_.pack_transposed({.source = At(product.a, first, block.k),
                                .stride = product.a.stride,
                                .depth = block.depth,
                                .count = columns,
                                .packed = panel_.get(),
                                .pitch = 0});
      const int64_t next = block.k + block.depth;
      for (int i = 0; i < num_rights; ++i) {
        const auto next_a = Range(product.a, 0, next, product.rows, block.next_depth);
        const auto next_b = Range(rights[i], 0, next, product.columns, block.next_depth);
        MultiplyPanel(rows[i], {.num_columns = columns,
                                .c = transposed_.get() + i * kSecond * kMaxNtRows + first,
                                .c_stride = kMaxNtRows,
                                .accumulate = block.k > 0,
                                .prefetch = {fetch ? share(next_b) : PrefetchRange{},
                                             fetch && i == 0 ? share(next_a) : PrefetchRange{}}});
      }
    });
  });
  for (int i = 0; i < num_rights; ++i) {
    kernels_.transpose({.in = transposed_.get() + i * kSecond * kMaxNtRows,
                        .in_stride = kMaxNtRows,
                        .rows = product.rows,
                        .columns = product.columns,
                        .out = accumulators_.get() + i * kSecond,
                        .out_stride = kMaxTile});
  }
}

void TileProduct::MultiplyNn(const Product& product) {
  ForEachDepthBlock(product.depth, [&](const DepthBlock& block) {
    const Rows rows = MakeRows({At(product.a, 0, block.k), product.a.stride}, product.rows,
                               block.depth, rows_.get());
    ForEachPanel(product.columns, [&](int first, int columns, const auto& share) {
      kernels_.pack_interleaved({.source = At(product.b, block.k, first),
                                 .stride = product.b.stride,
                                 .depth = block.depth,
                                 .count = columns,
                                 .packed = panel_.get(),
                                 .pitch = 0});
      const int64_t next = block.k + block.depth;
      const auto next_a = Range(product.a, 0, next, product.rows, block.next_depth);
      const auto next_b = Range(product.b, next, 0, block.next_depth, product.columns);
      MultiplyPanel(rows, {.num_columns = columns,
                           .c = accumulators_.get() + first,
                           .c_stride = kMaxTile,
                           .accumulate = product.accumulate || block.k > 0,
                           .prefetch = {share(next_b), share(next_a)}});
    });
  });
}

// a is packed into panels as well. A panel serves as broadcast operand too, its columns being the
// rows, one unit apart.
void TileProduct::MultiplyTn(const Product& product) {
  ForEachDepthBlock(product.depth, [&](const DepthBlock& block) {
    const int64_t units = CeilDiv<int64_t>(block.depth, kernels_.elements_per_unit);
    ForEachPanel(product.rows, [&](int first, int rows, const auto&) {
      kernels_.pack_interleaved({.source = At(product.a, block.k, first),
                                 .stride = product.a.stride,
                                 .depth = block.depth,
                                 .count = rows,
                                 .packed = rows_.get() + first * units,
                                 .pitch = 0});
    });
    ForEachPanel(product.columns, [&](int first_column, int columns, const auto& share) {
      kernels_.pack_interleaved({.source = At(product.b, block.k, first_column),
                                 .stride = product.b.stride,
                                 .depth = block.depth,
                                 .count = columns,
                                 .packed = panel_.get(),
                                 .pitch = 0});
      const int64_t next = block.k + block.depth;
      const auto next_a = share(Range(product.a, next, 0, block.next_depth, product.rows));
      const auto next_b = share(Range(product.b, next, 0, block.next_depth, product.columns));
      ForEachPanel(product.rows, [&](int first_row, int rows, const auto& share_of_row_panel) {
        MultiplyPanel({.count = rows,
                       .unit_stride = kernels_.panel_columns * int64_t{sizeof(float)},
                       .parts = {{rows_.get() + first_row * units, sizeof(float), units}, {}}},
                      {.num_columns = columns,
                       .c = accumulators_.get() + first_row * kMaxTile + first_column,
                       .c_stride = kMaxTile,
                       .accumulate = product.accumulate || block.k > 0,
                       .prefetch = {share_of_row_panel(next_a), share_of_row_panel(next_b)}});
      });
    });
  });
}

}  // namespace mok
