// The closed-form decoding of task indices against the order written out naively.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "mok_schedule/task_program.h"
#include "mok_schedule/testing/naive_order.h"
#include "mok_schedule/testing/random_program.h"

namespace mok {
namespace {

using ::mok::testing::NaiveMergedOrder;
using ::mok::testing::ProgramCase;
using ::mok::testing::ProgramOfBlocks;
using ::mok::testing::RandomProgram;
using ::testing::HasSubstr;

constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward};

auto Key(const Task& task) {
  return std::tuple(static_cast<int>(task.kind), task.block, task.tile, task.expert,
                    task.macrobatch);
}

std::string Text(const Task& task) {
  return StrCat(TaskKindName(task.kind), " block ", task.block, " tile ", task.tile, " expert ",
                task.expert, " macrobatch ", task.macrobatch);
}

// Every queue holds the tasks of `merged` that belong to it, in that order.
void ExpectOrder(const TaskProgram& program, const std::vector<Task>& merged) {
  for (const Queue queue : {Queue::kMerged, Queue::kCompute, Queue::kCommunication}) {
    std::vector<Task> expected;
    for (const Task& task : merged) {
      if (IsInQueue(task.kind, queue)) expected.push_back(task);
    }
    ASSERT_EQ(program.NumTasks(queue), static_cast<int64_t>(expected.size()));
    for (size_t i = 0; i < expected.size(); ++i) {
      const Task task = program.Decode(queue, static_cast<int64_t>(i));
      ASSERT_EQ(Key(task), Key(expected[i]))
          << "queue " << static_cast<int>(queue) << " index " << i << ": got " << Text(task)
          << ", expected " << Text(expected[i]);
    }
  }
}

TEST(TaskOrderTest, DecodingEqualsTheNaiveOrder) {
  for (const Pass pass : kPasses) {
    for (uint64_t seed = 0; seed < 4000; ++seed) {
      std::mt19937_64 random(seed);
      const ProgramCase program_case = RandomProgram(random, pass);
      SCOPED_TRACE(StrCat("seed ", seed, ": ", program_case.Description()));
      const std::vector<Task> merged = NaiveMergedOrder(program_case);
      std::set<std::tuple<int, int, int, int, int>> distinct;
      for (const Task& task : merged) distinct.insert(Key(task));
      ASSERT_EQ(distinct.size(), merged.size());  // with the comparison below: a bijection
      ASSERT_NO_FATAL_FAILURE(ExpectOrder(program_case.Create(), merged));
    }
  }
}

// The forms that a random program must not miss, each seen often.
TEST(TaskOrderTest, RandomProgramsHaveTheOddForms) {
  std::map<std::string, int> seen;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    const ProgramCase program_case = RandomProgram(random, Pass::kBackward);
    const ProgramShape& shape = program_case.shape;
    const RingPlan& ring = shape.ring;
    seen["no rows"] += ring.num_row_blocks == 0;
    seen["no tokens"] += shape.token_blocks == 0;
    seen["no shared expert"] += !shape.has_shared_expert();
    seen["nothing kept"] += shape.kept_macrobatches == 0;
    seen["no experts"] += program_case.table.expert_rows.empty();
    seen["macrobatch is minibatch"] += ring.macrobatch_blocks == ring.minibatch_blocks;
    seen["macrobatch below minibatch"] += ring.macrobatch_blocks < ring.minibatch_blocks;
    seen["macrobatch no multiple"] += ring.macrobatch_blocks % ring.minibatch_blocks != 0;
    seen["everything fits the ring"] += ring.num_macrobatches() == 1;
    for (const int32_t rows : program_case.table.expert_rows) {
      seen["expert without rows"] += rows == 0;
      seen["expert over three macrobatches"] += rows > 3 * ring.macrobatch_blocks * kRowBlock;
    }
  }
  EXPECT_EQ(seen.size(), 11u);
  for (const auto& [form, count] : seen) EXPECT_GT(count, 50) << form;
}

std::vector<std::string> Names(const ProgramCase& program_case) {
  const TaskProgram program = program_case.Create();
  std::vector<std::string> names;
  for (int64_t i = 0; i < program.NumTasks(Queue::kMerged); ++i) {
    const Task task = program.Decode(Queue::kMerged, i);
    names.push_back(task.block >= 0 ? StrCat(TaskKindName(task.kind), task.block)
                                    : StrCat(TaskKindName(task.kind)));
  }
  return names;
}

TEST(TaskOrderTest, ForwardWalksMacrobatchesFromTheLastToTheFirst) {
  EXPECT_THAT(
      Names(ProgramOfBlocks(Pass::kForward, {3, 2}, 1, 2)),
      ::testing::ElementsAre("EntryBarrier", "Dispatch4", "GateUp4", "Down4", "Dispatch2",
                             "Combine4", "GateUp2", "Down2", "Dispatch3", "Combine2", "GateUp3",
                             "Down3", "Dispatch0", "Combine3", "GateUp0", "Down0", "Dispatch1",
                             "Combine0", "GateUp1", "Down1", "Combine1", "ExitBarrier"));
}

