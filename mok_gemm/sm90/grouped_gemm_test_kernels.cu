#include "mok_gemm/sm90/grouped_gemm_test_kernels.h"

#include <type_traits>
#include <utility>

#include "mok_gemm/sm90/grouped_gemm_kernel.h"

namespace mok::testing {
namespace {

template <ColumnOrder kOrder>
using SmallConfig = Sm90GemmConfig<64, 3, 2, kOrder>;
template <ColumnOrder kOrder>
using OneWarpgroupConfig = Sm90GemmConfig<128, 2, 1, kOrder>;

template <class Base, GemmBug kPlanted>
struct WithBug : Base {
  static constexpr GemmBug kBug = kPlanted;
};

template <class Config, GemmEpilogue kEpilogue>
GemmVariant Variant(const char* name) {
  return {name, grouped_gemm_internal::KernelInfo<Config, kEpilogue>()};
}

template <template <ColumnOrder> class Config>
GemmVariant Choose(const char* name, ColumnOrder order, GemmEpilogue epilogue) {
  constexpr auto kStore = GemmEpilogue::kStore, kSwiGlu = GemmEpilogue::kSwiGlu;
  if (order == ColumnOrder::kPermuted) {
    using Chosen = Config<ColumnOrder::kPermuted>;
    return epilogue == kSwiGlu ? Variant<Chosen, kSwiGlu>(name) : Variant<Chosen, kStore>(name);
  }
  using Chosen = Config<ColumnOrder::kNatural>;
  return epilogue == kSwiGlu ? Variant<Chosen, kSwiGlu>(name) : Variant<Chosen, kStore>(name);
}

template <GemmBug kPlanted>
GemmVariant Buggy() {
  // Natural order, whose tails are the hardest; SwiGLU only where its second map matters.
  constexpr GemmEpilogue kEpilogue =
      kPlanted == GemmBug::kSecondHalfFromFirst ? GemmEpilogue::kSwiGlu : GemmEpilogue::kStore;
  // A tile of one box has it in A, where a warp overwrites its own rows only.
  constexpr bool kNeedsB = kPlanted == GemmBug::kFillsBeforeMultiply;
  constexpr auto kNatural = ColumnOrder::kNatural;
  using Base =
      std::conditional_t<kNeedsB, Sm90GemmConfig<128, 3, 2, kNatural>, SmallConfig<kNatural>>;
  return Variant<WithBug<Base, kPlanted>, kEpilogue>("buggy");
}

template <int... kBugs>
GemmVariant BuggyFromTable(int bug, std::integer_sequence<int, kBugs...>) {
  using Make = GemmVariant (*)();
  constexpr Make kTable[] = {&Buggy<static_cast<GemmBug>(kBugs)>...};
  return kTable[bug]();
}

}  // namespace

GemmVariant SmallVariant(ColumnOrder order, GemmEpilogue epilogue) {
  return Choose<SmallConfig>("small", order, epilogue);
}

GemmVariant OneWarpgroupVariant(ColumnOrder order, GemmEpilogue epilogue) {
  return Choose<OneWarpgroupConfig>("one_warpgroup", order, epilogue);
}

GemmVariant DefaultVariant(ColumnOrder order, GemmEpilogue epilogue) {
  return Choose<DefaultSm90GemmConfig>("default", order, epilogue);
}

GemmVariant BuggyVariant(GemmBug bug) {
  return BuggyFromTable(static_cast<int>(bug),
                        std::make_integer_sequence<int, static_cast<int>(GemmBug::kCount)>());
}

}  // namespace mok::testing
