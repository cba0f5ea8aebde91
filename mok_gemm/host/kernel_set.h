// Puts the kernels of one instruction set into its tables. Include only from kernels_<isa>.cc,
// after the ISA's Simd.
#pragma once

#include "mok_core/dtype.h"
#include "mok_gemm/host/kernel_table.h"
#include "mok_gemm/host/multiply_kernel.h"
#include "mok_gemm/host/pack_kernel.h"
#include "mok_gemm/host/store_kernel.h"
#include "mok_gemm/host/swiglu_kernel.h"
#include "mok_gemm/host/unit_policies.h"

namespace mok {

template <class Simd, class Units>
struct KernelSet {
  using Element = typename Units::Element;
  static constexpr KernelTable kTable = {
      .dtype = sizeof(Element) == sizeof(float) ? DType::kFp32 : DType::kBf16,
      .lanes = Simd::kLanes,
      .panel_columns = 2 * Simd::kLanes,
      .elements_per_unit = Units::kElements,
      .rows_are_units = Units::kRowsAreUnits,
      .pack_transposed = &PackKernel<Simd, Units>::Transposed,
      .pack_interleaved = &PackKernel<Simd, Units>::Interleaved,
      .pack_rows = &PackKernel<Simd, Units>::Rows,
      .multiply = &MultiplyKernel<Simd, Units>::Run,
      .store = &StoreKernel<Simd>::Store,
      .store_transposed = &StoreKernel<Simd>::template StoreTransposed<Units>,
      .swiglu_forward = &SwigluKernel<Simd, Units>::Forward,
      .swiglu_backward = &SwigluKernel<Simd, Units>::Backward,
      .token_reduce = &StoreKernel<Simd>::TokenReduce,
  };
};

template <class Simd, bool = Simd::kHasPairDot>
struct BFloat16Units {
  using Type = SingleUnits<Simd, BFloat16>;
};
template <class Simd>
struct BFloat16Units<Simd, true> {
  using Type = PairUnits<Simd>;
};

template <class Simd>
const KernelTable& KernelsFor(DType dtype) {
  if (dtype == DType::kBf16) return KernelSet<Simd, typename BFloat16Units<Simd>::Type>::kTable;
  return KernelSet<Simd, SingleUnits<Simd, float>>::kTable;
}

}  // namespace mok
