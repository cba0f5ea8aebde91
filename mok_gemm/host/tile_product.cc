#include "mok_gemm/host/tile_product.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>

#include "mok_core/bits.h"
#include "mok_core/macros.h"
#include "mok_core/status.h"

namespace mok {
namespace {

// Units of a K block. With 32 columns a panel is 32 KiB and stays in the 48 KiB L1 data cache of
// current cores, while groups of 13 rows, 13 KiB each, pass by.
constexpr int64_t kBlockUnits = 256;
// Where an operand is K-major: its rows often lie a large power of two apart and then share few
// sets of the L2 cache, which must hold a block from its prefetch to its use.
constexpr int64_t kBlockUnitsKMajor = 128;

// Packed rows, or packed units of all rows, are one cache line further apart than they are long, so
// that they do not compete for the same cache sets.
constexpr int64_t kPadding = 16;
constexpr int64_t kRowPitch = kBlockUnits + kPadding;
constexpr int64_t kUnitPitch = TileProduct::kMaxTile + kPadding;

// In an NT product rows are fetched this far ahead of the first ones: more than any group of rows.
constexpr int kLeadRows = 16;

// Up to this K, putting an NT product upright costs more than packing the larger operand.
constexpr int64_t kMaxUprightDepth = 256;

// Packing a panel costs as much as multiplying it by this many rows, and a panel of one vector,
// whose multiplications wait for loads, as much as one of this many more columns.
constexpr int kPackingRows = 8;
constexpr int kHalfPanelColumns = 3;

}  // namespace

Scratch::Scratch() : data_(::operator new(kBytes, kAlignment)) {
#if defined(__linux__)
  // A wish: without it the same code runs on small pages.
  madvise(data_.get(), kBytes, MADV_HUGEPAGE);
#endif
}

float* Scratch::Take(int64_t count) {
  float* taken = reinterpret_cast<float*>(static_cast<std::byte*>(data_.get()) + taken_);
  taken_ += RoundUp<size_t>(count * sizeof(float), kCacheLineBytes);
  MOK_CHECK(taken_ <= kBytes) << "scratch: " << taken_ << " bytes wanted";
  return taken;
}

TileProduct::TileProduct(const KernelTable& kernels)
    : kernels_(kernels),
      panels_(scratch_.Take(kMaxNtRows * kBlockUnits)),
      rows_(scratch_.Take(std::max(kMaxTile * kRowPitch, kBlockUnitsKMajor * kUnitPitch))),
      transposed_(scratch_.Take(kMaxTile * kMaxNtRows)),
      accumulators_(scratch_.Take(kMaxTile * kMaxTile)) {}

template <class Body>
void TileProduct::ForEachDepthBlock(int64_t depth, int64_t units, const Body& body) const {
  const int64_t full = units * kernels_.elements_per_unit;
  // A short first block, of which little is fetched ahead of its use, pays where the processor's
  // own prefetching does not help and more blocks follow.
  int64_t block = units == kBlockUnitsKMajor && depth > 2 * full ? full / 2 : full;
  for (int64_t k = 0; k < depth;) {
    const int64_t here = std::min(block, depth - k);
    block = full;
    body(DepthBlock{k, here, std::min(block, depth - k - here)});
    k += here;
  }
}

template <class Body>
void TileProduct::ForEachPanel(int count, const Body& body) const {
  const int num_panels = CeilDiv(count, kernels_.panel_columns);
  for (int panel = 0; panel < num_panels; ++panel) {
    const int first = panel * kernels_.panel_columns;
    const auto share = [&](PrefetchList list) {
      for (PrefetchRange& range : list.ranges) {
        const int64_t begin = range.num_rows * panel / num_panels;
        range.first = static_cast<const char*>(range.first) + begin * range.stride;
        range.num_rows = range.num_rows * (panel + 1) / num_panels - begin;
      }
      return list;
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

Destination TileProduct::Finish(const Product& product, const DepthBlock& block, int column) {
  Destination destination = product.destination;
  if (block.next_depth > 0 || destination.data == nullptr) return {};
  destination.data =
      static_cast<char*>(destination.data) + column * ElementBytes(destination.dtype);
  return destination;
}

PackArguments TileProduct::Columns(const Operand& operand, const DepthBlock& block, int first,
                                   int count, float* packed) const {
  return {.source = At(operand, block.k, first),
          .stride = operand.stride,
          .depth = block.depth,
          .count = count,
          .packed = packed};
}

void TileProduct::MultiplyPanels(const Rows& rows, const PanelTarget& target) const {
  MultiplyArguments multiply = {.units = 0,
                                .rows = nullptr,
                                .row_stride = 0,
                                .unit_stride = rows.unit_stride,
                                .num_rows = rows.count,
                                .panel = panels_,
                                .num_columns = target.num_columns,
                                .panel_stride = kBlockUnits * kernels_.panel_columns,
                                .to_pack = target.to_pack,
                                .c = target.c,
                                .c_stride = target.c_stride,
                                .accumulate = target.accumulate,
                                .destination = {},
                                .prefetch = target.prefetch};
  const int last_part = rows.parts[1].units > 0 ? 1 : 0;
  for (int part = 0; part <= last_part; ++part) {
    multiply.units = rows.parts[part].units;
    if (multiply.units == 0) continue;
    multiply.rows = rows.parts[part].data;
    multiply.row_stride = rows.parts[part].stride;
    if (part == last_part) multiply.destination = target.destination;
    kernels_.multiply(multiply);
    multiply.panel += multiply.units * kernels_.panel_columns;
    multiply.accumulate = true;
    if (target.to_pack.source == nullptr) continue;
    const int64_t packed = multiply.units * kernels_.elements_per_unit;
    multiply.to_pack.source = At({multiply.to_pack.source, target.to_pack.stride}, packed, 0);
    multiply.to_pack.depth -= packed;
  }
}

// Rows come in a few groups ahead of those in use, of this operand and then of the next; behind
// them, the next block of a.
PrefetchList TileProduct::FetchNt(const Product& product, const DepthBlock& block,
                                  const Operand* rights, int num_rights, int right) const {
  const int64_t next = block.k + block.depth;
  const bool last = right == num_rights - 1;
  const int lead = std::min(kLeadRows, product.columns);
  PrefetchList list;
  if (kernels_.rows_are_units) {
    list.ranges[0] = Range(rights[right], lead, block.k, product.columns - lead, block.depth);
    list.ranges[1] = last ? Range(rights[0], 0, next, lead, block.next_depth)
                          : Range(rights[right + 1], 0, block.k, lead, block.depth);
  } else {  // this block has been read already, and packed
    list.ranges[0] = Range(rights[right], 0, next, product.columns, block.next_depth);
  }
  const int begin = product.rows * right / num_rights;
  const int end = product.rows * (right + 1) / num_rights;
  list.ranges[2] = Range(product.a, begin, next, end - begin, block.next_depth);
  if (last && block.next_depth == 0) {
    std::copy_n(product.epilogue.ranges, PrefetchList::kSize - 3, list.ranges + 3);
  }
  return list;
}

// The rows of b are many and used once per tile, the rows of a are few: so b is the broadcast
// operand, read where it lies, and only a is packed, all of a K block at once. The product comes
// out transposed.
void TileProduct::MultiplyNtInto(const Product& product, const Operand* rights, int num_rights) {
  ForEachDepthBlock(product.depth, kBlockUnits, [&](const DepthBlock& block) {
    ForEachPanel(product.rows, [&](int first, int columns, const auto&) {
      kernels_.pack_transposed({.source = At(product.a, first, block.k),
                                .stride = product.a.stride,
                                .depth = block.depth,
                                .count = columns,
                                .packed = panels_ + first * kBlockUnits});
    });
    for (int i = 0; i < num_rights; ++i) {
      const Rows rows = MakeRows({At(rights[i], 0, block.k), rights[i].stride}, product.columns,
                                 block.depth, rows_);
      MultiplyPanels(rows, {.num_columns = product.rows,
                            .to_pack = {},
                            .c = transposed_ + i * kSecond * kMaxNtRows,
                            .c_stride = kMaxNtRows,
                            .accumulate = block.k > 0,
                            .destination = {},
                            .prefetch = FetchNt(product, block, rights, num_rights, i)});
    }
  });
}

// The same bits with a as the broadcast operand: b, which is larger, has to be packed, but the
// product comes out upright, and no column of a vector is multiplied for nothing.
void TileProduct::MultiplyNtUpright(const Product& product, float* accumulators) {
  ForEachDepthBlock(product.depth, kBlockUnits, [&](const DepthBlock& block) {
    const Rows rows =
        MakeRows({At(product.a, 0, block.k), product.a.stride}, product.rows, block.depth, rows_);
    ForEachPanel(product.columns, [&](int first, int columns, const auto& share) {
      kernels_.pack_transposed({.source = At(product.b, first, block.k),
                                .stride = product.b.stride,
                                .depth = block.depth,
                                .count = columns,
                                .packed = panels_});
      // The next panel's rows, or the next block's first, and a share of the next block of a.
      const int next = first + columns;
      const int rest = std::min(kernels_.panel_columns, product.columns - next);
      const int64_t next_k = block.k + block.depth;
      PrefetchList list = share({{Range(product.a, 0, next_k, product.rows, block.next_depth)}});
      list.ranges[1] =
          rest > 0 ? Range(product.b, next, block.k, rest, block.depth)
                   : Range(product.b, 0, next_k, std::min(kernels_.panel_columns, product.columns),
                           block.next_depth);
      MultiplyPanels(rows, {.num_columns = columns,
                            .to_pack = {},
                            .c = accumulators + first,
                            .c_stride = kMaxTile,
                            .accumulate = block.k > 0,
                            .destination = Finish(product, block, first),
                            .prefetch = list});
    });
  });
}

bool TileProduct::PrefersUpright(const Product& product) const {
  const int vectors = CeilDiv(product.rows, kernels_.lanes);
  const int columns = vectors * kernels_.lanes + vectors % 2 * kHalfPanelColumns;
  return product.rows + kPackingRows < columns;
}

void TileProduct::MultiplyNt(const Product& product) {
  if (product.depth <= kMaxUprightDepth || PrefersUpright(product)) {
    MultiplyNtUpright(product, accumulators_);
    return;
  }
  MultiplyNtInto(product, &product.b, 1);
  kernels_.store_transposed({.c = transposed_,
                             .c_stride = kMaxNtRows,
                             .rows = product.rows,
                             .columns = product.columns,
                             .destination = product.destination});
}

GateUpAccumulators TileProduct::MultiplyNtTwice(const Product& product, const void* c) {
  if (PrefersUpright(product)) {
    Product second = product;
    second.b.data = c;
    MultiplyNtUpright(product, accumulators_);
    MultiplyNtUpright(second, accumulators_ + kSecond);
    return {.gate = accumulators_,
            .up = accumulators_ + kSecond,
            .stride = kMaxTile,
            .transposed = false};
  }
  const Operand rights[] = {product.b, {c, product.b.stride}};
  MultiplyNtInto(product, rights, 2);
  return {.gate = transposed_,
          .up = transposed_ + kSecond * kMaxNtRows,
          .stride = kMaxNtRows,
          .transposed = true};
}

void TileProduct::MultiplyNn(const Product& product) {
  ForEachDepthBlock(product.depth, kBlockUnitsKMajor, [&](const DepthBlock& block) {
    const int64_t next = block.k + block.depth;
    const Rows rows =
        MakeRows({At(product.a, 0, block.k), product.a.stride}, product.rows, block.depth, rows_);
    PrefetchList fetch = product.epilogue;
    if (block.next_depth > 0) {
      fetch = {{Range(product.b, next, 0, block.next_depth, product.columns),
                Range(product.a, 0, next, product.rows, block.next_depth)}};
    }
    MultiplyColumns(product, block, rows, fetch);
  });
}

PrefetchList TileProduct::FirstBlockNn(const Product& product) const {
  const int64_t depth = std::min(product.depth, kBlockUnitsKMajor * kernels_.elements_per_unit);
  return {{Range(product.b, 0, 0, depth, product.columns),
           Range(product.a, 0, 0, product.rows, depth)}};
}

// a is packed as well: [unit][rows], so that a row's units are one pitch apart.
void TileProduct::MultiplyTn(const Product& product) {
  ForEachDepthBlock(product.depth, kBlockUnitsKMajor, [&](const DepthBlock& block) {
    const int64_t next = block.k + block.depth;
    PackArguments pack_a = Columns(product.a, block, 0, product.rows, rows_);
    pack_a.pitch = kUnitPitch;
    kernels_.pack_interleaved(pack_a);
    const Rows rows = {
        .count = product.rows,
        .unit_stride = kUnitPitch * int64_t{sizeof(float)},
        .parts = {{rows_, sizeof(float), CeilDiv<int64_t>(block.depth, kernels_.elements_per_unit)},
                  {}}};
    PrefetchList fetch = product.epilogue;
    if (block.next_depth > 0) {
      fetch = {{Range(product.a, next, 0, block.next_depth, product.rows),
                Range(product.b, next, 0, block.next_depth, product.columns)}};
    }
    MultiplyColumns(product, block, rows, fetch);
  });
}

void TileProduct::MultiplyColumns(const Product& product, const DepthBlock& block, const Rows& rows,
                                  const PrefetchList& fetch) const {
  ForEachPanel(product.columns, [&](int first, int columns, const auto& share) {
    PrefetchList list = share(fetch);
    const int next = first + columns;
    if (block.k == 0 && next < product.columns) {
      // Nobody has fetched the first block: its columns come in one panel ahead.
      list.ranges[PrefetchList::kSize - 1] =
          Range(product.b, 0, next, block.depth, std::min(columns, product.columns - next));
    }
    MultiplyPanels(rows, {.num_columns = columns,
                          .to_pack = Columns(product.b, block, first, columns, panels_),
                          .c = accumulators_ + first,
                          .c_stride = kMaxTile,
                          .accumulate = product.accumulate || block.k > 0,
                          .destination = Finish(product, block, first),
                          .prefetch = list});
  });
}

}  // namespace mok
