// The last steps of the schedule kernel: one block writes the small tables while the others place
// routes, and whoever ends last closes the batch.
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/device/device.h"
#include "mok_schedule/device/schedule_bug.h"
#include "mok_schedule/device/schedule_storage.h"
#include "mok_schedule/device/stage_tokens.h"

namespace mok {

// What ranks that disagree have announced differently.
MOK_DEVICE int64_t ComparedField(ScheduleErrorKind kind, const ScheduleHeader& header) {
  switch (kind) {
    case ScheduleErrorKind::kMaxTokens:
      return header.max_tokens;
    case ScheduleErrorKind::kHidden:
      return header.hidden;
    case ScheduleErrorKind::kIntermediate:
      return header.intermediate;
    case ScheduleErrorKind::kSharedIntermediate:
      return header.shared_intermediate;
    case ScheduleErrorKind::kTopk:
      return header.topk;
    default:
      return header.num_experts;
  }
}

// The batch's error into the host's record if that is empty.
template <int kBug, class Storage>
MOK_DEVICE void RecordError(const ScheduleParams& p, const Storage& s, BatchError found) {
  const auto* headers = reinterpret_cast<const ScheduleHeader*>(
      p.exchange.regions[p.layer.rank] + p.exchange.layout.headers(BufferOf<kBug>(s.epoch)));
  if (Thread() != 0 || p.layer.failure != StatusCode::kOk) return;
  if (LoadRelaxedSys(&p.error->state) != 0) return;
  const int32_t rank = found.rank();
  const ScheduleHeader& header = headers[rank];
  ScheduleErrorRecord& error = *p.error;
  StoreRelaxedSys(&error.state, uint32_t{1});
  error.kind = found.kind();
  error.rank = rank;
  error.k = -1;
  error.token = -1;
  switch (error.kind) {
    case ScheduleErrorKind::kExpertRanges:
      error.expected =
          rank == 0 ? 0 : headers[rank - 1].first_expert + headers[rank - 1].num_local_experts;
      error.observed = header.first_expert;
      break;
    case ScheduleErrorKind::kRankFailed:
      error.expected = 0;
      error.observed = header.failure;
      break;
    case ScheduleErrorKind::kLatePass:
      error.expected = 0;
      error.observed = header.late_passes;
      break;
    case ScheduleErrorKind::kExpertId:
      error.token = header.invalid_route / p.layer.topk;
      error.k = static_cast<int32_t>(header.invalid_route % p.layer.topk);
      error.expected = p.layer.num_experts;
      error.observed = header.invalid_id;
      break;
    default:
      error.expected = ComparedField(error.kind, headers[0]);
      error.observed = ComparedField(error.kind, header);
  }
  StoreReleaseSys(&error.state, uint32_t{2});
}

// The routing table but for its rows.
template <class Storage>
MOK_DEVICE void WriteExperts(const ScheduleParams& p, const Storage& s) {
  const int num_experts = p.schedule.num_local_experts;
  for (int expert = Thread(); expert <= num_experts; expert += Storage::kNumThreads) {
    p.schedule.expert_block_begin[expert] = s.block_begin[expert];
    if (expert < num_experts) p.schedule.expert_rows[expert] = s.rows[expert];
  }
  for (int expert = Thread() / 32; expert < num_experts; expert += Storage::kWarps) {
    for (int32_t block = s.block_begin[expert] + Thread() % 32; block < s.block_begin[expert + 1];
         block += 32) {
      p.schedule.block_expert[block] = expert;
    }
  }
}

// The same tables as BuildPieceTables, from scans over the experts instead of one sweep.
template <class Storage>
MOK_DEVICE void WritePieces(const ScheduleParams& p, Storage& s) {
  const int num_experts = p.schedule.num_local_experts;
  const auto window = static_cast<int32_t>(p.schedule.macrobatch_blocks);
  const int32_t num_blocks = s.block_begin[num_experts];
  const auto num_macrobatches = static_cast<int>(CeilDiv<int64_t>(num_blocks, window));
  auto& tables = s.tables;
  for (int expert = Thread(); expert < num_experts; expert += Storage::kNumThreads) {
    const int32_t begin = s.block_begin[expert];
    const int32_t end = s.block_begin[expert + 1];
    const int32_t num_pieces = begin == end ? 0 : (end - 1) / window - begin / window + 1;
    tables.piece_begin[expert] = num_pieces;
    tables.carrier[expert] = num_pieces > 1 ? expert : -1;
    tables.empty_before[expert] = begin == end ? 1 : 0;
  }
  SyncBlock();
  ExclusiveScan(s.scratch, tables.piece_begin, num_experts, Sum());
  ExclusiveScan(s.scratch, tables.carrier, num_experts, Maximum());
  ExclusiveScan(s.scratch, tables.empty_before, num_experts, Sum());

  const PieceTables& pieces = p.schedule.pieces;
  const int32_t num_pieces = tables.piece_begin[num_experts];
  for (int expert = Thread() / 32; expert < num_experts; expert += Storage::kWarps) {
    for (int32_t piece = tables.piece_begin[expert] + Thread() % 32;
         piece < tables.piece_begin[expert + 1]; piece += 32) {
      pieces.piece_expert[piece] = expert;
    }
    const bool is_empty = s.block_begin[expert] == s.block_begin[expert + 1];
    if (is_empty && Thread() % 32 == 0) {
      pieces.piece_expert[num_pieces + tables.empty_before[expert]] = expert;
    }
  }
  for (int macrobatch = Thread(); macrobatch < num_macrobatches;
       macrobatch += Storage::kNumThreads) {
    // The expert of the macrobatch's first block; its piece here is not its first if it was
    // carried in.
    const int32_t first_block = macrobatch * window;
    const int expert = UpperBound(s.block_begin, num_experts + 1, first_block) - 1;
    pieces.piece_begin[macrobatch] =
        tables.piece_begin[expert] + macrobatch - s.block_begin[expert] / window;
  }
  for (int macrobatch = Thread(); macrobatch <= num_macrobatches;
       macrobatch += Storage::kNumThreads) {
    // The last of the experts that begin below the macrobatch and have several pieces: its partial
    // crossed this boundary or, if it ended before, was the last to cross one.
    const int below = UpperBound(s.block_begin, num_experts, macrobatch * window - 1);
    pieces.carry_owner[macrobatch] = tables.carrier[below];
  }
  if (Thread() == 0) {
    pieces.piece_begin[num_macrobatches] = num_pieces;
    pieces.piece_begin[num_macrobatches + 1] = num_pieces + tables.empty_before[num_experts];
  }
}

// For a batch that a wait has ended: no rows, whatever the other blocks have written.
template <class Storage>
MOK_DEVICE void WriteEmptyTables(const ScheduleParams& p) {
  const int num_experts = p.schedule.num_local_experts;
  for (int expert = Thread(); expert <= num_experts; expert += Storage::kNumThreads) {
    p.schedule.expert_block_begin[expert] = 0;
    if (expert < num_experts) p.schedule.expert_rows[expert] = 0;
  }
  for (int list = Thread(); list < 2; list += Storage::kNumThreads) {
    p.schedule.pieces.piece_begin[list] = 0;
  }
}

// The state after a batch, for the next one and for passes. One thread.
template <int kBug, class Storage>
MOK_DEVICE void LeaveState(const ScheduleParams& p, const Storage& s, bool takes_part) {
  if (kBug != kScheduleCountersKept) {
    StoreRelaxedGpu(&p.state->counted_blocks, uint64_t{0});
    StoreRelaxedGpu(&p.state->finished_blocks, uint64_t{0});
  }
  if (!takes_part && kBug != kScheduleUnheardCounted) return;
  if (kBug != kScheduleEpochKept) StoreRelaxedGpu(&p.state->epoch, s.epoch);
  if (s.failed != 0 || s.is_refused == 0 || p.layer.ep_size == 1) return;
  if (kBug == kScheduleRefusalForgotten) return;
  const bool is_heard = p.layer.failure != StatusCode::kOk;
  StoreRelaxedGpu(&p.refusals->generation, s.generation + (is_heard ? 2 : 1));
  if (kBug != kScheduleLatePassKept) StoreRelaxedGpu(&p.refusals->late_passes, uint64_t{0});
}

// By every block as its last step. The block that comes last gives the schedule its size (none, if
// the grid was aborted) and leaves the state ready for the next batch.
template <int kBug, class Storage>
MOK_DEVICE void FinishBatch(const ScheduleParams& p, Storage& s, const DeviceWait& wait,
                            bool takes_part) {
  SyncBlock();
  if (Thread() == 0) {
    const uint64_t before = AtomicAddAcquireReleaseGpu(&p.state->finished_blocks, uint64_t{1});
    s.is_last = before + 1 == GridDimensions().x ? 1 : 0;
    s.failed = wait.aborted() ? 1 : 0;
  }
  SyncBlock();
  if (s.is_last == 0) return;
  if (s.failed != 0) WriteEmptyTables<Storage>(p);
  if (Thread() != 0) return;
  const int num_experts = p.schedule.num_local_experts;
  const bool failed = s.failed != 0;
  // A rank that has given up takes part in no pass either: one that comes late would take its being
  // there for its rows.
  *p.schedule.result = {
      failed ? 0 : p.schedule.expert_block_begin[num_experts],
      failed ? 0 : s.token_begin[p.layer.ep_size],
      failed || s.is_refused != 0 ? DeviceScheduleResult::kRefused : s.generation};
  LeaveState<kBug>(p, s, takes_part);
}

// ScheduleSteps::kResume. Of a rank that had heard by itself, nothing.
template <int kBug>
MOK_DEVICE void Resume(const ScheduleParams& p) {
  if (BlockIndex().x != 0 || Thread() != 0 || kBug == kScheduleNotResumed) return;
  const uint64_t generation = LoadRelaxedGpu(&p.refusals->generation);
  if (IsUnheard(generation)) StoreRelaxedGpu(&p.refusals->generation, generation + 1);
}

}  // namespace mok
