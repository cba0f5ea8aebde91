// The forward kernel with each planted mistake of the exchange. A file of its own, since 30 kernels
// take a compiler minutes.
#include "mok_core/emulator/tests/kernel_table.h"
#include "mok_megakernel/sm90/forward_test_config.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"

namespace mok::testing {
namespace {

template <int kBug>
using ConfigWithExchangeBug = Sm90ForwardConfig<SmallGemm<ColumnOrder::kNatural>, PassBug::kNone,
                                                static_cast<ExchangeBug>(kBug)>;

// The kernel as a template over a number.
template <int kBug>
constexpr auto& kKernelWithExchangeBug = ForwardKernel<ConfigWithExchangeBug<kBug>>;

}  // namespace

ForwardKernelInfo ForwardKernelWithExchangeBug(int bug) {
  return KernelInfoOf<ConfigWithExchangeBug<0>>(
      MOK_KERNEL_TABLE(kKernelWithExchangeBug, static_cast<int>(ExchangeBug::kCount), bug));
}

}  // namespace mok::testing
