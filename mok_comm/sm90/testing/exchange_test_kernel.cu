#include "mok_comm/sm90/testing/exchange_test_kernel.h"

#include "mok_comm/sm90/rank_meeting.h"
#include "mok_comm/sm90/row_mover.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing {
namespace {

enum Role : int32_t { kPullRole, kPushRole };

struct alignas(128) SharedStorage {
  unsigned char chunks[2][kStagingChunks][kExchangeTestChunkBytes];
  uint64_t full[2][kStagingChunks];
  uint64_t pulling;
  uint32_t exited;
};

MOK_DEVICE ExchangeTile TileOf(const ExchangeTestParams& p, int32_t index, bool pull) {
  const int32_t slot = index % p.tiles.ring_tiles, before = index / p.tiles.ring_tiles;
  const int32_t first = index * p.tiles.rows_per_tile, rest = p.tiles.num_rows - first;
  ExchangeTile tile = {};
  tile.table_row = first;
  tile.local_row = slot * p.tiles.rows_per_tile;
  tile.rows = rest < p.tiles.rows_per_tile ? rest : p.tiles.rows_per_tile;
  const int32_t filled = kSlotCounters + slot, sent = filled + p.tiles.ring_tiles;
  tile.num_waits = pull ? 2 : 1;
  tile.wait_counters[0] = pull ? sent : filled;
  tile.wait_targets[0] = pull ? before : before + 1;
  tile.wait_counters[1] = kEntered;
  tile.wait_targets[1] = 1;
  tile.num_signals = pull ? 1 : 2;
  tile.may_copy = true;
  tile.signals[0] = pull ? filled : sent;
  tile.signals[1] = kTotal;
  return tile;
}

template <Direction kDirection, ExchangeBug kBug>
MOK_DEVICE bool MoveTiles(const ExchangeTestParams& p, SharedStorage& s, DeviceWait& wait) {
  constexpr bool kIsPull = kDirection == Direction::kPull;
  constexpr int kWarp = kIsPull ? 0 : 1;
  RowMover<kBug> mover(kDirection, p.counters,
                       {s.chunks[kWarp][0], s.full[kWarp], p.chunk_bytes, kExchangeTestChunkBytes},
                       &s.pulling);
  bool running = true;
  // What a block pulls another one pushes, if there is another.
  const auto blocks = static_cast<int32_t>(GridDimensions().x);
  const auto block = static_cast<int32_t>(BlockIndex().x);
  for (int32_t tile = kIsPull ? block : blocks - 1 - block; tile < p.tiles.num_tiles && running;
       tile += blocks) {
    wait.SetTask(kWarp, tile);
    ExchangeTile rows = TileOf(p, tile, kIsPull);
    if (kBug == ExchangeBug::kMovesPadding) rows.rows = p.tiles.rows_per_tile;
    running = mover.Await(rows, wait);
    if (!running) break;
    if constexpr (kIsPull) {
      mover.Move(p.pull, rows, PulledScalars(p.pull_scalars, true), wait);
    } else {
      mover.Move(p.push, rows, PushedSums(p.push_scalars), wait);
    }
  }
  mover.Flush();
  return running;
}

template <ExchangeBug kBug>
MOK_DEVICE void Pull(const ExchangeTestParams& p, SharedStorage& s) {
  DeviceWait wait(p.wait, kPullRole);
  if (BlockIndex().x == 0) {
    const int thread = static_cast<int>(ThreadIndex().x);
    for (int i = thread; i < p.x_words; i += 32) p.x[i] = p.source[i];
    for (int i = thread; i < p.num_routes; i += 32) p.scalars[i] = ScalarOfRoute(i);
    DeviceWait meeting_wait(p.meeting_wait, kPullRole);
    if (!MeetRanks<kBug>(p.meeting, Meeting::kEntry, p.epoch, 10, meeting_wait)) return;
    if (ThreadIndex().x == 0) ReduceAddReleaseGpu(p.counters + kEntered, uint64_t{1});
  }
  MoveTiles<Direction::kPull, kBug>(p, s, wait);
}

template <ExchangeBug kBug>
MOK_DEVICE void Push(const ExchangeTestParams& p, SharedStorage& s) {
  DeviceWait wait(p.wait, kPushRole);
  const bool lane_zero = ThreadIndex().x % 32 == 0;
  if (lane_zero) s.exited = 0;
  if (!MoveTiles<Direction::kPush, kBug>(p, s, wait) || BlockIndex().x != 0) return;
  bool sent = true;
  if (lane_zero) {
    wait.SetTask(11, -1);
    sent = wait.ForCounterGpu(p.counters + kEntered, 1) &&
           wait.ForCounterGpu(p.counters + kTotal, p.tiles.num_tiles);
  }
  if (Shuffle(sent ? 1 : 0, 0) == 0) return;
  DeviceWait meeting_wait(p.meeting_wait, kPushRole);
  if (!MeetRanks<kBug>(p.meeting, Meeting::kExit, p.epoch, 11, meeting_wait)) return;
  if (lane_zero) s.exited = 1;
}

template <int kBugNumber>
MOK_KERNEL(kExchangeTestThreads, 1)
Exchange(MOK_GRID_CONSTANT(ExchangeTestParams) p) {
  constexpr auto kBug = static_cast<ExchangeBug>(kBugNumber);
  MOK_SHARED_STORAGE(SharedStorage, s);
  if (ThreadIndex().x == 0) {
    for (int i = 0; i < 2 * kStagingChunks; ++i) {
      const int warp = i / kStagingChunks, chunk = i % kStagingChunks;
      MbarrierInit(&s.full[warp][chunk], 1);
      MOK_NAME(&s.full[warp][chunk], "full", i);
      MOK_NAME(s.chunks[warp][chunk], "chunk", i);
    }
    MbarrierInit(&s.pulling, 1);
    MOK_NAME(&s.pulling, "pulling", -1);
    FenceMbarrierInit();
  }
  SyncBlock();
  if (ThreadIndex().x < 32) {
    Pull<kBug>(p, s);
  } else {
    Push<kBug>(p, s);
  }
  SyncWarp();
  SyncBlock();
  if (BlockIndex().x != 0 || s.exited == 0) return;
  if (MbarrierTestWait(&s.pulling, 0)) return;  // in an odd phase: it says that rows still come in
  for (int i = static_cast<int>(ThreadIndex().x); i < p.words; i += kExchangeTestThreads) {
    p.copy[i] = p.returned[i];
  }
  for (int i = static_cast<int>(ThreadIndex().x); i < p.num_routes; i += kExchangeTestThreads) {
    p.copied_scalars[i] = p.returned_scalars[i];
  }
}

}  // namespace

const void* ExchangeTestKernel(int bug) {
  return MOK_KERNEL_TABLE(Exchange, static_cast<int>(ExchangeBug::kCount), bug);
}

size_t ExchangeTestSharedBytes() { return sizeof(SharedStorage); }

}  // namespace mok::testing
