// Packing of operands into panels and rows of units (see kernel_table.h). Include only from
// kernels_<isa>.cc, after the ISA's Simd.
#pragma once

#include <cstdint>

#include "mok_gemm/host/kernel_table.h"

namespace mok {

template <class Simd, class Units>
struct PackKernel {
  using Element = typename Units::Element;
  using Float = typename Simd::Float;
  static constexpr int kLanes = Simd::kLanes;
  static constexpr int kPanelColumns = 2 * kLanes;
  static constexpr int kBlockElements = kLanes * Units::kElements;  // along K in one vector

  // KernelTable::pack_transposed.
  static void Transposed(const PackArguments& args) {
    const auto* source = static_cast<const Element*>(args.source);
    TransposeStrip(source, args, Smaller(args.count, kLanes), args.packed);
    // Without a second half, nobody reads it.
    if (args.count <= kLanes) return;
    TransposeStrip(source + kLanes * args.stride, args, args.count - kLanes, args.packed + kLanes);
  }

  // KernelTable::pack_interleaved. Writes whole vectors.
  static void Interleaved(const PackArguments& args) {
    const auto* rows = static_cast<const Element*>(args.source);
    float* out = args.packed;
    for (int64_t k = 0; k < args.depth; k += Units::kElements, out += args.pitch) {
      for (int column = 0; column < args.count; column += kPanelColumns) {
        Float units[2];
        Units::LoadAlongColumns(rows + column, args.stride, args.depth - k,
                                Smaller(args.count - column, kPanelColumns), units);
        Simd::StoreAll(out + column, units[0]);
        Simd::StoreAll(out + column + kLanes, units[1]);
      }
      rows += Units::kElements * args.stride;
    }
  }

  // KernelTable::pack_rows. Writes whole vectors: pitch is a multiple of kLanes.
  static void Rows(const PackArguments& args) {
    const auto* source = static_cast<const Element*>(args.source);
    for (int row = 0; row < args.count; ++row) {
      float* out = args.packed + row * args.pitch;
      for (int64_t k = 0; k < args.depth; k += kBlockElements, out += kLanes) {
        const auto elements = static_cast<int>(Smaller<int64_t>(args.depth - k, kBlockElements));
        Simd::StoreAll(out, Units::LoadAlongDepth(source + row * args.stride + k, elements));
      }
    }
  }

 private:
  template <class Integer>
  static Integer Smaller(Integer a, Integer b) {
    return a < b ? a : b;
  }

  // kLanes columns of a panel (`columns` of them valid) for all of K.
  static void TransposeStrip(const Element* rows, const PackArguments& args, int columns,
                             float* out) {
    int64_t k = 0;
    if (columns == kLanes) {
      for (; k + kBlockElements <= args.depth; k += kBlockElements, out += kLanes * kPanelColumns) {
        Float block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          block[i] = Units::LoadAlongDepth(rows + i * args.stride + k, kBlockElements);
        }
        Simd::Transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) Simd::StoreAll(out + i * kPanelColumns, block[i]);
      }
    }
    for (; k < args.depth; k += kBlockElements, out += kLanes * kPanelColumns) {
      const auto elements = static_cast<int>(Smaller<int64_t>(args.depth - k, kBlockElements));
      TransposePartialBlock(rows + k, args.stride, columns, elements, out);
    }
  }

  // `elements` along K of `columns` columns.
  static void TransposePartialBlock(const Element* rows, int64_t stride, int columns, int elements,
                                    float* out) {
    Float block[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i < columns ? Units::LoadAlongDepth(rows + i * stride, elements) : Simd::Zero();
    }
    Simd::Transpose(block);
    const int units = (elements + Units::kElements - 1) / Units::kElements;
    for (int i = 0; i < units; ++i) Simd::StoreAll(out + i * kPanelColumns, block[i]);
  }
};

}  // namespace mok
