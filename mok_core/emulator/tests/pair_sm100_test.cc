#include "mok_core/emulator/tests/pair_sm100.h"

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace pair = pair_sm100;

constexpr int kK = 256;

Outcome RunVariant(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  static const auto a = ExactBFloat16(pair::kM * kK, 4), b = ExactBFloat16(pair::kN * kK, 5);
  static const std::vector<float> want = ExactProduct(a, b, pair::kM, pair::kN, kK);
  pair::Params p{};
  const uint16_t* device_a = DeviceArray(a, "A");
  const uint16_t* device_b = DeviceArray(b, "B");
  p.a = MatrixMap(device_a, pair::kM, kK, 2, 128, pair::kTileK);
  p.b = MatrixMap(device_b, pair::kN, kK, 2, 128, pair::kTileK);
  p.d = UninitializedArray<float>(pair::kM * pair::kN, "D");
  p.k = kK;
  MOK_CHECK(Launch(pair::PairKernel(bug), p, {.blocks = 2, .cluster = 2}).ok());
  return RunAndCompare([&] { return HostCopy(p.d, pair::kM * pair::kN) == want; });
}

TEST(PairSm100Test, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunVariant, pair::kBugCount);
}

}  // namespace
}  // namespace mok::testing
