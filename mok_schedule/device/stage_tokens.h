// First step of the schedule kernel: a rank publishes its expert ids, and reads what the others
// have announced.
#pragma once

#include <cstdint>

#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"
#include "mok_schedule/device/schedule_bug.h"
#include "mok_schedule/device/schedule_storage.h"

namespace mok {

inline constexpr int64_t kNoRoute = INT64_MAX;

MOK_DEVICE int64_t LoadExpertId(const ScheduleParams::Tokens& tokens, int64_t route) {
  return tokens.id_bytes == 8 ? static_cast<const int64_t*>(tokens.expert_ids)[route]
                              : static_cast<const int32_t*>(tokens.expert_ids)[route];
}

template <int kBug>
MOK_DEVICE uint64_t BufferOf(uint64_t epoch) {
  return kBug == kScheduleSingleBuffer ? 0 : epoch;
}

template <int kBug>
MOK_DEVICE int32_t LatePasses(const ScheduleParams& p) {
  if (kBug == kScheduleLatePassNotTold) return 0;
  return static_cast<int32_t>(LoadRelaxedGpu(&p.refusals->late_passes));
}

// Tells every rank that this rank's ids lie ready. By the whole block that staged last.
template <int kBug, class Storage>
MOK_DEVICE void Announce(const ScheduleParams& p, Storage& s) {
  Candidate first = {kNoRoute, 0};
  for (int block = Thread(); block < static_cast<int>(GridDimensions().x);
       block += Storage::kNumThreads) {
    const InvalidId& invalid = p.scratch.invalid[block];
    if (invalid.route < first.order) first = {invalid.route, invalid.id};
  }
  first = BlockMinimum(s.scratch, first);
  const int64_t invalid_route = first.order == kNoRoute ? -1 : first.order;
  const ScheduleHeader header = {p.tokens.num_tokens,
                                 invalid_route,
                                 first.value,
                                 p.exchange.layout.max_tokens(),
                                 p.layer.hidden,
                                 p.layer.intermediate,
                                 p.layer.shared_intermediate,
                                 p.layer.topk,
                                 p.layer.num_experts,
                                 p.layer.first_expert,
                                 p.schedule.num_local_experts,
                                 static_cast<int32_t>(p.layer.failure),
                                 LatePasses<kBug>(p)};
  const ScheduleExchangeLayout& layout = p.exchange.layout;
  for (int rank = Thread(); rank < p.layer.ep_size; rank += Storage::kNumThreads) {
    std::byte* region = p.exchange.regions[rank];
    auto* headers =
        reinterpret_cast<ScheduleHeader*>(region + layout.headers(BufferOf<kBug>(s.epoch)));
    headers[p.layer.rank] = header;
    uint64_t* flag = reinterpret_cast<uint64_t*>(region + layout.flags()) + p.layer.rank;
    if (kBug == kScheduleFlagOfGpuScope) {
      StoreReleaseGpu(flag, s.epoch);
    } else {
      StoreReleaseSys(flag, s.epoch);
    }
  }
  if (Thread() == 0) StoreRelaxedGpu(&p.state->staged_blocks, uint64_t{0});
}

// Copies the ids to where the other ranks read them. A batch with an invalid one is refused, and
// its ids are not used.
template <int kBug, class Storage>
MOK_DEVICE void StageTokens(const ScheduleParams& p, Storage& s) {
  auto* staged = reinterpret_cast<int32_t*>(p.exchange.regions[p.layer.rank] +
                                            p.exchange.layout.ids(BufferOf<kBug>(s.epoch)));
  const int64_t num_routes = p.tokens.num_tokens * p.layer.topk;
  const int64_t stride = int64_t{GridDimensions().x} * Storage::kNumThreads;
  Candidate first = {kNoRoute, 0};
  for (int64_t route = int64_t{BlockIndex().x} * Storage::kNumThreads + Thread();
       route < num_routes; route += stride) {
    const int64_t id = LoadExpertId(p.tokens, route);
    const bool valid = id >= -1 && id < p.layer.num_experts;
    staged[route] = static_cast<int32_t>(id);
    if (!valid && route < first.order) first = {route, id};
  }
  first = BlockMinimum(s.scratch, first);
  if (Thread() == 0) {
    p.scratch.invalid[BlockIndex().x] = {first.order, first.value};
    // Released are the stores of the whole block, which BlockMinimum has synchronised.
    const uint64_t before = AtomicAddAcquireReleaseGpu(&p.state->staged_blocks, uint64_t{1});
    const uint64_t last = kBug == kScheduleAnnounceTooEarly ? 0 : GridDimensions().x - 1;
    s.is_last = before == last ? 1 : 0;
  }
  SyncBlock();
  if (s.is_last != 0) Announce<kBug>(p, s);
}

// Waits until every rank, this one included, has announced its batch. False: aborted.
template <int kBug, class Storage>
MOK_DEVICE bool WaitForRanks(const ScheduleParams& p, Storage& s, DeviceWait& wait) {
  const auto* flags = reinterpret_cast<const uint64_t*>(p.exchange.regions[p.layer.rank] +
                                                        p.exchange.layout.flags());
  for (int rank = Thread(); rank < p.layer.ep_size; rank += Storage::kNumThreads) {
    if (kBug == kScheduleNoWaitForRanks && rank != p.layer.rank) continue;
    wait.SetTask(static_cast<int32_t>(ScheduleWait::kRank), rank);
    const bool held = kBug == kScheduleWaitOfGpuScope ? wait.ForCounterGpu(flags + rank, s.epoch)
                                                      : wait.ForCounterSys(flags + rank, s.epoch);
    if (!held) break;
  }
  return AllWaitsHeld(s, wait);
}

// What is wrong with a batch; the lowest `order` is what all ranks record. What keeps the ranks
// from working together comes before invalid ids, and then lower ranks come first.
struct BatchError {
  int64_t order;

