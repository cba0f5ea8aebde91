#include "mok_schedule/ring_plan.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "mok_schedule/routing_table.h"

namespace mok {
namespace {

// Every row block is in exactly one minibatch, in order; slots and windows agree.
TEST(RingPlanTest, MinibatchesPartitionTheRowBlocks) {
  for (int64_t blocks = 0; blocks <= 20; ++blocks) {
    for (int64_t minibatch = 1; minibatch <= 7; ++minibatch) {
      for (int64_t macrobatch = 1; macrobatch <= 22; ++macrobatch) {
        const RingPlan plan = {blocks, minibatch, macrobatch};
        int64_t next = 0;
        for (int64_t m = 0; m < plan.num_macrobatches(); ++m) {
          ASSERT_EQ(plan.first_block_of_macrobatch(m), next);
          ASSERT_GE(plan.blocks_in_macrobatch(m), 1);
          ASSERT_GE(plan.minibatches_in_macrobatch(m), 1);
          for (int64_t j = 0; j < plan.minibatches_in_macrobatch(m); ++j) {
            ASSERT_EQ(plan.first_block_of_minibatch(m, j), next);
            ASSERT_GE(plan.blocks_in_minibatch(m, j), 1);
            ASSERT_LE(plan.blocks_in_minibatch(m, j), minibatch);
            for (int64_t i = 0; i < plan.blocks_in_minibatch(m, j); ++i, ++next) {
              ASSERT_EQ(plan.macrobatch_of_block(next), m);
              ASSERT_EQ(plan.slot_of_block(next), next - plan.first_block_of_macrobatch(m));
              ASSERT_LT(plan.slot_of_block(next), plan.num_slots());
            }
          }
        }
        ASSERT_EQ(next, blocks);
        int64_t in_slots = 0;
        for (int64_t slot = 0; slot < plan.num_slots(); ++slot) {
          ASSERT_GE(plan.blocks_in_slot(slot), 1);
          in_slots += plan.blocks_in_slot(slot);
        }
        ASSERT_EQ(in_slots, blocks);
      }
    }
  }
}

TEST(DefaultMinibatchRowsTest, FillsTwoWavesOfWorkers) {
  MinibatchModel model;
  model.intermediate = 2048;
  model.num_workers = 148;
  // 2 waves * 74 clusters * 256 * 256 / 4096 columns = 2368 rows, up to a row block.
  EXPECT_EQ(DefaultMinibatchRows(model), 2432);
  model.num_workers = 132;  // one-SM tiles of 128 x 256
  model.workers_per_tile = 1;
  model.tile_rows = 128;
  EXPECT_EQ(DefaultMinibatchRows(model), 2176);  // 2112
  model.num_workers = 1;                         // a wide layer on one thread: one row block
  EXPECT_EQ(DefaultMinibatchRows(model), 128);
  model.intermediate = 8;  // a narrow layer needs more rows
  model.num_workers = 2;
  EXPECT_EQ(DefaultMinibatchRows(model), 8192);
}

TEST(DefaultMacrobatchRowsTest, BalancedLoadWithSpareRows) {
  MacrobatchModel model;
  model.total_tokens = 2 * 2048;
  model.topk = 8;
  model.num_experts = 12;
  model.num_local_experts = 6;
  model.minibatch_rows = 2432;
  // 16384 balanced rows, 20480 with a quarter more, 21248 with padding: 9 minibatches.
  EXPECT_EQ(DefaultMacrobatchRows(model), 9 * 2432);
  model.minibatch_rows = 128;
  EXPECT_EQ(DefaultMacrobatchRows(model), 21248);
}

TEST(DefaultMacrobatchRowsTest, AtMostTheCapacityAndAtLeastOneRowBlock) {
  MacrobatchModel model;
  model.total_tokens = 100;
  model.topk = 2;
  model.num_experts = 4;
  model.num_local_experts = 4;
  model.minibatch_rows = 100 * kRowBlock;
  EXPECT_EQ(DefaultMacrobatchRows(model), RoutingTableCapacityRows(100, 2, 4));
  model.num_local_experts = 0;
  EXPECT_EQ(DefaultMacrobatchRows(model), kRowBlock);
  model.num_local_experts = 4;
  model.total_tokens = 0;
  EXPECT_EQ(DefaultMacrobatchRows(model), kRowBlock);
}

}  // namespace
}  // namespace mok
