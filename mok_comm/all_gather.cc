#include "mok_comm/all_gather.h"

#include <cstring>
#include <limits>

namespace mok {
namespace {

// The head of a slot: the token count, alone in its cache line. The ids follow.
struct SlotHeader {
  int64_t num_tokens;
};

}  // namespace

RouteAllGather::RouteAllGather(const SymmetricHeap& heap, size_t offset, int64_t max_tokens,
                               int topk)
    : heap_(heap), offset_(offset), max_tokens_(max_tokens), topk_(topk) {
  MOK_CHECK(offset % kCacheLineBytes == 0) << "routes region at byte " << offset;
  MOK_CHECK(offset + RegionBytes(max_tokens, topk) <= heap.bytes())
      << "routes region at byte " << offset << " ends outside a heap of " << heap.bytes();
}

std::byte* RouteAllGather::Slot(int rank) const {
  return heap_.base(rank) + offset_ + (round_ % 2) * SlotBytes(max_tokens_, topk_);
}

template <class Integer>
Status RouteAllGather::PublishIds(const Integer* expert_ids, int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > max_tokens_) {
    return OutOfRangeError("rank ", heap_.rank(), " has ", num_tokens, " tokens, expected 0 to ",
                           max_tokens_);
  }
  const int64_t num_ids = num_tokens * topk_;
  for (int64_t i = 0; i < num_ids; ++i) {
    if (expert_ids[i] == static_cast<int32_t>(expert_ids[i])) continue;
    return OutOfRangeError("rank ", heap_.rank(), ", token ", i / topk_, ", k ", i % topk_,
                           ": expert id ", expert_ids[i], " does not fit 32 bits");
  }
  ++round_;
  std::byte* slot = Slot(heap_.rank());
  const SlotHeader header{num_tokens};
  std::memcpy(slot, &header, sizeof(header));
  auto* ids = reinterpret_cast<int32_t*>(slot + kCacheLineBytes);
  for (int64_t i = 0; i < num_ids; ++i) ids[i] = static_cast<int32_t>(expert_ids[i]);
  return OkStatus();
}

Status RouteAllGather::Publish(const int32_t* expert_ids, int64_t num_tokens) {
  return PublishIds(expert_ids, num_tokens);
}

Status RouteAllGather::Publish(const int64_t* expert_ids, int64_t num_tokens) {
  return PublishIds(expert_ids, num_tokens);
}

StatusOr<GatheredRoutes> RouteAllGather::Gather() const {
  GatheredRoutes routes;
  routes.topk = topk_;
  routes.first_token.push_back(0);
  for (int rank = 0; rank < heap_.size(); ++rank) {
    SlotHeader header;
    std::memcpy(&header, Slot(rank), sizeof(header));
    if (header.num_tokens < 0 || header.num_tokens > max_tokens_) {
      return OutOfRangeError("rank ", rank, " published ", header.num_tokens,
                             " tokens, expected 0 to ", max_tokens_);
    }
    routes.num_tokens.push_back(header.num_tokens);
    routes.first_token.push_back(routes.first_token.back() + header.num_tokens);
  }
  routes.expert_ids.resize(static_cast<size_t>(routes.first_token.back() * topk_));
  int32_t* next = routes.expert_ids.data();
  for (int rank = 0; rank < heap_.size(); ++rank) {
    const auto num_ids = static_cast<size_t>(routes.num_tokens[static_cast<size_t>(rank)] * topk_);
    if (num_ids == 0) continue;
    std::memcpy(next, Slot(rank) + kCacheLineBytes, num_ids * sizeof(int32_t));
    next += num_ids;
  }
  return routes;
}

}  // namespace mok
