// What the order of tasks costs: simulated timelines of the layer's passes on 132 workers (see
// testing/timeline.h), with and without software pipelining.
#include <cstdio>

#include "mok_schedule/task_program.h"
#include "mok_schedule/testing/layer_timeline.h"
#include "mok_schedule/testing/timeline.h"

namespace mok {
namespace {

using ::mok::testing::LayerModel;
using ::mok::testing::LayerProgram;
using ::mok::testing::LayerTimelineModel;
using ::mok::testing::MachineModel;
using ::mok::testing::MergedOrder;
using ::mok::testing::OrderOptions;
using ::mok::testing::RunTimeline;
using ::mok::testing::Timeline;
using ::mok::testing::TimelineModel;
using ::mok::testing::UnpipelinedOrder;

void Print(const char* order, const Timeline& timeline) {
  double stalled = 0;
  for (const double seconds : timeline.stalled) stalled += seconds;
  std::printf(
      "    %-34s %7.3f ms, compute %7.3f, waiting %6.3f, exchange %6.3f, last row at %7.3f\n",
      order, timeline.end * 1e3, timeline.busy * 1e3, stalled * 1e3, timeline.exchange_busy * 1e3,
      timeline.last_exchange_end * 1e3);
}

void Compare(const LayerModel& layer, Pass pass, const OrderOptions& options) {
  const MachineModel machine;
  const testing::ProgramCase program_case = LayerProgram(layer, machine, pass, options);
  const TaskProgram program = program_case.Create();
  TimelineModel model = LayerTimelineModel(layer, machine, program);
  const ProgramShape& shape = program.shape();
  std::printf("%s, %s: %lld row blocks, minibatch %lld, macrobatch %lld\n", layer.name.c_str(),
              pass == Pass::kForward ? "forward" : "backward",
              static_cast<long long>(shape.ring.num_row_blocks),
              static_cast<long long>(shape.ring.minibatch_blocks),
              static_cast<long long>(shape.ring.macrobatch_blocks));
  Print("unpipelined", RunTimeline(program, UnpipelinedOrder(program), model));
  Print("this order", RunTimeline(program, MergedOrder(program), model));
  model.separate_pushes = true;
  Print("this order, pushes apart", RunTimeline(program, MergedOrder(program), model));
  OrderOptions panels = options;
  panels.output_panel_blocks = 5;
  const testing::ProgramCase panel_case = LayerProgram(layer, machine, pass, panels);
  const TaskProgram panel_program = panel_case.Create();
  model = LayerTimelineModel(layer, machine, panel_program);
  Print("this order, panels of 5 blocks",
        RunTimeline(panel_program, MergedOrder(panel_program), model));
}

}  // namespace
}  // namespace mok

int main() {
  using namespace mok::testing;
  for (const LayerModel& layer : {kKimiModel, kKimiTraffic, kQwenModel, kQwenTraffic}) {
    for (const mok::Pass pass : {mok::Pass::kForward, mok::Pass::kBackward}) {
      for (const int waves : {1, 2}) {
        OrderOptions options;
        options.waves = waves;
        mok::Compare(layer, pass, options);
      }
    }
  }
  LayerModel no_shared = kQwenTraffic;
  no_shared.name = "qwen, ep64-traffic, no shared expert";
  no_shared.shared_intermediate = 0;
  OrderOptions three;
  three.num_macrobatches = 3;
  for (const mok::Pass pass : {mok::Pass::kForward, mok::Pass::kBackward}) {
    mok::Compare(no_shared, pass, OrderOptions());
    mok::Compare(kKimiTraffic, pass, three);
  }
  return 0;
}