TEST(TaskOrderTest, BackwardRecomputesAllButTheKeptMacrobatch) {
  EXPECT_THAT(Names(ProgramOfBlocks(Pass::kBackward, {3}, 2, 2)),
              ::testing::ElementsAre(
                  "EntryBarrier", "ReverseCombine0", "ReverseCombine1", "DownGrad0", "DownGrad1",
                  "InputGrad0", "InputGrad1", "WeightGradDown", "WeightGradGateUp",
                  "RecomputeDispatch2", "ReverseCombine2", "ReverseDispatch0", "ReverseDispatch1",
                  "RecomputeGateUp2", "DownGrad2", "InputGrad2", "WeightGradDown",
                  "WeightGradGateUp", "ReverseDispatch2", "ExitBarrier"));
}

TEST(TaskOrderTest, NothingToDoLeavesTheBarriers) {
  EXPECT_THAT(Names(ProgramOfBlocks(Pass::kForward, {}, 1, 1)),
              ::testing::ElementsAre("EntryBarrier", "ExitBarrier"));
  // Experts without rows still get their (zero) gradients.
  EXPECT_THAT(
      Names(ProgramOfBlocks(Pass::kBackward, {0}, 1, 1)),
      ::testing::ElementsAre("EntryBarrier", "WeightGradDown", "WeightGradGateUp", "ExitBarrier"));
}

// Routed kinds, per row block: which tiles appear, and that each appears once.
TEST(TaskOrderTest, EveryRowBlockIsProducedOnceAndEveryPieceOnce) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 random(seed);
    const ProgramCase program_case = RandomProgram(random, Pass::kBackward);
    SCOPED_TRACE(StrCat("seed ", seed, ": ", program_case.Description()));
    const TaskProgram program = program_case.Create();
    const ProgramShape& shape = program.shape();
    // Last row block that each weight gradient tile has summed, by (kind, expert, tile).
    std::map<std::tuple<TaskKind, int, int>, int64_t> summed;
    std::map<std::tuple<TaskKind, int, int>, bool> carried;
    std::map<TaskKind, int64_t> count;
    for (int64_t i = 0; i < program.NumTasks(Queue::kMerged); ++i) {
      const Task task = program.Decode(Queue::kMerged, i);
      ++count[task.kind];
      if (task.kind != TaskKind::kWeightGradDown && task.kind != TaskKind::kWeightGradGateUp) {
        continue;
      }
      const auto key = std::tuple(task.kind, task.expert, task.tile);
      const WeightGradPiece piece = program.PieceOf(task);
      const int64_t begin = program_case.table.expert_block_begin[task.expert];
      const int64_t end = program_case.table.expert_block_begin[task.expert + 1];
      ASSERT_EQ(piece.carry_in, summed.contains(key));
      const int64_t first = piece.carry_in ? summed[key] : begin;
      if (begin == end) {
        ASSERT_EQ(piece.num_blocks + piece.num_rows, 0);
      } else {
        ASSERT_EQ(piece.first_block, first);
        ASSERT_GE(piece.num_blocks, 1);
        ASSERT_EQ(shape.ring.macrobatch_of_block(first), task.macrobatch);
        ASSERT_EQ(shape.ring.macrobatch_of_block(first + piece.num_blocks - 1), task.macrobatch);
        const int64_t rows_left =
            program_case.table.expert_rows[task.expert] - (first - begin) * kRowBlock;
        ASSERT_EQ(piece.num_rows, std::min(rows_left, piece.num_blocks * kRowBlock));
      }
      summed[key] = first + piece.num_blocks;
      carried[key] = piece.carry_out;
      ASSERT_EQ(piece.carry_out, summed[key] < end);
    }
    for (const auto& [key, still_carried] : carried) ASSERT_FALSE(still_carried);
    const auto num_experts = static_cast<int64_t>(program_case.table.expert_rows.size());
    ASSERT_EQ(static_cast<int64_t>(summed.size()), num_experts * shape.weight_grad_tiles());
    ASSERT_EQ(count[TaskKind::kReverseCombine], shape.ring.num_row_blocks);
    ASSERT_EQ(count[TaskKind::kReverseDispatch], shape.ring.num_row_blocks);
    ASSERT_EQ(count[TaskKind::kRecomputeDispatch] * shape.intermediate_tiles,
              count[TaskKind::kRecomputeGateUp]);
  }
}

