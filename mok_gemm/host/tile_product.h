// TileProduct: the K-blocked matrix product of one tile, without an epilogue.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "mok_gemm/host/kernel_table.h"

namespace mok {

// Fp32 scratch aligned to cache lines, not initialised.
class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t count)
      : data_(static_cast<float*>(::operator new(count * sizeof(float), kAlignment))) {}
  float* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
};

// Where an operand starts and how far apart its stored rows are, in elements.
struct Operand {
  const void* data;
  int64_t stride;
};

// Packs operands K block by K block and accumulates products in fp32. One per thread; holds about
// 1.2 MiB of scratch. kernel_table.h says how a product is taken apart.
//
// All extents are at least 1, rows and columns at most kMaxTile.
class TileProduct {
 public:
  static constexpr int kMaxTile = 256;
  static constexpr int kMaxNtRows = 128;  // rows of MultiplyNt

  // `kernels` must outlive this.
  explicit TileProduct(const KernelTable& kernels);

  const KernelTable& kernels() const { return kernels_; }

  // The result of a product: [rows, columns], rows kMaxTile floats apart. Valid, and writable,
  // until the next product.
  float* accumulators() const { return accumulators_.get(); }

  struct Product {
    Operand a;
    Operand b;
    int rows;
    int columns;
    int64_t depth;            // K
    bool accumulate = false;  // go on from the accumulators as they are
  };

  // a b^T for a [rows, depth], b [columns, depth]; rows <= kMaxNtRows.
  void MultiplyNt(const Product& product);

  // a b^T and a c^T, c of the shape and stride of b: the latter starts at column kMaxTile / 2,
  // columns is at most that.
  void MultiplyNtTwice(const Product& product, const void* c);

  // a b for a [rows, depth], b [depth, columns].
  void MultiplyNn(const Product& product);

  // a^T b for a [depth, rows], b [depth, columns].
  void MultiplyTn(const Product& product);

 private:
  // A K block of a broadcast operand whose rows lie contiguous along K.
  struct RowBlock {
    Operand rows;
    int count;
    int64_t depth;
  };
  // A K block of the vector operand, packed, and where its product goes.
  struct PanelBlock {
    const float* panels;
    int64_t pitch;
    int columns;
    float* c;
    int64_t c_stride;
    bool accumulate;
    PrefetchRange prefetch[2];
  };

  // Calls body(k, depth, next_depth) for the K blocks in ascending order; next_depth is the depth
  // of the following block, 0 in the last.
  template <class Body>
  void ForEachDepthBlock(int64_t depth, const Body& body) const;
  // Floats from one panel of a K block of `depth` elements to the next.
  int64_t PanelPitch(int64_t depth) const;
  // The part [first_row, first_row + rows) x [first_column, first_column + columns).
  PrefetchRange Prefetch(const Operand& operand, int64_t first_row, int64_t first_column,
                         int64_t rows, int64_t columns) const;
  // The element (row, column).
  const char* At(const Operand& operand, int64_t row, int64_t column) const;
  void MultiplyRows(const RowBlock& rows, const PanelBlock& target);

  const KernelTable& kernels_;
  AlignedFloats panels_;        // K block of the vector operand
  AlignedFloats rows_;          // K block of the broadcast operand, where it has to be packed
  AlignedFloats transposed_;    // result of the NT products, [columns, kMaxNtRows]
  AlignedFloats accumulators_;  // [kMaxTile, kMaxTile]
};

}  // namespace mok
