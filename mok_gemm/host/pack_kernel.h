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

  // KernelTable::pack_interleaved.
  static void Interleaved(const PackArguments& args) {
    const auto* source = static_cast<const Element*>(args.source);
    float* out = args.packed;
    for (int64_t k = 0; k < args.depth; k += Units::kElements, out += kPanelColumns) {
      Float units[2];
      Units::LoadAlongColumns(source + k * args.stride, args.stride, args.depth - k, args.count,
                              units);
      Simd::StoreAll(out, units[0]);
      Simd::StoreAll(out + kLanes, units[1]);
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
    for (int64_t k = 0; k < args.depth; k += kBlockElements) {
      const auto elements = static_cast<int>(Smaller<int64_t>(args.depth - k, kBlockElements));
      Float block[kLanes];
      if (columns == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          block[i] = Units::LoadAlongDepth(rows + i * args.stride + k, elements);
        }
      } else {
        for (int i = 0; i < kLanes; ++i) {
          block[i] = i < columns ? Units::LoadAlongDepth(rows + i * args.stride + k, elements)
                                 : Simd::Zero();
        }
      }
      Simd::Transpose(block);
      const int units = (elements + Units::kElements - 1) / Units::kElements;
      for (int i = 0; i < units; ++i, out += kPanelColumns) Simd::StoreAll(out, block[i]);
    }
  }
};

}  // namespace mok
