// The forward kernel with each of its planted mistakes.
#include "mok_core/emulator/tests/kernel_table.h"
#include "mok_megakernel/sm90/forward_test_config.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"

namespace mok::testing {
namespace {

using Gemm = SmallGemm<ColumnOrder::kNatural>;

template <int kBug>
using ConfigWithBug = Sm90ForwardConfig<Gemm, static_cast<ForwardBug>(kBug)>;
template <int kBug>
using ConfigWithExchangeBug =
    Sm90ForwardConfig<Gemm, ForwardBug::kNone, static_cast<ExchangeBug>(kBug)>;

// Kernels as templates over a number.
template <int kBug>
constexpr auto& kKernelWithBug = ForwardKernel<ConfigWithBug<kBug>>;
template <int kBug>
constexpr auto& kKernelWithExchangeBug = ForwardKernel<ConfigWithExchangeBug<kBug>>;

}  // namespace

ForwardKernelInfo ForwardKernelWithBug(int bug) {
  return SmallKernelInfo<ConfigWithBug<0>>(
      MOK_KERNEL_TABLE(kKernelWithBug, static_cast<int>(ForwardBug::kCount), bug));
}

ForwardKernelInfo ForwardKernelWithExchangeBug(int bug) {
  return SmallKernelInfo<ConfigWithExchangeBug<0>>(
      MOK_KERNEL_TABLE(kKernelWithExchangeBug, static_cast<int>(ExchangeBug::kCount), bug));
}

}  // namespace mok::testing
