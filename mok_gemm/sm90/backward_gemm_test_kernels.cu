#include "mok_gemm/sm90/backward_gemm_test_kernels.h"

#include <utility>

#include "mok_gemm/sm90/backward_gemm_kernel.h"

namespace mok::testing {
namespace {

using TwoStageConfig = Sm90GemmConfig<256, 2, 2, ColumnOrder::kNatural>;

template <BackwardBug kPlanted>
struct BuggyConfig : TwoStageConfig {
  static constexpr BackwardBug kBackwardBug = kPlanted;
};

template <class Config>
BackwardVariant Variant(const char* name) {
  return {name, {Config::kTileM, Config::kTileN}, backward_gemm_internal::KernelInfo<Config>()};
}

template <int... kBugs>
BackwardVariant BuggyFromTable(int bug, std::integer_sequence<int, kBugs...>) {
  using Make = BackwardVariant (*)(const char*);
  constexpr Make kTable[] = {&Variant<BuggyConfig<static_cast<BackwardBug>(kBugs)>>...};
  return kTable[bug]("buggy");
}

}  // namespace

BackwardVariant TwoStageVariant() { return Variant<TwoStageConfig>("two_stages"); }

BackwardVariant OneWarpgroupBackwardVariant() {
  return Variant<Sm90GemmConfig<128, 3, 1, ColumnOrder::kNatural>>("one_warpgroup");
}

BackwardVariant DefaultBackwardVariant() {
  return Variant<DefaultSm90GemmConfig<ColumnOrder::kNatural>>("default");
}

BackwardVariant BuggyBackwardVariant(BackwardBug bug) {
  constexpr int kCount = static_cast<int>(BackwardBug::kCount);
  return BuggyFromTable(static_cast<int>(bug), std::make_integer_sequence<int, kCount>());
}

}  // namespace mok::testing
