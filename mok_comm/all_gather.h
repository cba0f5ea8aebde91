// All-gather of the routes: every rank learns which experts every token of every rank goes to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mok_comm/symmetric_heap.h"
#include "mok_core/macros.h"
#include "mok_core/status.h"

namespace mok {

// The routes of all ranks, in local memory.
struct GatheredRoutes {
  std::vector<int64_t> num_tokens;   // [ranks] T_r
  std::vector<int32_t> expert_ids;   // [sum of T_r, K], rank after rank; -1 = no route
  std::vector<int64_t> first_token;  // [ranks + 1] prefix sums of num_tokens
  int topk = 0;

  // [T_rank, K] of one rank.
  const int32_t* Rank(int rank) const {
    return expert_ids.data() + first_token[static_cast<size_t>(rank)] * topk;
  }
};

// Gather by pull, around one barrier per round:
//   gather.Publish(ids, T); barrier.ArriveAndWait(...); gather.Gather()
// Two slots per rank alternate, as in RankMessage, so no second barrier protects the readers.
class RouteAllGather {
 public:
  // Bytes of the region for at most `max_tokens` tokens on any rank with `topk` routes each.
  static size_t RegionBytes(int64_t max_tokens, int topk) {
    return 2 * SlotBytes(max_tokens, topk);
  }

  // The region starts at `offset` (a multiple of 64) on every rank. The heap outlives the object.
  RouteAllGather(const SymmetricHeap& heap, size_t offset, int64_t max_tokens, int topk);

  // Starts a round with this rank's [num_tokens, topk] global expert ids, contiguous; -1 = no
  // route. kOutOfRange, with nothing published, when num_tokens is not in [0, max_tokens] or an
  // int64 id does not fit int32 (names token, k and id; the range of experts is checked where the
  // table is built).
  Status Publish(const int32_t* expert_ids, int64_t num_tokens);
  Status Publish(const int64_t* expert_ids, int64_t num_tokens);

  // Copies everybody's routes of this round. Call after the barrier and before arriving at the
  // next. kOutOfRange naming the rank whose token count is not in [0, max_tokens].
  StatusOr<GatheredRoutes> Gather() const;

 private:
  static size_t SlotBytes(int64_t max_tokens, int topk) {
    const size_t ids = static_cast<size_t>(max_tokens) * static_cast<size_t>(topk);
    return kCacheLineBytes + RoundUp(ids * sizeof(int32_t), kCacheLineBytes);
  }
  template <class Integer>
  Status PublishIds(const Integer* expert_ids, int64_t num_tokens);
  std::byte* Slot(int rank) const;

  const SymmetricHeap& heap_;
  const size_t offset_;
  const int64_t max_tokens_;
  const int topk_;
  uint64_t round_ = 0;
};

}  // namespace mok
