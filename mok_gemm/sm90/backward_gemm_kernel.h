// A kernel around the backward's tiles: static order, one persistent block per SM, roles as in
// grouped_gemm_kernel.h.
#pragma once

#include "mok_gemm/sm90/backward_gemm_params.h"
#include "mok_gemm/sm90/backward_worker.h"
#include "mok_gemm/sm90/grouped_gemm_kernel.h"

namespace mok::testing::backward_gemm_internal {

using grouped_gemm_internal::kQueueDepth;
using grouped_gemm_internal::kThreads;
using grouped_gemm_internal::WaitOf;

enum class WorkKind : int32_t { kEnd, kForward, kBackward };
struct Work {
  union {
    GemmTask forward;
    BackwardTask backward;
  };
  WorkKind kind;
  int64_t tile;
};
using WorkQueue = TaskQueue<Work, kQueueDepth>;

template <class Config>
struct SharedStorage {
  GemmStages<Config> stages;
  GemmBarriers<Config> barriers;
  TaskQueueStorage<Work, kQueueDepth> queue;
};

// Finds the tiles of one product of rows: ascending indices.
template <class Config>
class RowTiles {
 public:
  MOK_DEVICE RowTiles(const GroupedGemmParams& p, int32_t columns, int32_t tile_columns)
      : p_(&p),
        raster_({p.rows.count, p.rows.num_experts, (columns + tile_columns - 1) / tile_columns,
                 Config::kTileM, p.max_panel_blocks, 0}) {}

  MOK_DEVICE bool Find(int64_t index, TilePlace& place, RowBlockPlace& rows) {
    if (!raster_.Find(index, place)) return false;
    const int32_t first = place.row_block * Config::kTileM;
    const int32_t rest = p_->rows.count[place.expert] - first;
    rows = {p_->rows.begin[place.expert] + first, rest < Config::kTileM ? rest : Config::kTileM,
            place.expert};
    return true;
  }

 private:
  const GroupedGemmParams* p_;
  TileRaster raster_;
};

// False: there is no such tile. work.kind stays kEnd if the tile has nothing to do in this piece.
template <class Config>
MOK_DEVICE bool FillWeightGradWork(const BackwardGemmParams& p, int64_t index, Work& work) {
  const WeightGradMatrices& m = p.weight_grad;
  const int32_t tiles = WeightGradShape<Config>(m.m, m.n).tiles();
  const auto expert = static_cast<int32_t>(index / tiles);
  const auto tile = static_cast<int32_t>(index % tiles);
  if (expert >= p.gate_up.rows.num_experts) return false;
  const int32_t first = p.piece * p.piece_rows, rest = p.gate_up.rows.count[expert] - first;
  if (p.piece > 0 && rest <= 0) return true;
  const bool is_last = rest <= p.piece_rows;
  FillWeightGrad<Config>(m,
                         {expert, p.gate_up.rows.begin[expert] + first,
                          is_last ? rest : p.piece_rows, p.piece > 0, !is_last},
                         tile, work.backward);
  if (work.backward.weight_grad.carry != nullptr) {
    work.backward.weight_grad.carry += int64_t{expert} * tiles * kCarryTileElements<Config>;
  }
  work.kind = WorkKind::kBackward;
  return true;
}

// The scheduler's position in every product.
template <class Config>
class Schedule {
 public:
  explicit MOK_DEVICE Schedule(const BackwardGemmParams& p)
      : p_(&p),
        down_grad_(p.gate_up, p.down_grad.intermediate, Config::kTileN),
        input_grad_(p.gate_up, p.input_grad.hidden, Config::kTileN),
        gate_up_(p.gate_up, p.gate_up.operands.width, Config::kHalfN) {}

  // Tile `index` of one product; false: there is none.
  MOK_DEVICE bool Fill(uint32_t product, int64_t index, Work& work) {
    TilePlace place;
    RowBlockPlace rows;
    work.kind = WorkKind::kEnd;
    work.tile = index;
    if (product == kProductWeightGrad) return FillWeightGradWork<Config>(*p_, index, work);
    RowTiles<Config>& tiles = product == kProductDownGrad    ? down_grad_
                              : product == kProductInputGrad ? input_grad_
                                                             : gate_up_;
    if (!tiles.Find(index, place, rows)) return false;
    work.kind = WorkKind::kBackward;
    if (product == kProductDownGrad) {
      FillDownGrad<Config>(p_->down_grad, rows, place.column_tile, work.backward);
    } else if (product == kProductInputGrad) {
      FillInputGrad<Config>(p_->input_grad, rows, rows.row, place.column_tile, work.backward);
    } else {
      work.kind = WorkKind::kForward;
      work.forward =
          grouped_gemm_internal::MakeTask<Config, GemmEpilogue::kSwiGlu>(p_->gate_up, index, place)
              .gemm;
    }
    return true;
  }

