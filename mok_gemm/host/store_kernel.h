// Kernels that move accumulators and rows: transposition, rounding stores, the token reduction.
// Include only from kernels_<isa>.cc, after the ISA's Simd.
#pragma once

#include <cstdint>

#include "mok_gemm/host/kernel_table.h"

namespace mok {

template <class Simd>
struct StoreKernel {
  using Float = typename Simd::Float;
  static constexpr int kLanes = Simd::kLanes;

  static constexpr int kStripColumns = 2 * kLanes;

  // A strip of kLanes rows and `columns` (1 .. kStripColumns) columns of a transposed matrix, from
  // its element (row, column) on, put upright into `strip`.
  static void TransposeStrip(const float* transposed, int64_t stride, int columns,
                             float (&strip)[kLanes * kStripColumns]) {
    for (int column = 0; column < columns; column += kLanes) {
      Float block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        block[i] = Simd::LoadAll(transposed + (column + i) * stride);
      }
      Simd::Transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        Simd::StoreAll(strip + i * kStripColumns + column, block[i]);
      }
    }
  }

  // KernelTable::store.
  static void Store(const StoreArguments& args) {
    if (args.destination.dtype == DType::kBf16) {
      StoreAs<BFloat16>(args);
    } else {
      StoreAs<float>(args);
    }
  }

  // Store of sums that Units made: where they cannot be denormal, full panels are converted by the
  // instruction that would flush denormals.
  template <class Units>
  static void StoreSums(const StoreArguments& args) {
    if constexpr (Units::kSumsAreNormal) {
      if (args.destination.dtype == DType::kBf16 && !args.destination.accumulate &&
          args.columns == kStripColumns) {
        auto* out = static_cast<BFloat16*>(args.destination.data);
        for (int row = 0; row < args.rows; ++row, out += args.destination.stride) {
          const float* c = args.c + row * args.c_stride;
          Simd::StoreNormalPair(out, Simd::LoadAll(c), Simd::LoadAll(c + kLanes));
        }
        return;
      }
    }
    Store(args);
  }

  // KernelTable::store_transposed, by way of strips in the L1 cache.
  template <class Units>
  static void StoreTransposed(const StoreArguments& args) {
    alignas(64) float strip[kLanes * kStripColumns];
    for (int row = 0; row < args.rows; row += kLanes) {
      for (int column = 0; column < args.columns; column += kStripColumns) {
        const int left = args.columns - column;
        const int columns = left < kStripColumns ? left : kStripColumns;
        TransposeStrip(args.c + column * args.c_stride + row, args.c_stride, columns, strip);
        StoreSums<Units>({.c = strip,
                          .c_stride = kStripColumns,
                          .rows = LanesLeft(args.rows - row),
                          .columns = columns,
                          .destination = From(args.destination, row, column)});
      }
    }
  }

  // `destination` from element (row, column) on.
  static Destination From(Destination destination, int row, int column) {
    const int64_t bytes = destination.dtype == DType::kBf16 ? sizeof(BFloat16) : sizeof(float);
    destination.data =
        static_cast<char*>(destination.data) + (row * destination.stride + column) * bytes;
    return destination;
  }

  // KernelTable::token_reduce.
  static void TokenReduce(const TokenReduceTile& tile) {
    if (tile.dtype == DType::kBf16) {
      TokenReduceAs<BFloat16>(tile);
    } else {
      TokenReduceAs<float>(tile);
    }
  }

 private:
  // Columns of a token summed at once, so that each source row is read in whole cache lines.
  static constexpr int kVectors = 4;

  template <class Element>
  static void StoreAs(const StoreArguments& args) {
    for (int row = 0; row < args.rows; ++row) {
      const float* c = args.c + row * args.c_stride;
      Element* out = static_cast<Element*>(args.destination.data) + row * args.destination.stride;
      for (int column = 0; column < args.columns; column += kLanes) {
        const int n = LanesLeft(args.columns - column);
        Float x = Simd::Load(c + column, n);
        if (args.destination.accumulate) x = Simd::Add(Simd::Load(out + column, n), x);
        Simd::Store(out + column, x, n);
      }
    }
  }

  template <class Element>
  static void TokenReduceAs(const TokenReduceTile& tile) {
    for (int64_t token = 0; token < tile.tokens; ++token) {
      for (int64_t column = 0; column < tile.hidden; column += kVectors * kLanes) {
        ReduceColumns<Element>(tile, token, column);
      }
    }
  }

  template <class Element>
  static void ReduceColumns(const TokenReduceTile& tile, int64_t token, int64_t column) {
    const int64_t left = tile.hidden - column;
    Float acc[kVectors];
    for (int v = 0; v < kVectors; ++v) acc[v] = Simd::Zero();
    if (tile.shared != nullptr) {
      const float scale = tile.shared_scale != nullptr ? tile.shared_scale[token] : 1.0f;
      const auto* row = static_cast<const Element*>(tile.shared) + token * tile.shared_stride;
      for (int v = 0; v < kVectors && v * kLanes < left; ++v) {
        const int n = LanesLeft(left - v * kLanes);
        acc[v] = Simd::Multiply(Simd::Set(scale), Simd::Load(row + column + v * kLanes, n));
      }
    }
    for (int64_t route = token * tile.topk; route < (token + 1) * tile.topk; ++route) {
      if (tile.expert_ids[route] < 0) continue;
      const Float weight = Simd::Set(tile.weights != nullptr ? tile.weights[route] : 1.0f);
      const Element* row = RowOfRoute<Element>(tile, route);
      const int64_t next = route + tile.topk;
      if (next < tile.tokens * tile.topk && tile.expert_ids[next] >= 0) {
        // Rows lie anywhere and are short: the hardware does not see the next token's coming.
        PrefetchStrip(RowOfRoute<Element>(tile, next) + column);
      }
      for (int v = 0; v < kVectors && v * kLanes < left; ++v) {
        const int n = LanesLeft(left - v * kLanes);
        acc[v] = Simd::MultiplyAdd(weight, Simd::Load(row + column + v * kLanes, n), acc[v]);
      }
    }
    Element* out = static_cast<Element*>(tile.out) + token * tile.out_stride;
    for (int v = 0; v < kVectors && v * kLanes < left; ++v) {
      Simd::Store(out + column + v * kLanes, acc[v], LanesLeft(left - v * kLanes));
    }
  }

  template <class Element>
  static const Element* RowOfRoute(const TokenReduceTile& tile, int64_t route) {
    const int64_t row = tile.y_rows != nullptr ? tile.y_rows[route] : route;
    return static_cast<const Element*>(tile.y) + row * tile.y_stride;
  }

  template <class Element>
  static void PrefetchStrip(const Element* strip) {
    constexpr int kPerCacheLine = 64 / static_cast<int>(sizeof(Element));
    for (int i = 0; i < kVectors * kLanes; i += kPerCacheLine) __builtin_prefetch(strip + i);
  }

  static int LanesLeft(int64_t left) { return left < kLanes ? static_cast<int>(left) : kLanes; }
};

}  // namespace mok
