#include "mok_core/emulator/tests/gemm_sm100.h"

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace gemm = gemm_sm100;

constexpr int kM = 256, kN = 384, kK = 256;

Outcome RunVariant(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  emulator::Options options = emulator::CurrentOptions();
  options.processors_per_device = 2;  // fewer than tiles: the rest is taken over
  emulator::Configure(options);
  static const auto a = ExactBFloat16(kM * kK, 1), b = ExactBFloat16(kN * kK, 2);
  static const std::vector<float> want = ExactProduct(a, b, kM, kN, kK);
  gemm::Params p{};
  const uint16_t* device_a = DeviceArray(a, "A");
  const uint16_t* device_b = DeviceArray(b, "B");
  p.a = MatrixMap(device_a, kM, kK, 2, gemm::kTileM, gemm::kTileK);
  p.b = MatrixMap(device_b, kN, kK, 2, gemm::kTileN, gemm::kTileK);
  p.d = UninitializedArray<float>(kM * kN, "D");
  p.n = kN;
  p.k = kK;
  p.tiles_n = kN / gemm::kTileN;
  const unsigned tiles = kM / gemm::kTileM * (kN / gemm::kTileN);
  MOK_CHECK(Launch(gemm::GemmKernel(bug), p, {.blocks = tiles, .registers = 128}).ok());
  return RunAndCompare([&] { return HostCopy(p.d, kM * kN) == want; });
}

TEST(GemmSm100Test, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunVariant, gemm::kBugCount);
}

}  // namespace
}  // namespace mok::testing
