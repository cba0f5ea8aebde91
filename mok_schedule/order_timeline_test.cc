// The order leaves no avoidable gaps: simulated timelines of real layers on 132 workers, against
// the compute time alone and against the same tasks without software pipelining.
#include <gtest/gtest.h>

#include <algorithm>

#include "mok_schedule/task_program.h"
#include "mok_schedule/testing/layer_timeline.h"
#include "mok_schedule/testing/timeline.h"

namespace mok {
namespace {

using ::mok::testing::kKimiModel;
using ::mok::testing::kKimiTraffic;
using ::mok::testing::kQwenModel;
using ::mok::testing::kQwenTraffic;
using ::mok::testing::LayerModel;
using ::mok::testing::LayerProgram;
using ::mok::testing::LayerTimelineModel;
using ::mok::testing::MachineModel;
using ::mok::testing::MergedOrder;
using ::mok::testing::OrderOptions;
using ::mok::testing::ProgramCase;
using ::mok::testing::RunTimeline;
using ::mok::testing::Timeline;
using ::mok::testing::TimelineModel;
using ::mok::testing::UnpipelinedOrder;

// The end of a pass in this order (and in the other) over the compute time, or the link's if
// longer.
struct Ratios {
  double pipelined, unpipelined;
};

Ratios MeasureRatios(const LayerModel& layer, Pass pass, const OrderOptions& options,
                     bool separate_pushes = false) {
  const ProgramCase program_case = LayerProgram(layer, MachineModel(), pass, options);
  const TaskProgram program = program_case.Create();
  TimelineModel model = LayerTimelineModel(layer, MachineModel(), program);
  model.separate_pushes = separate_pushes;
  const Timeline pipelined = RunTimeline(program, MergedOrder(program), model);
  const Timeline unpipelined = RunTimeline(program, UnpipelinedOrder(program), model);
  const double floor = std::max(pipelined.busy, pipelined.exchange_busy);
  return {pipelined.end / floor, unpipelined.end / floor};
}

// One wave of gate+up tiles per minibatch is enough for the pipeline.
TEST(OrderTimelineTest, WorkersHardlyEverWait) {
  for (const LayerModel& layer : {kKimiModel, kKimiTraffic, kQwenModel, kQwenTraffic}) {
    for (const bool separate_pushes : {false, true}) {
      SCOPED_TRACE(layer.name);
      OrderOptions options;
      options.waves = 1;
      const Ratios forward = MeasureRatios(layer, Pass::kForward, options, separate_pushes);
      EXPECT_LT(forward.pipelined, 1.02);
      EXPECT_GT(forward.unpipelined, 1.15);
      const Ratios backward = MeasureRatios(layer, Pass::kBackward, options, separate_pushes);
      EXPECT_LT(backward.pipelined, 1.015);  // long tiles: a wave ends less evenly
      EXPECT_GT(backward.unpipelined, backward.pipelined);
    }
  }
}

TEST(OrderTimelineTest, MacrobatchBoundariesCostNothing) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    OrderOptions options;
    options.num_macrobatches = 3;
    EXPECT_LT(MeasureRatios(kKimiTraffic, pass, options).pipelined, 1.005);
  }
}

// DownGrad of a whole minibatch lies between two of InputGrad, and hides the rows being sent. In
// the Hopper kernel's minibatches and panels.
TEST(OrderTimelineTest, AWindowOfAMinibatchCostsNothing) {
  for (const LayerModel& layer : {kKimiModel, kKimiTraffic, kQwenModel, kQwenTraffic}) {
    OrderOptions options;
    options.num_macrobatches = 2;
    options.minibatch_blocks = 33;
    options.output_panel_blocks = 11;
    const double all = MeasureRatios(layer, Pass::kBackward, options, true).pipelined;
    options.d_x_window_minibatches = 1;
    EXPECT_LT(MeasureRatios(layer, Pass::kBackward, options, true).pipelined, 1.001 * all);
  }
}

// With twice the minibatch the last rows leave late, unless Down computes them panel by panel.
TEST(OrderTimelineTest, PanelsOfDownShortenTheTail) {
  OrderOptions options;
  const double whole = MeasureRatios(kQwenTraffic, Pass::kForward, options).pipelined;
  options.output_panel_blocks = 5;
  const double panels = MeasureRatios(kQwenTraffic, Pass::kForward, options).pipelined;
  EXPECT_GT(whole, 1.03);
  EXPECT_LT(panels, 1.01);
}

}  // namespace
}  // namespace mok