// Far beyond 2^31 tasks and 2^31 rows' worth of addresses: boundaries of minibatches computed by
// adding up, in int64, against decoding.
TEST(TaskOrderTest, IndicesBeyondInt32) {
  ProgramCase program_case =
      ProgramOfBlocks(Pass::kForward, {9'000'000, 7'777'215}, 40'000, 3'000'000);
  ProgramShape& shape = program_case.shape;
  shape.intermediate_tiles = 96;
  shape.hidden_tiles = 112;
  const TaskProgram program = program_case.Create();
  const RingPlan& ring = shape.ring;
  int64_t index = 1;  // after the entry barrier
  const auto expect_span = [&](TaskKind kind, int64_t first, int64_t blocks, int64_t tiles) {
    const Task begin = program.Decode(Queue::kMerged, index);
    ASSERT_EQ(Key(begin), std::tuple(static_cast<int>(kind), first, 0, first >= 9'000'000,
                                     ring.macrobatch_of_block(first)));
    index += blocks * tiles;
    const Task end = program.Decode(Queue::kMerged, index - 1);
    ASSERT_EQ(Key(end), std::tuple(static_cast<int>(kind), first + blocks - 1, tiles - 1,
                                   first + blocks - 1 >= 9'000'000,
                                   ring.macrobatch_of_block(first + blocks - 1)));
  };
  int64_t first = -1;
  int64_t blocks = 0;
  for (int64_t macrobatch = ring.num_macrobatches() - 1; macrobatch >= 0; --macrobatch) {
    for (int64_t j = 0; j < ring.minibatches_in_macrobatch(macrobatch); ++j) {
      const int64_t next_first = ring.first_block_of_minibatch(macrobatch, j);
      const int64_t next_blocks = ring.blocks_in_minibatch(macrobatch, j);
      if (first >= 0) {
        expect_span(TaskKind::kGateUp, first, blocks, shape.intermediate_tiles);
        expect_span(TaskKind::kDown, first, blocks, shape.hidden_tiles);
      }
      expect_span(TaskKind::kDispatch, next_first, next_blocks, 1);
      if (first >= 0) expect_span(TaskKind::kCombine, first, blocks, 1);
      if (HasFatalFailure()) return;
      first = next_first;
      blocks = next_blocks;
    }
  }
  expect_span(TaskKind::kGateUp, first, blocks, shape.intermediate_tiles);
  expect_span(TaskKind::kDown, first, blocks, shape.hidden_tiles);
  expect_span(TaskKind::kCombine, first, blocks, 1);
  EXPECT_EQ(program.NumTasks(Queue::kMerged), index + 1);
  EXPECT_GT(index, int64_t{1} << 31);
}

TEST(TaskOrderTest, ErrorsNameTheField) {
  const ProgramCase good = ProgramOfBlocks(Pass::kBackward, {3}, 2, 2);
  const auto message = [&](auto change) {
    ProgramCase bad = good;
    change(bad.shape);
    const StatusOr<TaskProgram> program = TaskProgram::Create(bad.shape, bad.table.view());
    return program.ok() ? std::string("ok") : program.status().message();
  };
  EXPECT_EQ(message([](ProgramShape&) {}), "ok");
  EXPECT_THAT(message([](ProgramShape& shape) { shape.ring.num_row_blocks = 4; }),
              HasSubstr("num_row_blocks: expected 3, the row blocks of the table, got 4"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.ring.minibatch_blocks = 0; }),
              HasSubstr("ring.minibatch_blocks: expected 1 to"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.ring.macrobatch_blocks = -1; }),
              HasSubstr("ring.macrobatch_blocks"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.intermediate_tiles = 0; }),
              HasSubstr("intermediate_tiles"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.hidden_tiles = 0; }),
              HasSubstr("hidden_tiles"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.weight_grad_down_tiles = 0; }),
              HasSubstr("weight_grad_down_tiles"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.shared_intermediate_tiles = 2; }),
              HasSubstr("shared_weight_grad_down_tiles: expected 1 to"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.shared_weight_grad_gate_up_tiles = 2; }),
              HasSubstr("shared_weight_grad_gate_up_tiles: expected 0 to 0, got 2"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.kept_macrobatches = 2; }),
              HasSubstr("kept_macrobatches: expected 0 to 1, got 2"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.token_blocks = -1; }),
              HasSubstr("token_blocks"));
}

TEST(TaskOrderTest, NamesOfKindsAndCounters) {
  EXPECT_STREQ(TaskKindName(TaskKind::kEntryBarrier), "EntryBarrier");
  EXPECT_STREQ(TaskKindName(TaskKind::kSharedWeightGradGateUp), "SharedWeightGradGateUp");
  EXPECT_STREQ(TaskKindName(static_cast<TaskKind>(kNumTaskKinds)), "Unknown");
  EXPECT_STREQ(CounterFamilyName(CounterFamily::kWeightGradDone), "WeightGradDone");
  EXPECT_STREQ(CounterFamilyName(static_cast<CounterFamily>(-1)), "Unknown");
}

}  // namespace
}  // namespace mok
