// The middle steps of the schedule kernel: every block counts the rows that its share of the tokens
// adds to each expert, and, when all blocks have counted, places them.
//
// The tokens of all ranks are visited in the order of their bit-reversed ids: a position is a
// bit-reversed id, each warp of the grid owns a range of positions, and lanes take consecutive
// routes of it. A route's row follows from the routes before it in that order: those of lower
// blocks (counts), of lower warps of the block and of the warp's earlier routes (next_row), and of
// lower lanes (ballots).
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"
#include "mok_schedule/device/schedule_bug.h"
#include "mok_schedule/device/schedule_storage.h"
#include "mok_schedule/device/stage_tokens.h"
#include "mok_schedule/routing_table.h"

namespace mok {

// Routes that a lane has in flight: their ids may come from another GPU.
inline constexpr int kRouteBatch = 4;

// The positions of one warp.
struct PositionRange {
  int64_t first;
  uint32_t num_routes;  // positions * topk
  int num_bits;         // of a position

  template <int kBug>
  MOK_DEVICE uint32_t TokenAt(int64_t position) const {
    const auto value = static_cast<uint32_t>(position);
    return kBug == kScheduleTokensInOrder ? value : ReverseBits(value, num_bits);
  }
};

template <class Storage>
MOK_DEVICE PositionRange PositionsOfWarp(const ScheduleParams& p, const Storage& s) {
  const int64_t num_tokens = s.token_begin[p.layer.ep_size];
  const int num_bits = CeilLog2(static_cast<uint64_t>(num_tokens));
  const int64_t positions = num_tokens == 0 ? 0 : int64_t{1} << num_bits;
  const int64_t num_warps = int64_t{NumPlacingBlocks()} * Storage::kWarps;
  const int64_t per_warp = CeilDiv(positions, num_warps);
  const int64_t warp = int64_t{BlockIndex().x} * Storage::kWarps + Thread() / 32;
  const int64_t first = warp * per_warp < positions ? warp * per_warp : positions;
  const int64_t count = positions - first < per_warp ? positions - first : per_warp;
  return {first, static_cast<uint32_t>(count * p.layer.topk), num_bits};
}

// Where a route comes from. rank -1: the position holds no token.
struct RouteSource {
  int32_t rank;
  int32_t route;
};

template <int kBug, class Storage>
MOK_DEVICE RouteSource SourceOf(const ScheduleParams& p, const Storage& s,
                                const PositionRange& range, uint32_t index) {
  const auto topk = static_cast<uint32_t>(p.layer.topk);
  const int64_t token = range.TokenAt<kBug>(range.first + index / topk);
  const int ep_size = p.layer.ep_size;
  if (token >= s.token_begin[ep_size]) return {-1, 0};
  const int rank = UpperBound(s.token_begin, ep_size, token) - 1;
  const int64_t route = (token - s.token_begin[rank]) * topk + index % topk;
  return {rank, static_cast<int32_t>(route)};
}

// The lanes whose routes go to the same local expert as this lane's; none if it has no expert.
MOK_DEVICE uint32_t LanesWithSameExpert(int32_t local_expert, int expert_bits) {
  uint32_t lanes = Ballot(local_expert >= 0);
  for (int bit = 0; bit < expert_bits; ++bit) {
    const bool is_set = (local_expert >> bit & 1) != 0;
    const uint32_t with_bit = Ballot(is_set);
    lanes &= is_set ? with_bit : ~with_bit;
  }
  return local_expert < 0 ? 0 : lanes;
}

// Adds the warp's 32 routes to its row of next_row. Returns the number of the lane's route among
// those of its expert: what next_row held, plus the lanes before it.
template <int kBug>
MOK_DEVICE int32_t Tally(int32_t* next_row, int32_t local_expert, int expert_bits) {
  const int lane = Thread() % 32;
  const uint32_t lanes = LanesWithSameExpert(local_expert, expert_bits);
  uint32_t before = lanes & ((1u << lane) - 1);
  if (kBug == kScheduleLanesOutOfOrder) before = lanes & ~((2u << lane) - 1);
  const int32_t rank = PopulationCount(before);
  const int32_t row = lanes != 0 ? next_row[local_expert] + rank : 0;
  if (kBug != kScheduleTallyWithoutSync) SyncWarp();  // all lanes have read
  if (lanes != 0 && (rank == 0 || kBug == kScheduleTallyByEveryLane)) {
    next_row[local_expert] += PopulationCount(lanes);
  }
  SyncWarp();
  return row;
}

// Reads the ids of the warp's routes, keeps their local experts in scratch and counts them.
template <int kBug, class Storage>
MOK_DEVICE void CountRoutesOfWarp(const ScheduleParams& p, Storage& s, const PositionRange& range,
                                  int expert_bits) {
  const int lane = Thread() % 32;
  const int32_t num_local_experts = p.schedule.num_local_experts;
  int32_t* count = s.next_row[Thread() / 32];
  int16_t* kept = p.scratch.local_expert + range.first * p.layer.topk;
  for (uint32_t base = 0; base < range.num_routes; base += 32 * kRouteBatch) {
    int32_t local_expert[kRouteBatch];
    MOK_UNROLL
    for (int i = 0; i < kRouteBatch; ++i) {
      const uint32_t index = base + 32 * i + lane;
      local_expert[i] = -1;
      if (index >= range.num_routes) continue;
      const RouteSource source = SourceOf<kBug>(p, s, range, index);
      if (source.rank < 0) continue;
      const int32_t local = s.ids[source.rank][source.route] - p.layer.first_expert;
      if (local >= 0 && local < num_local_experts) local_expert[i] = local;
    }
    MOK_UNROLL
    for (int i = 0; i < kRouteBatch; ++i) {
      const uint32_t index = base + 32 * i + lane;
      if (index < range.num_routes) kept[index] = static_cast<int16_t>(local_expert[i]);
      Tally<kBug>(count, local_expert[i], expert_bits);
    }
  }
}

// Counts the block's routes; afterwards next_row holds, for each warp, the rows of the warps below
// it, and the block's counts have been published.
template <int kBug, class Storage>
MOK_DEVICE void CountRoutes(const ScheduleParams& p, Storage& s) {
  const int num_experts = p.schedule.num_local_experts;
  const int expert_bits = CeilLog2(static_cast<uint64_t>(num_experts));
  int32_t* count = s.next_row[Thread() / 32];
  for (int expert = Thread() % 32; expert < num_experts; expert += 32) count[expert] = 0;
  SyncWarp();
  CountRoutesOfWarp<kBug>(p, s, PositionsOfWarp(p, s), expert_bits);
  SyncBlock();
  int32_t* counts = p.scratch.counts + int64_t{BlockIndex().x} * num_experts;
  for (int expert = Thread(); expert < num_experts; expert += Storage::kNumThreads) {
    int32_t before = 0;
    for (int warp = 0; warp < Storage::kWarps; ++warp) {
      const int32_t rows = s.next_row[warp][expert];
      s.next_row[warp][expert] = before;
      before += rows;
    }
    counts[expert] = before;
  }
  SyncBlock();
  if (Thread() != 0) return;
  if (kBug == kScheduleRelaxedCounts) {
    ReduceAddRelaxedGpu(&p.state->counted_blocks, uint64_t{1});
  } else {
    ReduceAddReleaseGpu(&p.state->counted_blocks, uint64_t{1});
  }
}

// Waits until all blocks have counted. False: aborted.
template <int kBug, class Storage>
MOK_DEVICE bool WaitForCounts(const ScheduleParams& p, Storage& s, DeviceWait& wait) {
  if (Thread() == 0 && kBug != kScheduleNoWaitForCounts) {
    wait.SetTask(static_cast<int32_t>(ScheduleWait::kCounts), 0);
    wait.ForCounterGpu(&p.state->counted_blocks, static_cast<uint64_t>(NumPlacingBlocks()));
  }
  return AllWaitsHeld(s, wait);
}

// Sums the counts: rows and first row block of every expert, the same in every block; in placing
// blocks also the first row of every warp.
template <class Storage>
MOK_DEVICE void LayOutExperts(const ScheduleParams& p, Storage& s) {
  const int num_experts = p.schedule.num_local_experts;
  const int num_blocks = NumPlacingBlocks();
  const int block = static_cast<int>(BlockIndex().x);
  for (int expert = Thread(); expert < num_experts; expert += Storage::kNumThreads) {
    const int32_t* counts = p.scratch.counts + expert;
    int32_t rows = 0;
    int32_t before = 0;
    constexpr int kLoads = 16;  // in flight
    for (int first = 0; first < num_blocks; first += kLoads) {
      int32_t count[kLoads];
      MOK_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        count[i] = first + i < num_blocks ? counts[int64_t{first + i} * num_experts] : 0;
      }
      MOK_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        rows += count[i];
        before += first + i < block ? count[i] : 0;
      }
    }
    s.rows[expert] = rows;
    s.block_begin[expert] = CeilDiv<int32_t>(rows, kRowBlock);
    if (IsTableBlock()) continue;
    for (int warp = 0; warp < Storage::kWarps; ++warp) s.next_row[warp][expert] += before;
  }
  SyncBlock();
  ExclusiveScan(s.scratch, s.block_begin, num_experts, Sum());
}

