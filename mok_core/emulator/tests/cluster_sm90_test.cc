#include "mok_core/emulator/tests/cluster_sm90.h"

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace cp = cluster_pair;

constexpr int kBlocks = 4;

Outcome RunVariant(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  const auto values = ExactBFloat16(kBlocks * cp::kRows * cp::kColumns, 3);
  const uint16_t* tiles = DeviceArray(values, "tiles");
  cp::Params p{};
  p.tiles = MatrixMap(tiles, kBlocks * cp::kRows, cp::kColumns, 2, cp::kRows, cp::kColumns);
  p.sums = UninitializedArray<float>(kBlocks * cp::kRows, "sums");
  MOK_CHECK(Launch(cp::ClusterPairKernel(bug), p, {.blocks = kBlocks, .cluster = 2}).ok());
  return RunAndCompare([&] {
    const auto sums = HostCopy(p.sums, kBlocks * cp::kRows);
    for (int block = 0; block < kBlocks; ++block) {
      for (int row = 0; row < cp::kRows; ++row) {
        float want = 0;
        for (int half = 0; half < 2; ++half) {
          const int source = (block / 2 * 2 + half) * cp::kRows + row;
          for (int k = 0; k < cp::kColumns; ++k) {
            want += BFloat16ToFloat(values[source * cp::kColumns + k]) * (k + 1) * (half + 1);
          }
        }
        want += static_cast<float>((block ^ 1) % 2 * 1000);
        if (sums[block * cp::kRows + row] != want) return false;
      }
    }
    return true;
  });
}

TEST(ClusterSm90Test, EveryPlantedBugIsFlagged) {
  // Without the last cluster barrier this kernel is still correct: both blocks wait for every
  // access that their peer makes to them.
  ExpectEveryBugFlagged(RunVariant, cp::kBugCount,
                        [](int bug) { return bug == cp::kNoClusterSyncAtEnd; });
}

}  // namespace
}  // namespace mok::testing