  static MOK_DEVICE BatchError None() { return BatchError(kNoRoute); }
  MOK_DEVICE BatchError(ScheduleErrorKind kind, int rank)
      : order((kind == ScheduleErrorKind::kExpertId ? kMaxScheduleRanks + rank : rank) *
                  int64_t{kNumScheduleErrorKinds} +
              static_cast<int64_t>(kind)) {}
  explicit MOK_DEVICE BatchError(int64_t value) : order(value) {}

  MOK_DEVICE bool is_none() const { return order == kNoRoute; }
  MOK_DEVICE int32_t rank() const {
    return static_cast<int32_t>(order / kNumScheduleErrorKinds % kMaxScheduleRanks);
  }
  MOK_DEVICE ScheduleErrorKind kind() const {
    return static_cast<ScheduleErrorKind>(order % kNumScheduleErrorKinds);
  }
};
static_assert(static_cast<int>(ScheduleErrorKind::kLatePass) == kNumScheduleErrorKinds - 1);

// The first thing that is wrong with a rank's header. A rank is compared with rank 0, and its
// experts with those of the rank below.
template <int kBug>
MOK_DEVICE BatchError ErrorOf(const ScheduleHeader* headers, int rank, int ep_size) {
  const ScheduleHeader& header = headers[rank];
  const ScheduleHeader& first = headers[0];
  const int32_t expected =
      rank == 0 ? 0 : headers[rank - 1].first_expert + headers[rank - 1].num_local_experts;
  const int32_t end = header.first_expert + header.num_local_experts;
  if (header.failure != 0) return {ScheduleErrorKind::kRankFailed, rank};
  if (header.late_passes != 0) return {ScheduleErrorKind::kLatePass, rank};
  if (header.max_tokens != first.max_tokens && kBug != kScheduleMaxTokensNotCompared) {
    return {ScheduleErrorKind::kMaxTokens, rank};
  }
  if (header.hidden != first.hidden && kBug != kScheduleHiddenNotCompared) {
    return {ScheduleErrorKind::kHidden, rank};
  }
  if (header.intermediate != first.intermediate && kBug != kScheduleIntermediateNotCompared) {
    return {ScheduleErrorKind::kIntermediate, rank};
  }
  if (header.shared_intermediate != first.shared_intermediate &&
      kBug != kScheduleSharedNotCompared) {
    return {ScheduleErrorKind::kSharedIntermediate, rank};
  }
  if (header.topk != first.topk) return {ScheduleErrorKind::kTopk, rank};
  if (header.num_experts != first.num_experts) return {ScheduleErrorKind::kNumExperts, rank};
  if (header.first_expert != expected || (rank == ep_size - 1 && end != header.num_experts)) {
    return {ScheduleErrorKind::kExpertRanges, rank};
  }
  if (header.invalid_route >= 0 && kBug != kScheduleInvalidIdAccepted) {
    return {ScheduleErrorKind::kExpertId, rank};
  }
  return BatchError::None();
}

// The ranks count as having no tokens. By the whole block.
template <class Storage>
MOK_DEVICE void ClearTokens(const ScheduleParams& p, Storage& s) {
  for (int rank = Thread(); rank <= p.layer.ep_size; rank += Storage::kNumThreads) {
    s.token_begin[rank] = 0;
  }
  SyncBlock();
}

// Fills token_begin and ids from the headers; no tokens, if anything is wrong: all ranks see the
// same headers and come to the same verdict.
template <int kBug, class Storage>
MOK_DEVICE BatchError ReadHeaders(const ScheduleParams& p, Storage& s) {
  const uint64_t buffer = BufferOf<kBug>(s.epoch);
  const auto* headers = reinterpret_cast<const ScheduleHeader*>(p.exchange.regions[p.layer.rank] +
                                                                p.exchange.layout.headers(buffer));
  Candidate first = {kNoRoute, 0};
  for (int rank = Thread(); rank < p.layer.ep_size; rank += Storage::kNumThreads) {
    s.token_begin[rank] = headers[rank].num_tokens;
    s.ids[rank] =
        reinterpret_cast<const int32_t*>(p.exchange.regions[rank] + p.exchange.layout.ids(buffer));
    const BatchError error = ErrorOf<kBug>(headers, rank, p.layer.ep_size);
    if (error.order < first.order) first.order = error.order;
  }
  const BatchError error(BlockMinimum(s.scratch, first).order);
  if (error.is_none()) {
    ExclusiveScan(s.scratch, s.token_begin, p.layer.ep_size, Sum());
  } else {
    ClearTokens(p, s);
  }
  return error;
}

}  // namespace mok
