#include "mok_core/emulator/tests/block_scaled_sm100.h"

#include <cmath>

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace bs = block_scaled;

struct Operand {
  std::vector<unsigned char> values{std::vector<unsigned char>(bs::kM * bs::kK)};
  std::vector<unsigned char> scales{std::vector<unsigned char>(bs::kSteps * bs::kScaleBytes)};

  explicit Operand(uint32_t seed) {
    std::mt19937 random(seed);
    for (unsigned char& value : values) {
      do {
        value = static_cast<unsigned char>(random());
      } while (IsNan(Float8E4M3{value}));
    }
    for (unsigned char& scale : scales) scale = static_cast<unsigned char>(124 + random() % 6);
  }
  // Byte of the 128 x 4 blocked layout: atoms of 32 rows x 16 bytes, row group in the word.
  float Scale(int row, int k) const {
    const int group = k / 32;
    const int place = group / 4 * bs::kScaleBytes + row % 32 * 16 + row / 32 * 4 + group % 4;
    return ToFloat(Float8E8M0{scales[place]});
  }
  double Value(int row, int k) const {
    return static_cast<double>(ToFloat(Float8E4M3{values[row * bs::kK + k]})) * Scale(row, k);
  }
};

Outcome RunVariant(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  static const Operand a(9), b(10);
  bs::Params p{};
  const unsigned char* device_a = DeviceArray(a.values, "A");
  const unsigned char* device_b = DeviceArray(b.values, "B");
  p.a = MatrixMap(device_a, bs::kM, bs::kK, 1, bs::kM, bs::kStepK);
  p.b = MatrixMap(device_b, bs::kN, bs::kK, 1, bs::kN, bs::kStepK);
  p.scales_a = DeviceArray(a.scales, "scales_a");
  p.scales_b = DeviceArray(b.scales, "scales_b");
  p.d = UninitializedArray<float>(bs::kM * bs::kN, "D");
  MOK_CHECK(Launch(bs::BlockScaledKernel(bug), p, {}).ok());
  return RunAndCompare([&] {
    const auto d = HostCopy(p.d, bs::kM * bs::kN);
    for (int m = 0; m < bs::kM; ++m) {
      for (int n = 0; n < bs::kN; ++n) {
        double want = 0;
        for (int k = 0; k < bs::kK; ++k) want += a.Value(m, k) * b.Value(n, k);
        if (!(std::fabs(d[m * bs::kN + n] - want) <= 1e-3 * (1 + std::fabs(want)))) return false;
      }
    }
    return true;
  });
}

TEST(BlockScaledSm100Test, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunVariant, bs::kBugCount);
}

}  // namespace
}  // namespace mok::testing
