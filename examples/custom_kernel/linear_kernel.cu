// The kernel of linear.h, composed of MoK's parts. One block per SM, all resident at once:
//
//   warps 0-7   consumers: wgmma, stores of the product
//   warp  8     producer: tensor loads of X and W
//   warp  9     scheduler: tickets for tiles, waits until their rows have arrived
//   warp  10    pull: entry meeting (block 0), rows coming in
//   warp  11    push: rows going out, exit meeting (block 0)
//
// Freedom from deadlock: pulls wait for peers to enter, tiles for pulls, pushes for tiles, the exit
// for pushes; each in a warp of its own, so that no wait stands before what it waits for.
#include "linear.h"

#include "mok_comm/sm90/rank_meeting.h"
#include "mok_comm/sm90/row_mover.h"
#include "mok_core/device/device.h"
#include "mok_core/device/ticket_work_source.h"
#include "mok_core/device/wait.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_gemm/sm90/task_queue.h"

namespace custom_kernel {
namespace {

constexpr int kProducerWarp = LinearGemm::kConsumerWarps;
constexpr int kSchedulerWarp = kProducerWarp + 1;
constexpr int kPullWarp = kProducerWarp + 2;
constexpr int32_t kNoKind = 0;  // of a task: its role says all

struct TileTask {
  mok::GemmTask gemm;
  int32_t row_block;
  int32_t tile;  // -1: end of work
};
using TileQueue = mok::TaskQueue<TileTask, 2>;

struct LinearStorage {
  mok::GemmStages<LinearGemm> stages;
  alignas(128) unsigned char chunks[2][mok::kStagingChunks][4096];  // pull, push
  mok::GemmBarriers<LinearGemm> barriers;
  TileQueue::Storage queue;
  uint64_t chunk_full[2][mok::kStagingChunks];
};

MOK_DEVICE mok::DeviceWait WaitOf(const mok::DeviceWaitParams& params, LinearRole role) {
  return mok::DeviceWait(params, static_cast<int32_t>(role));
}

// Rows of a part `index` of the rows, of which each but the last has `size`.
MOK_DEVICE int32_t RowsOf(const LinearParams& p, int32_t index, int32_t size) {
  const int32_t rest = p.shape.rows - index * size;
  return rest < size ? rest : size;
}

MOK_DEVICE TileTask MakeTask(const LinearParams& p, int32_t tile) {
  TileTask task = {};
  task.tile = tile;
  task.row_block = tile / p.ColumnTiles();
  const int32_t column = tile % p.ColumnTiles() * LinearGemm::kTileN;
  const int32_t columns = p.shape.width - column;
  mok::GemmTask& gemm = task.gemm;
  gemm.a = &p.x;
  gemm.b[0] = gemm.b[1] = &p.w;
  gemm.a_row = task.row_block * LinearParams::kBlockRows;
  gemm.b_row[0] = column;
  gemm.b_row[1] = column + LinearGemm::kHalfN;
  gemm.k_blocks = p.shape.k_blocks;
  gemm.b_halves = columns > LinearGemm::kHalfN ? 2 : 1;
  gemm.rows = RowsOf(p, task.row_block, LinearParams::kBlockRows);
  gemm.columns = columns < LinearGemm::kTileN ? columns : LinearGemm::kTileN;
  gemm.out_stride = p.shape.width;
  gemm.out =
      reinterpret_cast<mok::BFloat16*>(p.push.local) + int64_t{gemm.a_row} * p.shape.width + column;
  return task;
}

// One thread: takes tiles and hands them to the block's other roles once their rows are there. If
// they do not come in time, the block ends its work in order, and the wait record tells why.
MOK_DEVICE void Schedule(const LinearParams& p, LinearStorage& s) {
  mok::DeviceWait wait = WaitOf(p.wait, LinearRole::kScheduler);
  mok::TicketWorkSource tiles(p.ticket, int64_t{p.RowBlocks()} * p.ColumnTiles());
  TileQueue queue(s.queue);
  int64_t tile = 0;
  while (tiles.Next(tile)) {
    const TileTask task = MakeTask(p, static_cast<int32_t>(tile));
    const int32_t arrivals = mok::CeilDiv(task.gemm.rows, LinearParams::kExchangeRows);
    wait.SetTask(kNoKind, tile);
    if (!wait.ForCounterGpu(p.counters + LinearParams::Arrived(task.row_block),
                            p.pass * arrivals)) {
      break;
    }
    queue.Push(task, wait);
  }
  TileTask end = {};
  end.tile = -1;
  queue.Push(end, wait);
  tiles.Finish(mok::GridDimensions().x);
}

// One thread: loads the operands of every tile.
template <LinearBug kBug>
MOK_DEVICE void Produce(const LinearParams& p, LinearStorage& s) {
  mok::DeviceWait wait = WaitOf(p.wait, LinearRole::kProducer);
  mok::GemmPipeline<LinearGemm> pipeline(s.barriers);
  TileQueue queue(s.queue);
  for (;; queue.Pop()) {
    const TileTask& task = queue.Front(wait);
    if (task.tile < 0) break;
    wait.SetTask(kNoKind, task.tile);
    // The scheduler has acquired the rows; bulk copies of this and other blocks wrote them.
    if (kBug != LinearBug::kNoProxyFence) mok::FenceProxyAsyncGlobal();
    mok::ProducerLoadTile<LinearGemm>(task.gemm, s.stages, pipeline, wait);
  }
}

// Two warpgroups: multiply, store, and tell which rows may be sent.
template <LinearBug kBug>
MOK_DEVICE void Consume(const LinearParams& p, LinearStorage& s) {
  mok::DeviceWait wait = WaitOf(p.wait, LinearRole::kConsumer);
  mok::GemmConsumer<LinearGemm> consumer(s.stages, s.barriers);
  TileQueue queue(s.queue);
  for (;; queue.Pop()) {
    const TileTask& task = queue.Front(wait);
    if (task.tile < 0) break;
    wait.SetTask(kNoKind, task.tile);
    mok::GemmConsumer<LinearGemm>::Accumulator accumulator;
    if (consumer.MainLoop(task.gemm, wait, accumulator)) {
      mok::EpilogueStore<LinearGemm>(task.gemm, accumulator);
    }
    // Lane 0 releases what all lanes have stored.
    if (kBug != LinearBug::kStoredTooEarly) mok::SyncWarp();
    if (mok::ThreadIndex().x % 32 == 0) {
      mok::ReduceAddReleaseGpu(p.counters + LinearParams::Stored(task.row_block), uint64_t{1});
    }
  }
}

// What an exchange tile waits for, and whom it tells.
template <mok::Direction kDirection>
MOK_DEVICE mok::ExchangeTile MakeExchangeTile(const LinearParams& p, int32_t index) {
  constexpr bool kIsPull = kDirection == mok::Direction::kPull;
  const int32_t row_block = index * LinearParams::kExchangeRows / LinearParams::kBlockRows;
  mok::ExchangeTile tile = {};
  tile.table_row = tile.local_row = index * LinearParams::kExchangeRows;
  tile.rows = RowsOf(p, index, LinearParams::kExchangeRows);
  tile.num_waits = tile.num_signals = 1;
  tile.wait_counters[0] = kIsPull ? LinearParams::kEntered : LinearParams::Stored(row_block);
  tile.wait_targets[0] = kIsPull ? p.pass : p.pass * p.ColumnTiles() * LinearGemm::kConsumerWarps;
  tile.signals[0] = kIsPull ? LinearParams::Arrived(row_block) : LinearParams::kSent;
  return tile;
}

// One warp: this block's share of the rows, in or out. False: the grid is aborted.
template <mok::Direction kDirection>
MOK_DEVICE bool Exchange(const LinearParams& p, LinearStorage& s) {
  constexpr bool kIsPull = kDirection == mok::Direction::kPull;
  constexpr int kStaging = kIsPull ? 0 : 1;
  mok::DeviceWait wait = WaitOf(p.wait, kIsPull ? LinearRole::kPull : LinearRole::kPush);
  mok::RowMover<> mover(kDirection, p.counters,
                        {s.chunks[kStaging][0], s.chunk_full[kStaging], sizeof s.chunks[0][0],
                         sizeof s.chunks[0][0]});
  bool running = true;
  for (auto i = static_cast<int32_t>(mok::BlockIndex().x); i < p.ExchangeTiles() && running;
       i += static_cast<int32_t>(mok::GridDimensions().x)) {
    const mok::ExchangeTile tile = MakeExchangeTile<kDirection>(p, i);
    wait.SetTask(kNoKind, i);
    running = mover.Await(tile, wait);
    if (running) mover.Move(kIsPull ? p.pull : p.push, tile, mok::NoScalars(), wait);
  }
  mover.Flush();
  return running;
}

// One warp. Block 0: every rank's X is in place, and its Y may be overwritten. A rank that has been
// aborted enters no further pass.
MOK_DEVICE void Pull(const LinearParams& p, LinearStorage& s) {
  if (mok::BlockIndex().x == 0) {
    mok::DeviceWait wait = WaitOf(p.meeting_wait, LinearRole::kEntry);
    if (mok::Ballot(wait.aborted()) != 0 ||
        !mok::MeetRanks(p.meeting, mok::Meeting::kEntry, p.pass, kNoKind, wait)) {
      return;
    }
    if (mok::ThreadIndex().x % 32 == 0) {
      mok::ReduceAddReleaseGpu(p.counters + LinearParams::kEntered, uint64_t{1});
    }
  }
  Exchange<mok::Direction::kPull>(p, s);
}

// One warp. Block 0: every rank's rows have arrived, and have been read. A rank that is aborted
// does not come here.
MOK_DEVICE void Push(const LinearParams& p, LinearStorage& s) {
  if (!Exchange<mok::Direction::kPush>(p, s) || mok::BlockIndex().x != 0) return;
  bool sent = true;
  if (mok::ThreadIndex().x % 32 == 0) {
    sent = WaitOf(p.wait, LinearRole::kPush)
               .ForCounterGpu(p.counters + LinearParams::kSent, p.pass * p.ExchangeTiles());
  }
  if (mok::Shuffle(sent ? 1 : 0, 0) == 0) return;
  mok::DeviceWait wait = WaitOf(p.meeting_wait, LinearRole::kExit);
  mok::MeetRanks(p.meeting, mok::Meeting::kExit, p.pass, kNoKind, wait);
}

template <LinearBug kBug>
MOK_KERNEL(kLinearThreads, 1)
Linear(MOK_GRID_CONSTANT(LinearParams) p) {
  MOK_SHARED_STORAGE(LinearStorage, s);
  if (mok::ThreadIndex().x == 0) {
    mok::InitializeGemm<LinearGemm>(s.stages, s.barriers);
    TileQueue::Initialize(s.queue, LinearGemm::kConsumerThreads + 1);  // and the producer
    for (auto& full : s.chunk_full) {
      for (uint64_t& barrier : full) mok::MbarrierInit(&barrier, 1);
    }
    mok::FenceMbarrierInit();
  }
  mok::SyncBlock();
  const int warp = static_cast<int>(mok::ThreadIndex().x) / 32;
  if (warp < kProducerWarp) {
    mok::IncreaseRegisters<mok::kSm90ConsumerRegisters>();
    Consume<kBug>(p, s);
    return;
  }
  mok::DecreaseRegisters<mok::kSm90ProducerRegisters>();
  const bool is_leader = mok::ThreadIndex().x % 32 == 0;
  if (warp == kPullWarp) {
    Pull(p, s);
  } else if (warp > kPullWarp) {
    Push(p, s);
  } else if (warp == kProducerWarp && is_leader) {
    Produce<kBug>(p, s);
  } else if (warp == kSchedulerWarp && is_leader) {
    Schedule(p, s);
  }
}

}  // namespace

size_t LinearSharedBytes() { return sizeof(LinearStorage); }
const void* LinearKernel() { return reinterpret_cast<const void*>(&Linear<LinearBug::kNone>); }

#if defined(MOK_EMULATOR)
const void* BuggyLinearKernel(LinearBug bug) {
  return bug == LinearBug::kNoProxyFence
             ? reinterpret_cast<const void*>(&Linear<LinearBug::kNoProxyFence>)
             : reinterpret_cast<const void*>(&Linear<LinearBug::kStoredTooEarly>);
}
#endif

}  // namespace custom_kernel
