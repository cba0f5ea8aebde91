// The forward kernel with each of its planted mistakes.
#include "mok_core/emulator/tests/kernel_table.h"
#include "mok_megakernel/sm90/forward_test_config.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"

namespace mok::testing {
namespace {

using Gemm = SmallGemm<ColumnOrder::kNatural>;

template <int kBug>
using ConfigWithBug = Sm90ForwardConfig<Gemm, static_cast<PassBug>(kBug)>;
// The kernel as a template over a number.
template <int kBug>
constexpr auto& kKernelWithBug = ForwardKernel<ConfigWithBug<kBug>>;

}  // namespace

ForwardKernelInfo ForwardKernelWithBug(int bug) {
  return KernelInfoOf<ConfigWithBug<0>>(
      MOK_KERNEL_TABLE(kKernelWithBug, static_cast<int>(PassBug::kCount), bug));
}

}  // namespace mok::testing
