// Outputs that leave a tile through the shared memory of its last stage.
//
// Stores from registers hold up a warp until the SM has taken them, at 30 bytes a cycle: C of a
// tile, 64 KiB, keeps the tensor core waiting for 2,200 cycles. Instead, consumers keep the last
// stage of a tile, fill it with as much of C as there is room for, three quarters, and go on to the
// next tile, of which the other stages have been loaded meanwhile. The producer, which needs the
// stage for the next tile's K block kStages - 1, stores from it first:
//
//   consumers: multiply from the stage, meet (Hold), fill, fence and release it (HandOver)
//   producer:  wait for the release, tensor stores, wait until they have read, load the block
//
// No consumer issues the tensor stores: that takes as long as the SM needs to send them.
//
// The producer pops a task when its stores have read the stage, which is no earlier than consumers
// are done with the task. A kernel that signals its tiles would wait for the writes as well, with
// BulkWaitGroup<0>.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/gemm_task.h"
#include "mok_gemm/sm90/gemm_worker.h"

namespace mok {

// Where a tile of C lies.
struct HeldTile {
  const TensorMap* map;  // ActivationMapSpec of the whole C, in the kernel's parameters
  int32_t row, column;   // of the tile's first element in it
};

namespace gemm_internal {

// The part of a stage that a warpgroup's rows of a box of kTileK columns leave through.
template <class Config>
MOK_DEVICE unsigned char* HeldBox(GemmStages<Config>& stages, int stage, int warpgroup, int box) {
  unsigned char* const rows =
      box == 0 ? stages.a[stage] : stages.b[stage] + (box - 1) * Config::kABytes;
  return rows + warpgroup * Config::kABoxBytes;
}

}  // namespace gemm_internal

// The consumers' part.
template <class Config>
class HeldConsumer : public GemmConsumer<Config> {
 public:
  MOK_DEVICE HeldConsumer(GemmStages<Config>& stages, GemmBarriers<Config>& barriers)
      : GemmConsumer<Config>(stages, barriers), stages_(&stages) {}

  // After MainLoop<true> returned true: all warps that work on the tile have multiplied.
  MOK_DEVICE void Hold(const GemmTask& task) const {
    if (Config::kBug == GemmBug::kFillsBeforeMultiply) return;
    if (task.rows <= Config::kWarpgroupM) {
      NamedBarrierSync(kShortHeldBarrier, 128);
    } else {
      NamedBarrierSync(kHeldBarrier, Config::kConsumerThreads);
    }
  }

  // This warpgroup's place for a box.
  MOK_DEVICE unsigned char* Box(int box) const {
    return gemm_internal::HeldBox(*stages_, LastStage(), this->warpgroup_, box);
  }

  // The warp has filled its rows of all boxes.
  MOK_DEVICE void HandOver() {
    if (Config::kBug != GemmBug::kNoFenceBeforeHandOver) FenceProxyAsyncShared();
    if (Config::kBug != GemmBug::kNoSyncBeforeHandOver) SyncWarp();
    if (Config::kBug != GemmBug::kNoReleaseOfLastStage) this->Release(LastStage());
  }

 private:
  // Of the tile that has been multiplied.
  MOK_DEVICE int LastStage() const {
    const int next = this->pipeline_.stage();
    return (next == 0 ? Config::kStages : next) - 1;
  }

  GemmStages<Config>* stages_;
};

// The producer's part; Queue: its end of a TaskQueue of at least two tasks.
template <class Config, class Queue>
class HeldStores {
 public:
  MOK_DEVICE HeldStores(GemmStages<Config>& stages, const GemmPipeline<Config>& pipeline,
                        Queue& queue)
      : stages_(&stages), queue_(&queue), filled_(pipeline) {}

  // All blocks of the queue's first task have been loaded, and `pipeline` is behind the last one.
  // Leaves the task, which is popped once it has been stored.
  template <class Waiter>
  MOK_DEVICE void Loaded(const GemmTask& task, const HeldTile& tile,
                         const GemmPipeline<Config>& pipeline, const Waiter& wait) {
    Store(wait);  // the task before, if this one has fewer blocks than stages
    tile_ = tile;
    rows_ = task.rows;
    columns_ = task.columns;
    filled_ = pipeline;
    filled_.Retreat();
    place_ = queue_->Leave();
    is_expected_ = true;
    if (kPopsEarly) queue_->PopLeft(place_);
  }

  // Before K block `block` of the next task is loaded.
  template <class Waiter>
  MOK_DEVICE void BeforeBlock(int block, const Waiter& wait) {
    if (block == Config::kStages - 1) Store(wait);
  }

  // Returns when the queue has a next task, or no stores are due: the next task may have to wait
  // for this one. Without a bound of its own: scheduler and consumers, one of whom ends the wait,
  // have theirs.
  template <class Waiter>
  MOK_DEVICE void AwaitNext(const Waiter& wait) {
    while (is_expected_ && !queue_->IsReady()) {
      if (filled_.IsReleased()) Store(wait);
    }
  }

  // Stores what is due, if anything; returns when the stage may be overwritten.
  template <class Waiter>
  MOK_DEVICE void Store(const Waiter& wait) {
    if (!is_expected_) return;
    is_expected_ = false;
    if (Config::kBug != GemmBug::kStoresBeforeFilled) filled_.AwaitRelease(wait);
    // Consumers have stored rows of warpgroups that are not valid as a whole.
    constexpr bool kRoundsUp = Config::kBug == GemmBug::kPartialRowsStoredWhole;
    const int rows = rows_ + (kRoundsUp ? Config::kWarpgroupM - 1 : 0);
    MOK_NO_UNROLL
    for (int i = 0; i < rows / Config::kWarpgroupM; ++i) {
      MOK_UNROLL
      for (int box = 0; box < Config::kHeldBoxes; ++box) {
        const int column = box * Config::kTileK;
        if (column >= columns_) break;
        TensorStore2d(tile_.map, gemm_internal::HeldBox(*stages_, filled_.stage(), i, box),
                      tile_.column + column, tile_.row + i * Config::kWarpgroupM);
      }
    }
    BulkCommitGroup();
    if (Config::kBug != GemmBug::kReloadsBeforeRead) BulkWaitGroupRead<0>();
    if (!kPopsEarly) queue_->PopLeft(place_);
  }

 private:
  static constexpr bool kPopsEarly = Config::kBug == GemmBug::kTaskReleasedBeforeRead;

  GemmStages<Config>* stages_;
  Queue* queue_;
  GemmPipeline<Config> filled_;  // at the stage that the consumers fill
  HeldTile tile_ = {};
  int rows_ = 0, columns_ = 0;  // valid
  int place_ = 0;               // of the task in the queue
  bool is_expected_ = false;
};

}  // namespace mok