 private:
  const BackwardGemmParams* p_;
  RowTiles<Config> down_grad_, input_grad_, gate_up_;
};

template <class Config>
MOK_DEVICE void SchedulerRole(const BackwardGemmParams& p, SharedStorage<Config>& s) {
  DeviceWait wait = WaitOf<Config>(p.gate_up, GroupedGemmRole::kScheduler);
  WorkQueue queue(s.queue);
  Schedule<Config> schedule(p);
  uint32_t open = p.products;
  Work work;
  for (int64_t index = BlockIndex().x; open != 0; index += GridDimensions().x) {
    for (uint32_t product = 1; product <= kProductGateUp; product *= 2) {
      if ((open & product) == 0) continue;
      wait.SetTask(static_cast<int32_t>(product), index);
      if (!schedule.Fill(product, index, work)) {
        open &= ~product;
      } else if (work.kind != WorkKind::kEnd) {
        queue.Push(work, wait);
      }
    }
  }
  work.kind = WorkKind::kEnd;
  queue.Push(work, wait);
}

template <class Config>
MOK_DEVICE void ProducerRole(const BackwardGemmParams& p, SharedStorage<Config>& s) {
  DeviceWait wait = WaitOf<Config>(p.gate_up, GroupedGemmRole::kProducer);
  WorkQueue queue(s.queue);
  GemmPipeline<Config> pipeline(s.barriers);
  for (;; queue.Pop()) {
    const Work& work = queue.Front(wait);
    if (work.kind == WorkKind::kEnd) break;
    wait.SetTask(0, work.tile);
    if (work.kind == WorkKind::kForward) {
      ProducerLoadTile<Config>(work.forward, s.stages, pipeline, wait);
    } else {
      ProducerLoadBackwardTile<Config>(work.backward, s.stages, pipeline, wait);
    }
  }
}

template <class Config>
MOK_DEVICE void ConsumerRole(const BackwardGemmParams& p, SharedStorage<Config>& s) {
  DeviceWait wait = WaitOf<Config>(p.gate_up, GroupedGemmRole::kConsumer);
  WorkQueue queue(s.queue);
  BackwardConsumer<Config> consumer(s.stages, s.barriers);
  typename BackwardConsumer<Config>::Accumulator accumulator;
  for (;; queue.Pop()) {
    const Work& work = queue.Front(wait);
    if (work.kind == WorkKind::kEnd) break;
    wait.SetTask(0, work.tile);
    if (work.kind == WorkKind::kForward) {
      if (consumer.MainLoop(work.forward, wait, accumulator)) {
        EpilogueSwiGlu<Config>(work.forward, accumulator);
      }
    } else {
      consumer.Run(work.backward, {}, wait, accumulator);
    }
  }
}

template <class Config>
MOK_KERNEL(kThreads<Config>, 1)
BackwardGemm(MOK_GRID_CONSTANT(BackwardGemmParams) p) {
  MOK_SHARED_STORAGE(SharedStorage<Config>, s);
  if (ThreadIndex().x == 0) {
    InitializeGemm<Config>(s.stages, s.barriers);
    WorkQueue::Initialize(s.queue, Config::kConsumerThreads + 1);  // and the producer
    FenceMbarrierInit();
  }
  SyncBlock();
  const int warp = static_cast<int>(ThreadIndex().x) / 32;
  if (warp < Config::kConsumerWarps) {
    IncreaseRegisters<kSm90ConsumerRegisters>();
    ConsumerRole<Config>(p, s);
  } else {
    DecreaseRegisters<kSm90ProducerRegisters>();
    if (ThreadIndex().x % 32 != 0) return;
    if (warp == Config::kConsumerWarps) ProducerRole<Config>(p, s);
    if (warp == Config::kConsumerWarps + 1) SchedulerRole<Config>(p, s);
  }
}

template <class Config>
BackwardGemmKernelInfo KernelInfo() {
  return {reinterpret_cast<const void*>(&BackwardGemm<Config>), kThreads<Config>,
          sizeof(SharedStorage<Config>)};
}

}  // namespace mok::testing::backward_gemm_internal
