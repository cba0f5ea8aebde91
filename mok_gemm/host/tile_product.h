// TileProduct: the K-blocked matrix product of one tile, without an epilogue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "mok_gemm/host/kernel_table.h"

namespace mok {

// Scratch of one thread, not initialised, handed out piece by piece. Where the system grants it, it
// is one huge page: its lines then spread over the sets of the L2 cache as evenly as their
// addresses do, which scattered small pages do not.
class Scratch {
 public:
  static constexpr size_t kBytes = size_t{2} << 20;

  Scratch();
  // The next `count` floats, aligned to a cache line. No more than kBytes altogether.
  float* Take(int64_t count);

 private:
  static constexpr std::align_val_t kAlignment{kBytes};
  struct Free {
    void operator()(void* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<void, Free> data_;
  size_t taken_ = 0;
};

// Where an operand starts and how far apart its stored rows are, in elements.
struct Operand {
  const void* data;
  int64_t stride;
};

// Packs operands K block by K block and accumulates products in fp32. One per thread.
// kernel_table.h says how a product is taken apart.
//
// All extents are at least 1, rows and columns at most kMaxTile.
class TileProduct {
 public:
  static constexpr int kMaxTile = 256;
  static constexpr int kMaxNtRows = 128;  // rows of MultiplyNt

  // `kernels` must outlive this.
  explicit TileProduct(const KernelTable& kernels);

  const KernelTable& kernels() const { return kernels_; }

  // The accumulators of MultiplyNn and MultiplyTn, [rows, columns], rows kMaxTile floats apart: the
  // result of a product without destination. Writable: see Product::accumulate.
  float* accumulators() const { return accumulators_; }

  struct Product {
    Operand a;
    Operand b;
    int rows;
    int columns;
    int64_t depth;                 // K
    bool accumulate = false;       // Nn, Tn: go on from the accumulators as they are
    Destination destination = {};  // without data, the result stays here
    // What the epilogue will touch: fetched during the last K block.
    PrefetchList epilogue = {};
  };

  // a b^T for a [rows, depth], b [columns, depth]; rows <= kMaxNtRows. Needs a destination.
  void MultiplyNt(const Product& product);

  // a b^T and a c^T, c of the shape and stride of b, columns <= kMaxTile / 2. No destination; what
  // is returned is good until the next product.
  GateUpAccumulators MultiplyNtTwice(const Product& product, const void* c);

  // a b for a [rows, depth], b [depth, columns].
  void MultiplyNn(const Product& product);
  // What MultiplyNn reads first: for the product before it to fetch.
  PrefetchList FirstBlockNn(const Product& product) const;

  // a^T b for a [depth, rows], b [depth, columns].
  void MultiplyTn(const Product& product);

 private:
  static constexpr int kSecond = kMaxTile / 2;  // first column of the second right operand

  // A K block [k, k + depth); next_depth elements follow in the next block, 0 after the last.
  struct DepthBlock {
    int64_t k, depth, next_depth;
  };
  // A K block of a broadcast operand, ready to be multiplied: what lies in memory as units, then
  // what had to be packed.
  struct Rows {
    int count = 0;
    int64_t unit_stride = sizeof(float);  // bytes
    struct {
      const void* data = nullptr;
      int64_t stride = 0;  // bytes
      int64_t units = 0;
    } parts[2];
  };
  // What panels_ is multiplied into, and what to fetch meanwhile.
  struct PanelTarget {
    int num_columns;
    PackArguments to_pack;  // see MultiplyArguments
    float* c;
    int64_t c_stride;
    bool accumulate;
    Destination destination;
    PrefetchList prefetch;
  };

  // Calls body(DepthBlock) for the K blocks of `units` units in ascending order.
  template <class Body>
  void ForEachDepthBlock(int64_t depth, int64_t units, const Body& body) const;
  // Calls body(first, columns, share) for the panels of `count` columns; share(list) is the part of
  // a prefetch list that is this panel's to fetch.
  template <class Body>
  void ForEachPanel(int count, const Body& body) const;
  // The element (row, column).
  const char* At(const Operand& operand, int64_t row, int64_t column) const;
  // The part of an operand from element (row, column) on.
  PrefetchRange Range(const Operand& operand, int64_t row, int64_t column, int64_t rows,
                      int64_t columns) const;
  // The K block of an operand [count, depth] that is contiguous along K. `scratch` is for what has
  // to be packed.
  Rows MakeRows(const Operand& operand, int count, int64_t depth, float* scratch) const;
  // The product's destination from `column` on; nothing before the last K block.
  static Destination Finish(const Product& product, const DepthBlock& block, int column);
  // The K block of the columns [first, first + count) of a K-major operand, to be packed.
  PackArguments Columns(const Operand& operand, const DepthBlock& block, int first, int count,
                        float* packed) const;
  // What to fetch while a K block of rights[right] is multiplied.
  PrefetchList FetchNt(const Product& product, const DepthBlock& block, const Operand* rights,
                       int num_rights, int right) const;
  // The NT products with num_rights right operands into transposed_.
  void MultiplyNtInto(const Product& product, const Operand* rights, int num_rights);
  // a b^T to the destination, or without one to `accumulators`, rows kMaxTile floats apart.
  void MultiplyNtUpright(const Product& product, float* accumulators);
  // Whether MultiplyNtUpright is the faster way for this number of rows.
  bool PrefersUpright(const Product& product) const;
  // Multiplies `rows` with the columns of product.b, K-major, in the K block.
  void MultiplyColumns(const Product& product, const DepthBlock& block, const Rows& rows,
                       const PrefetchList& fetch) const;
  // Multiplies `rows` with panels_.
  void MultiplyPanels(const Rows& rows, const PanelTarget& target) const;

  const KernelTable& kernels_;
  Scratch scratch_;
  float* panels_;        // K block of the vector operand: one panel, or all of kMaxNtRows columns
  float* rows_;          // K block of the broadcast operand, where it has to be packed
  float* transposed_;    // result of the NT products, [columns, kMaxNtRows]
  float* accumulators_;  // [kMaxTile, kMaxTile]
};

}  // namespace mok
