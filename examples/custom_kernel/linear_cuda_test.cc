// The same kernel on two GPUs.
#include <gtest/gtest.h>

#include "linear.h"
#include "linear_ranks.h"
#include "mok_core/device/runtime.h"

namespace custom_kernel {
namespace {

TEST(LinearCudaTest, EqualsAPlainProduct) {
  const auto devices = mok::runtime::DeviceCount();
  if (!devices.ok() || *devices < 2) {
    GTEST_SKIP() << "needs two Hopper GPUs with peer access; the kernel is compiled and linked";
  }
  const LinearShape shape = {.tokens = {1500, 333}, .width = 1032, .k = 1096};
  LinearRanks ranks(shape, 1);
  for (int pass = 0; pass < 3; ++pass) {
    ranks.StartPass();
    for (int32_t rank = 0; rank < shape.num_ranks(); ++rank) ranks.Launch(rank, LinearKernel(), 66);
    ASSERT_EQ(mok::runtime::Synchronize(), mok::OkStatus());
    for (int32_t rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks.CheckWaits(rank), mok::OkStatus());
    EXPECT_TRUE(ranks.Matches());
  }
}

}  // namespace
}  // namespace custom_kernel