// Fills the last row blocks of this block's share of the experts up with padding.
template <class Storage>
MOK_DEVICE void PlacePadding(const ScheduleParams& p, const Storage& s) {
  for (int expert = static_cast<int>(BlockIndex().x); expert < p.schedule.num_local_experts;
       expert += NumPlacingBlocks()) {
    const int32_t begin = s.block_begin[expert] * kRowBlock + s.rows[expert];
    const int32_t end = s.block_begin[expert + 1] * kRowBlock;
    for (int32_t row = begin + Thread(); row < end; row += Storage::kNumThreads) {
      p.schedule.source_rank[row] = -1;
      p.schedule.source_route[row] = -1;
    }
  }
}

// Whether a token's row of route k is its first on this rank: of the lowest expert, then k.
// local_experts: [topk] of the token.
MOK_DEVICE bool IsFirstOfToken(const int16_t* local_experts, uint32_t k, uint32_t topk) {
  const int32_t own = local_experts[k];
  bool is_first = true;
  for (uint32_t other = 0; other < topk; ++other) {
    const int32_t expert = local_experts[other];
    const bool precedes = expert < own || (expert == own && other < k);
    if (expert >= 0 && precedes) is_first = false;
  }
  return is_first;
}

// Route `index` of the warp has that row. kept: local experts of the warp's routes.
template <int kBug, class Storage>
MOK_DEVICE void PlaceRoute(const ScheduleParams& p, const Storage& s, const PositionRange& range,
                           const int16_t* kept, uint32_t index, int32_t row) {
  const DeviceSchedule& schedule = p.schedule;
  const RouteSource source = SourceOf<kBug>(p, s, range, index);
  schedule.source_rank[row] = source.rank;
  schedule.source_route[row] = source.route;
  if (schedule.first_rows.of_token == nullptr) return;
  const auto topk = static_cast<uint32_t>(p.layer.topk);
  const uint32_t k = index % topk, token = static_cast<uint32_t>(source.route) / topk;
  if (kBug != kScheduleAnyRowIsFirst && !IsFirstOfToken(kept + index - k, k, topk)) return;
  schedule.first_rows.of_token[source.rank * schedule.first_rows.max_tokens + token] = row;
}

