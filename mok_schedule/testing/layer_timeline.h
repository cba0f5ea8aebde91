// Timelines of the passes of real layers: shapes of models, and durations of tiles from the rates
// of a machine.
#pragma once

#include <cstdint>
#include <string>

#include "mok_schedule/task_program.h"
#include "mok_schedule/testing/random_program.h"
#include "mok_schedule/testing/timeline.h"

namespace mok::testing {

// One rank of a layer. Output tiles are 128 x 256: 128 columns of I in GateUp, half gate and half
// up, and 256 columns elsewhere.
struct LayerModel {
  std::string name;
  int64_t tokens = 0;  // of this rank
  int64_t topk = 1;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t shared_intermediate = 0;  // 0: no shared expert
  int64_t experts = 0;              // local ones; each gets the same number of rows
  double remote_routes = 0;         // share of the routes that cross the link
};

// A machine: by default one H200 under load.
struct MachineModel {
  int num_workers = 132;
  double flops = 678e12;          // of all workers together
  double tile_overhead = 1.5e-6;  // seconds per compute task
  double link_bytes = 340e9;      // per second and direction
  double memory_bytes = 4e12;     // per second, for TokenReduce
};

struct OrderOptions {
  int64_t minibatch_blocks = 0;  // 0: DefaultMinibatchRows with `waves`
  int64_t waves = 2;
  int64_t num_macrobatches = 1;  // of about equal size
  int32_t output_panel_blocks = 0;
  int32_t exchange_tiles = 8;
  int64_t d_x_window_minibatches = 0;  // 0: no window
};

ProgramCase LayerProgram(const LayerModel& layer, const MachineModel& machine, Pass pass,
                         const OrderOptions& options);
TimelineModel LayerTimelineModel(const LayerModel& layer, const MachineModel& machine,
                                 const TaskProgram& program);

// Layers of a two-rank machine: K routes per token, half of them remote; and the traffic of a
// 64-rank domain on two ranks, where every route is a token of its own and 63/64 are remote.
extern const LayerModel kKimiModel, kKimiTraffic, kQwenModel, kQwenTraffic;

}  // namespace mok::testing
