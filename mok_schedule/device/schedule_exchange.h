// What ranks tell each other to build their routing tables: the layout of one region of symmetric
// memory, the same on every rank.
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/macros.h"

namespace mok {

// One rank's message to another. Equal on all ranks: max_tokens, hidden, intermediate,
// shared_intermediate, topk, num_experts.
struct ScheduleHeader {
  int64_t num_tokens;           // T_r of this batch
  int64_t invalid_route;        // first route whose expert id is outside [-1, E); -1: none
  int64_t invalid_id;           // that id
  int64_t max_tokens;           // of the layout
  int32_t hidden;               // H
  int32_t intermediate;         // I
  int32_t shared_intermediate;  // Is
  int32_t topk;                 // K
  int32_t num_experts;          // E
  int32_t first_expert;         // the rank's experts are first_expert ..
  int32_t num_local_experts;    // .. first_expert + num_local_experts - 1
  int32_t failure;              // 0, or a StatusCode: the rank cannot take part
  int32_t late_passes;          // of RefusalState
};

// The region. Flags and headers lie at places that depend on the number of ranks alone, so that
// ranks that disagree on anything else can still tell each other. Headers and ids are
// double-buffered by the parity of the epoch, so that nobody has to wait until the others have read
// them: a rank that writes epoch n + 2 has seen every rank's flag of epoch n + 1, which each raises
// after its kernel of epoch n.
class ScheduleExchangeLayout {
 public:
  ScheduleExchangeLayout() = default;
  // max_tokens: the largest T_r of any rank.
  MOK_HOST_DEVICE ScheduleExchangeLayout(int64_t ep_size, int64_t max_tokens, int64_t topk)
      : max_tokens_(max_tokens),
        headers_(RoundUp<int64_t>(ep_size * static_cast<int64_t>(sizeof(uint64_t)), kAlignment)),
        header_bytes_(
            RoundUp<int64_t>(ep_size * static_cast<int64_t>(sizeof(ScheduleHeader)), kAlignment)),
        ids_bytes_(RoundUp<int64_t>(max_tokens * topk * static_cast<int64_t>(sizeof(int32_t)),
                                    kAlignment)) {}

  MOK_HOST_DEVICE int64_t max_tokens() const { return max_tokens_; }
  // uint64_t[ep_size]: epoch of the last batch that rank i has announced here, zero at first.
  // Written by rank i.
  MOK_HOST_DEVICE int64_t flags() const { return 0; }
  // ScheduleHeader[ep_size]: entry i is written by rank i.
  MOK_HOST_DEVICE int64_t headers(uint64_t epoch) const {
    return headers_ + static_cast<int64_t>(epoch % 2) * header_bytes_;
  }
  // int32_t[num_tokens, topk]: this rank's global expert ids; -1 where there is no route. Written
  // by this rank, read by all.
  MOK_HOST_DEVICE int64_t ids(uint64_t epoch) const {
    return headers_ + 2 * header_bytes_ + static_cast<int64_t>(epoch % 2) * ids_bytes_;
  }
  MOK_HOST_DEVICE int64_t bytes() const { return headers_ + 2 * (header_bytes_ + ids_bytes_); }

 private:
  static constexpr int64_t kAlignment = 128;

  int64_t max_tokens_ = 0;
  int64_t headers_ = 0;
  int64_t header_bytes_ = 0;  // of one parity
  int64_t ids_bytes_ = 0;     // of one parity
};

}  // namespace mok