// Writes the rows of the block's routes, from the local experts that the same warps have kept.
template <int kBug, class Storage>
MOK_DEVICE void PlaceRoutes(const ScheduleParams& p, Storage& s) {
  const int num_experts = p.schedule.num_local_experts;
  const int expert_bits = CeilLog2(static_cast<uint64_t>(num_experts));
  for (int expert = Thread(); expert < num_experts; expert += Storage::kNumThreads) {
    const int32_t first_row = s.block_begin[expert] * kRowBlock;
    for (int warp = 0; warp < Storage::kWarps; ++warp) s.next_row[warp][expert] += first_row;
  }
  if (kBug != kSchedulePlaceWithoutSync) SyncBlock();
  const PositionRange range = PositionsOfWarp(p, s);
  const int16_t* kept = p.scratch.local_expert + range.first * p.layer.topk;
  int32_t* next_row = s.next_row[Thread() / 32];
  for (uint32_t base = 0; base < range.num_routes; base += 32 * kRouteBatch) {
    int32_t local_expert[kRouteBatch];
    MOK_UNROLL
    for (int i = 0; i < kRouteBatch; ++i) {
      const uint32_t index = base + 32 * i + Thread() % 32;
      local_expert[i] = index < range.num_routes ? kept[index] : -1;
    }
    MOK_UNROLL
    for (int i = 0; i < kRouteBatch; ++i) {
      const int32_t row = Tally<kBug>(next_row, local_expert[i], expert_bits);
      if (local_expert[i] < 0) continue;
      PlaceRoute<kBug>(p, s, range, kept, base + 32 * i + Thread() % 32, row);
    }
  }
  if (kBug != kScheduleNoPadding) PlacePadding(p, s);
}

}  // namespace mok
