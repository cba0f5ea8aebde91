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
#include <utility>
#include <vector>

#include "mok_schedule/program_cursor.h"
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
  for (int number = 0; number < kNumQueues; ++number) {
    const auto queue = static_cast<Queue>(number);
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

// A cursor finds what Decode finds, whatever it leaves out.
void ExpectCursor(const TaskProgram& program, std::mt19937_64& random) {
  for (int number = 0; number < kNumQueues; ++number) {
    const auto queue = static_cast<Queue>(number);
    for (const int64_t stride : {1, 2, 9, 100}) {
      ProgramCursor cursor(program.view(), queue);
      for (int64_t i = testing::Uniform(random, 0, stride); i < program.NumTasks(queue);
           i += testing::Uniform(random, 0, stride)) {
        const Task task = cursor.Seek(i), expected = program.Decode(queue, i);
        ASSERT_EQ(Key(task), Key(expected)) << "queue " << number << " index " << i << ": got "
                                            << Text(task) << ", expected " << Text(expected);
        if (stride == 1) ++i;
      }
    }
  }
}

TEST(TaskOrderTest, CursorEqualsDecoding) {
  for (const Pass pass : kPasses) {
    for (uint64_t seed = 0; seed < 1000; ++seed) {
      std::mt19937_64 random(seed);
      const ProgramCase program_case = RandomProgram(random, pass);
      SCOPED_TRACE(program_case.Description());
      ExpectCursor(program_case.Create(), random);
      if (HasFatalFailure()) return;
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
    seen["fused reduction"] += shape.fuses_token_reduce();
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
  EXPECT_EQ(seen.size(), 12u);
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

// The names joined by spaces, for comparison with a text that a reader can follow.
std::string Order(const ProgramCase& program_case) {
  std::string text;
  for (const std::string& name : Names(program_case)) {
    text += StrCat(text.empty() ? "" : " ", name);
  }
  return text;
}

TEST(TaskOrderTest, ForwardIsPipelinedInsideAMacrobatch) {
  EXPECT_EQ(Order(ProgramOfBlocks(Pass::kForward, {6}, 1, 6)),
            "EntryBarrier Dispatch0 Dispatch1 Dispatch2 "
            "GateUp0 GateUp1 Dispatch3 Down0 "
            "GateUp2 Dispatch4 Combine0 Down1 "
            "GateUp3 Dispatch5 Combine1 Down2 "
            "GateUp4 Combine2 Down3 "
            "GateUp5 Combine3 Down4 "
            "Combine4 Down5 Combine5 ExitBarrier");
}

TEST(TaskOrderTest, ForwardWalksMacrobatchesFromTheLastToTheFirst) {
  EXPECT_EQ(Order(ProgramOfBlocks(Pass::kForward, {3, 2}, 1, 2)),
            "EntryBarrier Dispatch4 "
            "GateUp4 Dispatch2 Dispatch3 Down4 Combine4 "
            "GateUp2 GateUp3 Dispatch0 Dispatch1 Down2 Combine2 Down3 Combine3 "
            "GateUp0 GateUp1 Down0 Combine0 Down1 Combine1 ExitBarrier");
}

TEST(TaskOrderTest, BackwardIsPipelinedOneStageDeeperWhereItRecomputes) {
  ProgramCase program_case = ProgramOfBlocks(Pass::kBackward, {4}, 1, 4);
  EXPECT_EQ(Order(program_case),
            "EntryBarrier ReverseCombine0 ReverseCombine1 ReverseCombine2 "
            "DownGrad0 DownGrad1 ReverseCombine3 InputGrad0 "
            "DownGrad2 ReverseDispatch0 InputGrad1 "
            "DownGrad3 ReverseDispatch1 InputGrad2 "
            "ReverseDispatch2 InputGrad3 WeightGradDown WeightGradGateUp ReverseDispatch3 "
            "ExitBarrier");
  program_case.shape.kept_macrobatches = 0;
  EXPECT_EQ(Order(program_case),
            "EntryBarrier RecomputeDispatch0 RecomputeDispatch1 RecomputeDispatch2 "
            "ReverseCombine0 ReverseCombine1 ReverseCombine2 "
            "RecomputeGateUp0 RecomputeGateUp1 DownGrad0 "
            "RecomputeGateUp2 DownGrad1 RecomputeDispatch3 ReverseCombine3 InputGrad0 "
            "RecomputeGateUp3 DownGrad2 ReverseDispatch0 InputGrad1 "
            "DownGrad3 ReverseDispatch1 InputGrad2 "
            "ReverseDispatch2 InputGrad3 WeightGradDown WeightGradGateUp ReverseDispatch3 "
            "ExitBarrier");
}

TEST(TaskOrderTest, BackwardRecomputesAllButTheKeptMacrobatch) {
  EXPECT_EQ(Order(ProgramOfBlocks(Pass::kBackward, {3}, 2, 2)),
            "EntryBarrier ReverseCombine0 ReverseCombine1 "
            "DownGrad0 DownGrad1 InputGrad0 InputGrad1 WeightGradDown WeightGradGateUp "
            "ReverseDispatch0 ReverseDispatch1 RecomputeDispatch2 ReverseCombine2 "
            "RecomputeGateUp2 DownGrad2 InputGrad2 WeightGradDown WeightGradGateUp "
            "ReverseDispatch2 ExitBarrier");
}

// A fused reduction ends the pass: the shared expert's last tiles, behind the exit barrier.
TEST(TaskOrderTest, TheSharedExpertsLastTilesReplaceTokenReduce) {
  ProgramCase program_case = ProgramOfBlocks(Pass::kForward, {1}, 1, 1);
  ProgramShape& shape = program_case.shape;
  shape.token_blocks = 1;
  shape.hidden_tiles = 2;
  shape.shared_intermediate_tiles = shape.shared_down_grad_tiles = 1;
  shape.shared_weight_grad_down_tiles = shape.shared_weight_grad_gate_up_tiles = 1;
  EXPECT_EQ(Order(program_case),
            "EntryBarrier SharedGateUp0 Dispatch0 GateUp0 Down0 Down0 Combine0 "
            "SharedDown0 SharedDown0 ExitBarrier TokenReduce0");
  shape.hidden_tiles = 3;
  shape.fused_reduce_width = 2;
  shape.token_blocks = 2;
  EXPECT_EQ(Order(program_case),
            "EntryBarrier SharedGateUp0 SharedGateUp1 Dispatch0 GateUp0 Down0 Down0 Down0 Combine0 "
            "ExitBarrier SharedDown0 SharedDown0 SharedDown1 SharedDown1");
  shape.pass = Pass::kBackward;
  shape.token_blocks = 1;
  EXPECT_EQ(
      Order(program_case),
      "EntryBarrier SharedDownGrad0 ReverseCombine0 DownGrad0 InputGrad0 InputGrad0 InputGrad0 "
      "WeightGradDown WeightGradGateUp ReverseDispatch0 "
      "SharedWeightGradDown SharedWeightGradGateUp "
      "ExitBarrier SharedInputGrad0 SharedInputGrad0");
  const TaskProgram program = program_case.Create();
  const Dependencies last = program.DependenciesOf({TaskKind::kSharedInputGrad, 0, 1, -1, -1});
  ASSERT_EQ(last.num_waits, 2);
  EXPECT_EQ(last.num_late_waits, 1);
  EXPECT_EQ(program.NameOfCounter(last.waits[1].first_counter).family, CounterFamily::kExit);
  EXPECT_EQ(last.num_signals, 0);
}

// Tiles outer and row blocks inner, but for exchanges, and for Down and InputGrad panel by panel.
TEST(TaskOrderTest, OrderOfTilesInsideAMinibatch) {
  ProgramCase program_case = ProgramOfBlocks(Pass::kForward, {3}, 3, 3);
  program_case.shape.intermediate_tiles = 2;
  program_case.shape.hidden_tiles = 2;
  program_case.shape.exchange_tiles = 2;
  program_case.shape.output_panel_blocks = 2;
  const TaskProgram program = program_case.Create();
  std::string text;
  for (int64_t i = 1; i + 1 < program.NumTasks(Queue::kMerged); ++i) {
    const Task task = program.Decode(Queue::kMerged, i);
    text += StrCat(TaskKindName(task.kind), task.block, ".", task.tile, " ");
  }
  EXPECT_EQ(text,
            "Dispatch0.0 Dispatch0.1 Dispatch1.0 Dispatch1.1 Dispatch2.0 Dispatch2.1 "
            "GateUp0.0 GateUp1.0 GateUp2.0 GateUp0.1 GateUp1.1 GateUp2.1 "
            "Down0.0 Down1.0 Down0.1 Down1.1 Down2.0 Down2.1 "
            "Combine0.0 Combine0.1 Combine1.0 Combine1.1 Combine2.0 Combine2.1 ");
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
    const int64_t exchanges = shape.ring.num_row_blocks * shape.exchange_tiles;
    ASSERT_EQ(count[TaskKind::kReverseCombine], exchanges);
    ASSERT_EQ(count[TaskKind::kReverseDispatch], exchanges);
    ASSERT_EQ(count[TaskKind::kRecomputeDispatch] * shape.intermediate_tiles,
              count[TaskKind::kRecomputeGateUp] * shape.exchange_tiles);
  }
}

// Where every macrobatch has at least two minibatches, no group of compute tasks (one kind, one
// minibatch) needs what the group right before it produces: with it missing, all waits still hold.
// Exceptions: the shared expert's recomputation has nothing to hide behind, and there is one carry
// buffer.
void ExpectNoGroupNeedsTheGroupBeforeIt(const TaskProgram& program) {
  const ProgramShape& shape = program.shape();
  std::vector<uint64_t> counters(program.NumCounters(), 0);
  std::vector<int32_t> signals_before, signals;  // of the group before, of the group
  std::tuple<TaskKind, int64_t> last_group = {TaskKind::kEntryBarrier, -1};
  for (int64_t i = 0; i < program.NumTasks(Queue::kMerged); ++i) {
    const Task task = program.Decode(Queue::kMerged, i);
    if (task.kind == TaskKind::kTokenReduce) break;  // waits for the exit barrier anyway
    const Dependencies dependencies = program.DependenciesOf(task);
    const auto first_signal = dependencies.signals;
    const auto last_signal = dependencies.signals + dependencies.num_signals;
    if (!IsInQueue(task.kind, Queue::kCompute)) {
      for (auto signal = first_signal; signal != last_signal; ++signal) ++counters[*signal];
      continue;
    }
    const int64_t minibatch =
        task.expert < 0 || task.block < 0
            ? -1
            : shape.ring.slot_of_block(task.block) / shape.ring.minibatch_blocks;
    const std::tuple<TaskKind, int64_t> group = {task.kind, minibatch};
    if (group != last_group) {
      for (const int32_t signal : signals_before) ++counters[signal];
      signals_before = std::move(signals);
      signals.clear();
      last_group = group;
    }
    signals.insert(signals.end(), first_signal, last_signal);
    if (task.kind == TaskKind::kSharedDownGrad && shape.is_shared_recomputed()) continue;
    for (int w = 0; w < dependencies.num_waits; ++w) {
      const Wait& wait = dependencies.waits[w];
      const CounterFamily family = program.NameOfCounter(wait.first_counter).family;
      if (family == CounterFamily::kWeightGradDone) continue;
      for (int c = 0; c < wait.num_counters; ++c) {
        ASSERT_GE(counters[wait.first_counter + c], wait.target)
            << Text(task) << " needs " << CounterFamilyName(family);
      }
    }
  }
}

TEST(TaskOrderTest, NoGroupOfTilesNeedsTheGroupBeforeIt) {
  int num_programs = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    std::mt19937_64 random(seed);
    const ProgramCase program_case = RandomProgram(random, kPasses[seed % 2]);
    const RingPlan& ring = program_case.shape.ring;
    if (ring.num_row_blocks == 0) continue;
    if (ring.minibatches_in_macrobatch(ring.num_macrobatches() - 1) < 2) continue;
    SCOPED_TRACE(StrCat("seed ", seed, ": ", program_case.Description()));
    ASSERT_NO_FATAL_FAILURE(ExpectNoGroupNeedsTheGroupBeforeIt(program_case.Create()));
    ++num_programs;
  }
  EXPECT_GT(num_programs, 300);
}

// Far beyond 2^31 tasks and 2^31 rows' worth of addresses: boundaries of segments computed by
// adding up, in int64, against decoding.
TEST(TaskOrderTest, IndicesBeyondInt32) {
  ProgramCase program_case =
      ProgramOfBlocks(Pass::kForward, {9'000'000, 7'777'215}, 40'000, 3'000'000);
  ProgramShape& shape = program_case.shape;
  shape.intermediate_tiles = 96;
  shape.hidden_tiles = 112;
  shape.exchange_tiles = 2;
  const TaskProgram program = program_case.Create();
  const RingPlan& ring = shape.ring;
  int64_t index = 1;  // after the entry barrier
  const auto expect_blocks = [&](TaskKind kind, int64_t first, int64_t blocks, int64_t tiles) {
    const Task begin = program.Decode(Queue::kMerged, index);
    ASSERT_EQ(Key(begin), std::tuple(static_cast<int>(kind), first, 0, first >= 9'000'000,
                                     ring.macrobatch_of_block(first)));
    index += blocks * tiles;
    const Task end = program.Decode(Queue::kMerged, index - 1);
    ASSERT_EQ(Key(end), std::tuple(static_cast<int>(kind), first + blocks - 1, tiles - 1,
                                   first + blocks - 1 >= 9'000'000,
                                   ring.macrobatch_of_block(first + blocks - 1)));
  };
  const auto expect_minibatch = [&](TaskKind kind, int64_t m, int64_t j, int64_t tiles) {
    if (HasFatalFailure() || j < 0 || j >= ring.minibatches_in_macrobatch(m)) return;
    expect_blocks(kind, ring.first_block_of_minibatch(m, j), ring.blocks_in_minibatch(m, j), tiles);
  };
  const auto expect_lead_in = [&](int64_t m) {
    if (m >= 0) expect_blocks(TaskKind::kDispatch, ring.first_block_of_macrobatch(m), 120'000, 2);
  };
  int64_t m = ring.num_macrobatches() - 1;
  expect_lead_in(m);
  for (; m >= 0; --m) {
    const int64_t n = ring.minibatches_in_macrobatch(m);
    expect_minibatch(TaskKind::kGateUp, m, 0, shape.intermediate_tiles);
    for (int64_t j = 0; j < n; ++j) {
      expect_minibatch(TaskKind::kGateUp, m, j + 1, shape.intermediate_tiles);
      expect_minibatch(TaskKind::kDispatch, m, j + 3, 2);
      if (j == n - 2) expect_lead_in(m - 1);
      expect_minibatch(TaskKind::kCombine, m, j - 1, 2);
      expect_minibatch(TaskKind::kDown, m, j, shape.hidden_tiles);
      if (HasFatalFailure()) return;
    }
    expect_minibatch(TaskKind::kCombine, m, n - 1, 2);
  }
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
              HasSubstr("shared_down_grad_tiles: expected 1 to"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.down_grad_tiles = 0; }),
              HasSubstr("down_grad_tiles: expected 1 to"));
  EXPECT_THAT(message([](ProgramShape& shape) {
                shape.shared_intermediate_tiles = shape.shared_down_grad_tiles = 2;
              }),
              HasSubstr("shared_weight_grad_down_tiles: expected 1 to"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.shared_weight_grad_gate_up_tiles = 2; }),
              HasSubstr("shared_weight_grad_gate_up_tiles: expected 0 to 0, got 2"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.d_x_window_blocks = 1; }),
              HasSubstr("d_x_window_blocks: expected 2 to"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.fused_reduce_width = 1; }),
              HasSubstr("fused_reduce_width: expected 0 to 0, got 1"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.kept_macrobatches = 2; }),
              HasSubstr("kept_macrobatches: expected 0 to 1, got 2"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.exchange_tiles = 0; }),
              HasSubstr("exchange_tiles: expected a divisor of 128, got 0"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.exchange_tiles = 48; }),
              HasSubstr("exchange_tiles: expected a divisor of 128, got 48"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.token_reduce_tiles = 256; }),
              HasSubstr("token_reduce_tiles: expected a divisor of 128, got 256"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.output_panel_blocks = -1; }),
              HasSubstr("output_panel_blocks"));
  EXPECT_THAT(message([](ProgramShape& shape) { shape.gate_up_panel_blocks = -1; }),
              HasSubstr("gate_up_panel_blocks"));
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
