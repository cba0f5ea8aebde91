#include "mok_schedule/testing/layer_timeline.h"

#include <algorithm>
#include <cstdint>

#include "mok_core/bits.h"

namespace mok::testing {
namespace {

constexpr int64_t kTileColumns = 256;

}  // namespace

const LayerModel kKimiModel = {"kimi, model", 2048, 8, 7168, 2048, 2048, 6, 0.5};
const LayerModel kKimiTraffic = {"kimi, ep64-traffic", 16384, 1, 7168, 2048, 256, 6, 63.0 / 64};
const LayerModel kQwenModel = {"qwen, model", 2048, 10, 4096, 1024, 1024, 8, 0.5};
const LayerModel kQwenTraffic = {"qwen, ep64-traffic", 20480, 1, 4096, 1024, 256, 8, 63.0 / 64};

ProgramCase LayerProgram(const LayerModel& layer, const MachineModel& machine, Pass pass,
                         const OrderOptions& options) {
  ProgramCase result;
  // Balanced: this rank receives as many routes as its tokens send.
  const int64_t rows = layer.tokens * layer.topk;
  for (int64_t i = 0; i < layer.experts; ++i) {
    result.table.AddExpert(rows * (i + 1) / layer.experts - rows * i / layer.experts);
  }
  ProgramShape& shape = result.shape;
  shape.pass = pass;
  const int64_t blocks = result.table.view().num_row_blocks();
  MinibatchModel minibatch;
  minibatch.intermediate = layer.intermediate;
  minibatch.tile_rows = kRowBlock;
  minibatch.tile_columns = kTileColumns;
  minibatch.workers_per_tile = 1;
  minibatch.num_workers = machine.num_workers;
  minibatch.waves = options.waves;
  shape.ring.num_row_blocks = blocks;
  shape.ring.minibatch_blocks = options.minibatch_blocks > 0
                                    ? options.minibatch_blocks
                                    : DefaultMinibatchRows(minibatch) / kRowBlock;
  shape.ring.macrobatch_blocks = CeilDiv(blocks, options.num_macrobatches);
  shape.intermediate_tiles = static_cast<int32_t>(2 * layer.intermediate / kTileColumns);
  shape.down_grad_tiles = static_cast<int32_t>(layer.intermediate / kTileColumns);
  shape.hidden_tiles = static_cast<int32_t>(layer.hidden / kTileColumns);
  const int64_t grad_tiles = layer.hidden * layer.intermediate / (kRowBlock * kTileColumns);
  shape.weight_grad_down_tiles = static_cast<int32_t>(grad_tiles);
  shape.weight_grad_gate_up_tiles = static_cast<int32_t>(2 * grad_tiles);
  shape.output_panel_blocks = options.output_panel_blocks;
  shape.exchange_tiles = options.exchange_tiles;
  shape.d_x_window_blocks = options.d_x_window_minibatches * shape.ring.minibatch_blocks;
  shape.token_reduce_tiles = 32;
  shape.token_blocks = CeilDiv<int64_t>(layer.tokens, kRowBlock);
  shape.shared_intermediate_tiles =
      static_cast<int32_t>(2 * layer.shared_intermediate / kTileColumns);
  shape.shared_down_grad_tiles = static_cast<int32_t>(layer.shared_intermediate / kTileColumns);
  const int64_t shared_grad_tiles =
      layer.hidden * layer.shared_intermediate / (kRowBlock * kTileColumns);
  shape.shared_weight_grad_down_tiles = static_cast<int32_t>(shared_grad_tiles);
  shape.shared_weight_grad_gate_up_tiles = static_cast<int32_t>(2 * shared_grad_tiles);
  const int64_t ring_rows = shape.ring.macrobatch_blocks * kRowBlock;
  shape.early_shared_weight_grads = layer.tokens * layer.experts > 2 * ring_rows;  // as on Hopper
  return result;
}

TimelineModel LayerTimelineModel(const LayerModel& layer, const MachineModel& machine,
                                 const TaskProgram& program) {
  TimelineModel model;
  model.compute_workers = machine.num_workers;
  model.exchange_workers = machine.num_workers;
  const ProgramShape shape = program.shape();
  const double row_bytes = 2.0 * static_cast<double>(layer.hidden);
  model.exchange_seconds =
      row_bytes * shape.rows_per_exchange_tile() * layer.remote_routes / machine.link_bytes;
  model.compute_seconds = [&layer, machine, shape, row_bytes, &program](const Task& task) {
    // Seconds of a 128 x `columns` output tile with a contraction of length k.
    const auto tile = [&](int64_t columns, int64_t k) {
      const double flops = 2.0 * kRowBlock * static_cast<double>(columns * k);
      return machine.tile_overhead + flops * machine.num_workers / machine.flops;
    };
    const double reduce_bytes =
        row_bytes * static_cast<double>(layer.topk + 2) * shape.tokens_per_reduce_tile();
    switch (task.kind) {
      case TaskKind::kGateUp:
      case TaskKind::kRecomputeGateUp:
      case TaskKind::kSharedGateUp:
      case TaskKind::kSharedRecomputeGateUp:
      case TaskKind::kDownGrad:
      case TaskKind::kSharedDownGrad:
        return tile(kTileColumns, layer.hidden);
      case TaskKind::kDown:
        return tile(kTileColumns, layer.intermediate);
      case TaskKind::kInputGrad:
        return tile(kTileColumns, 2 * layer.intermediate);
      case TaskKind::kSharedDown:
        return tile(kTileColumns, layer.shared_intermediate);
      case TaskKind::kSharedInputGrad:
        return tile(kTileColumns, 2 * layer.shared_intermediate);
      case TaskKind::kWeightGradDown:
      case TaskKind::kWeightGradGateUp:
        return tile(kTileColumns, program.PieceOf(task).num_rows);
      case TaskKind::kSharedWeightGradDown:
      case TaskKind::kSharedWeightGradGateUp:
        return tile(kTileColumns, layer.tokens);
      default:  // kTokenReduce
        return machine.tile_overhead + reduce_bytes * machine.num_workers / machine.memory_bytes;
    }
  };
  return model;
}

}  // namespace mok::testing
