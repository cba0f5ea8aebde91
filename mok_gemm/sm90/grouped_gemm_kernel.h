// The grouped-GEMM kernel: the worker with a static tile order, one persistent block per SM.
//
// Warps: consumers first, then one warpgroup whose first two warps are producer and scheduler (one
// thread of each works). Tiles block, block + grid, ... of the raster belong to a block.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_gemm/sm90/grouped_gemm_params.h"
#include "mok_gemm/sm90/held_epilogue.h"
#include "mok_gemm/sm90/held_stage.h"
#include "mok_gemm/sm90/task_queue.h"
#include "mok_gemm/sm90/tile_raster.h"

namespace mok::grouped_gemm_internal {

constexpr int kQueueDepth = 2;

struct Task {
  GemmTask gemm;
  HeldTile c;    // kStore
  int64_t tile;  // -1: end of work
};

template <class Config>
struct SharedStorage {
  GemmStages<Config> stages;
  GemmBarriers<Config> barriers;
  TaskQueueStorage<Task, kQueueDepth> queue;
};

template <class Config>
constexpr uint32_t kThreads = Config::kConsumerThreads + 128;

// Output columns of a whole tile.
template <class Config, GemmEpilogue kEpilogue>
constexpr int32_t kTileColumns =
    kEpilogue == GemmEpilogue::kSwiGlu ? Config::kHalfN : Config::kTileN;

// The task of a place; columns <= 0 for the second half of a tile that has none.
template <class Config, GemmEpilogue kEpilogue>
MOK_DEVICE Task MakeTask(const GroupedGemmParams& p, int64_t tile, const TilePlace& place) {
  constexpr bool kIsSwiGlu = kEpilogue == GemmEpilogue::kSwiGlu;
  const int32_t row_in_expert = place.row_block * Config::kTileM;
  const int32_t row = p.rows.begin[place.expert] + row_in_expert;
  const int32_t rest = p.rows.count[place.expert] - row_in_expert;
  const int32_t width = p.operands.width;
  const int32_t column = place.column_tile * kTileColumns<Config, kEpilogue> +
                         (place.part == TilePart::kSecondHalf ? Config::kHalfN : 0);
  const int32_t most_columns =
      place.part == TilePart::kWhole ? kTileColumns<Config, kEpilogue> : Config::kHalfN;
  const WeightCoordinate first = WeightTileCoordinate(Config::kOrder, place.expert, column, width);
  const WeightCoordinate second = WeightTileCoordinate(
      Config::kOrder, place.expert, kIsSwiGlu ? column : column + Config::kHalfN, width);
  const int64_t offset = row * p.outputs.stride + column;
  Task task;
  task.tile = tile;
  task.gemm.a = &p.operands.a;
  task.gemm.b[0] = &p.operands.b[0];
  task.gemm.b[1] = &p.operands.b[1];
  task.gemm.a_row = row;
  task.gemm.b_expert = first.expert;
  task.gemm.b_row[0] = first.row;
  task.gemm.b_row[1] = second.row;
  task.gemm.k_blocks = p.operands.k_blocks;
  task.gemm.rows = rest < Config::kTileM ? rest : Config::kTileM;
  task.gemm.columns = width - column < most_columns ? width - column : most_columns;
  task.gemm.b_halves = kIsSwiGlu || task.gemm.columns > Config::kHalfN ? 2 : 1;
  task.gemm.swiglu_limit = p.outputs.swiglu_limit;
  task.gemm.out_stride = p.outputs.stride;
  task.gemm.out = p.outputs.out + offset;
  task.gemm.gate = kIsSwiGlu ? p.outputs.gate + offset : nullptr;
  task.gemm.up = kIsSwiGlu ? p.outputs.up + offset : nullptr;
  task.c = {&p.c, row, column};
  return task;
}

template <class Config>
MOK_DEVICE DeviceWait WaitOf(const GroupedGemmParams& p, GroupedGemmRole role) {
  return DeviceWait(p.wait, static_cast<int32_t>(role));
}

template <class Config, GemmEpilogue kEpilogue>
MOK_DEVICE void SchedulerRole(const GroupedGemmParams& p, SharedStorage<Config>& s) {
  DeviceWait wait = WaitOf<Config>(p, GroupedGemmRole::kScheduler);
  TaskQueue<Task, kQueueDepth> queue(s.queue);
  // Both halves of a GateUp tile are needed for any of its columns: it cannot be split.
  const bool can_split = kEpilogue == GemmEpilogue::kStore;
  const auto num_blocks = static_cast<int32_t>(GridDimensions().x);
  TileRaster raster({p.rows.count, p.rows.num_experts,
                     CeilDiv(p.operands.width, kTileColumns<Config, kEpilogue>), Config::kTileM,
                     p.max_panel_blocks, can_split ? num_blocks : 0});
  TilePlace place;
  int64_t tile = BlockIndex().x;
  for (; raster.Find(tile, place); tile += num_blocks) {
    const Task task = MakeTask<Config, kEpilogue>(p, tile, place);
    if (task.gemm.columns <= 0) continue;
    wait.SetTask(0, tile);
    queue.Push(task, wait);
  }
  Task end = {};
  end.tile = -1;
  queue.Push(end, wait);
}

template <class Config, GemmEpilogue kEpilogue>
MOK_DEVICE void ProducerRole(const GroupedGemmParams& p, SharedStorage<Config>& s) {
  DeviceWait wait = WaitOf<Config>(p, GroupedGemmRole::kProducer);
  PrefetchTensorMap(&p.operands.a);
  PrefetchTensorMap(&p.operands.b[0]);
  PrefetchTensorMap(&p.operands.b[1]);
  TaskQueue<Task, kQueueDepth> queue(s.queue);
  GemmPipeline<Config> pipeline(s.barriers);
  HeldStores<Config, TaskQueue<Task, kQueueDepth>> stores(s.stages, pipeline, queue);
  for (;;) {
    stores.AwaitNext(wait);
    const Task& task = queue.Front(wait);
    if (task.tile < 0) break;
    wait.SetTask(0, task.tile);
    ProducerLoadTile<Config>(task.gemm, s.stages, pipeline, wait,
                             [&](int block) { stores.BeforeBlock(block, wait); });
    if (kEpilogue == GemmEpilogue::kStore) {
      stores.Loaded(task.gemm, task.c, pipeline, wait);
    } else {
      queue.Pop();
    }
  }
  if (Config::kBug != GemmBug::kLeavesStoresBehind) stores.Store(wait);
}

template <class Config, GemmEpilogue kEpilogue>
MOK_DEVICE void ConsumerRole(const GroupedGemmParams& p, SharedStorage<Config>& s) {
  DeviceWait wait = WaitOf<Config>(p, GroupedGemmRole::kConsumer);
  TaskQueue<Task, kQueueDepth> queue(s.queue);
  HeldConsumer<Config> consumer(s.stages, s.barriers);
  constexpr bool kHolds = kEpilogue == GemmEpilogue::kStore;
  for (;;) {
    const Task& task = queue.Front(wait);
    if (task.tile < 0) break;
    wait.SetTask(0, task.tile);
    if (Config::kBug == GemmBug::kTaskReleasedBeforeRead) queue.Pop();
    typename GemmConsumer<Config>::Accumulator accumulator;
    if (consumer.template MainLoop<kHolds>(task.gemm, wait, accumulator)) {
      if constexpr (kHolds) {
        EpilogueStoreThroughStage<Config>(task.gemm, accumulator, consumer);
      } else {
        EpilogueSwiGlu<Config>(task.gemm, accumulator);
      }
    }
    if (Config::kBug != GemmBug::kTaskReleasedBeforeRead) queue.Pop();
  }
}

template <class Config, GemmEpilogue kEpilogue>
MOK_KERNEL(kThreads<Config>, 1)
GroupedGemm(MOK_GRID_CONSTANT(GroupedGemmParams) p) {
  MOK_SHARED_STORAGE(SharedStorage<Config>, s);
  if (ThreadIndex().x == 0) {
    InitializeGemm<Config>(s.stages, s.barriers);
    constexpr int kReaders = Config::kConsumerThreads + 1;  // and the producer
    constexpr int kExtra = Config::kBug == GemmBug::kQueueCountTooHigh ? 1 : 0;
    TaskQueue<Task, kQueueDepth>::Initialize(s.queue, kReaders + kExtra);
    if (Config::kBug != GemmBug::kNoInitFence) FenceMbarrierInit();
  }
  SyncBlock();
  const int warp = static_cast<int>(ThreadIndex().x) / 32;
  if (warp < Config::kConsumerWarps) {
    IncreaseRegisters<kSm90ConsumerRegisters>();
    ConsumerRole<Config, kEpilogue>(p, s);
  } else {
    DecreaseRegisters<kSm90ProducerRegisters>();
    if (ThreadIndex().x % 32 != 0) return;
    if (warp == Config::kConsumerWarps) ProducerRole<Config, kEpilogue>(p, s);
    if (warp == Config::kConsumerWarps + 1) SchedulerRole<Config, kEpilogue>(p, s);
  }
}

template <class Config, GemmEpilogue kEpilogue>
GroupedGemmKernelInfo KernelInfo() {
  return {.address = reinterpret_cast<const void*>(&GroupedGemm<Config, kEpilogue>),
          .threads = kThreads<Config>,
          .shared_bytes = sizeof(SharedStorage<Config>),
          .order = Config::kOrder,
          .epilogue = kEpilogue,
          .half_columns = Config::kHalfN};
}

}  // namespace mok::grouped_gemm_internal
