#include "mok_megakernel/cuda/workspace_layout.h"

#include <algorithm>

#include "mok_core/bits.h"
#include "mok_schedule/routing_table.h"

namespace mok {
namespace {

constexpr size_t kAlignment = 256;

// Appends parts one after the other.
class Placer {
 public:
  Placer(size_t* begin, size_t& bytes) : begin_(begin), bytes_(bytes) {}

  void Place(int part, size_t part_bytes) {
    begin_[part] = bytes_;
    bytes_ += RoundUp(part_bytes, kAlignment);
  }

 private:
  size_t* begin_;
  size_t& bytes_;
};

}  // namespace

CudaHeapLayout::CudaHeapLayout(const CudaWorkspaceShape& shape)
    : schedule_(shape.ep_size, shape.max_tokens, shape.topk) {
  const auto tokens = static_cast<size_t>(shape.max_tokens);
  const size_t routes = tokens * static_cast<size_t>(shape.topk);
  const size_t row_bytes = static_cast<size_t>(shape.hidden) * sizeof(BFloat16);
  const size_t staged = shape.ep_size > 1 ? 1 : 0;
  Placer placer(begin_, bytes_);
  placer.Place(kFlags, RankMeeting::FlagBytes(shape.ep_size));
  placer.Place(kSchedule, static_cast<size_t>(schedule_.bytes()));
  placer.Place(kRoutes, routes * row_bytes);
  placer.Place(kDRouter, routes * sizeof(float));
  placer.Place(kX, staged * tokens * row_bytes);
  placer.Place(kDOut, staged * tokens * row_bytes);
  placer.Place(kTopkWeight, staged * routes * sizeof(float));
}

CudaStateLayout::CudaStateLayout(const CudaWorkspaceShape& shape) {
  ForwardLayerShape layer;
  layer.max_tokens = shape.max_tokens;
  layer.num_local_experts = kMaxScheduleExperts;
  ForwardConfig config;
  // No layer has more rows than this, so none has more counters.
  config.macrobatch_blocks = std::max<int64_t>(
      1,
      RoutingTableCapacityRows(shape.ep_size * shape.max_tokens, shape.topk, kMaxScheduleExperts) /
          kRowBlock);
  Placer placer(begin_, bytes_);
  placer.Place(kScheduleRegions, static_cast<size_t>(shape.ep_size) * sizeof(std::byte*));
  placer.Place(kScheduleState, sizeof(ScheduleState));
  placer.Place(kScheduleAbort, sizeof(uint32_t));
  placer.Place(kPasses, PassMemoryLayout(layer, config).bytes());
}

}  // namespace mok
