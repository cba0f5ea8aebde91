#include "mok_megakernel/workspace_layout.h"

#include "mok_comm/all_gather.h"
#include "mok_comm/rank_barrier.h"
#include "mok_comm/symmetric_heap.h"
#include "mok_core/counter.h"
#include "mok_megakernel/handshake.h"

namespace mok {
namespace {

constexpr size_t kPage = 4096;

size_t Bytes(int64_t rows, int64_t columns, int64_t element_bytes) {
  return static_cast<size_t>(rows) * static_cast<size_t>(columns) *
         static_cast<size_t>(element_bytes);
}

}  // namespace

HeapRegions LayOutHeap(const WorkspaceShape& shape) {
  const int64_t element_bytes = ElementBytes(shape.dtype);
  const int64_t staged_tokens = shape.ep_size > 1 ? shape.max_tokens : 0;
  HeapLayout layout;
  HeapRegions regions;
  regions.barrier = layout.Reserve(RankBarrier::RegionBytes(shape.ep_size));
  regions.handshake = layout.Reserve(RankMessage::RegionBytes(sizeof(HandshakeRecord)));
  regions.routes = layout.Reserve(RouteAllGather::RegionBytes(shape.max_tokens, shape.topk));
  regions.data = layout.Reserve(0, kPage);
  regions.x = layout.Reserve(Bytes(staged_tokens, shape.hidden, element_bytes), kPage);
  regions.d_out = layout.Reserve(Bytes(staged_tokens, shape.hidden, element_bytes), kPage);
  regions.topk_weight = layout.Reserve(Bytes(staged_tokens, shape.topk, sizeof(float)), kPage);
  regions.rows =
      layout.Reserve(Bytes(shape.max_tokens * shape.topk, shape.hidden, element_bytes), kPage);
  regions.d_topk_weight = layout.Reserve(Bytes(shape.max_tokens, shape.topk, sizeof(float)), kPage);
  regions.bytes = layout.bytes();
  return regions;
}

ScratchRegions LayOutScratch(const ScratchShape& shape) {
  const int64_t element_bytes = ElementBytes(shape.dtype);
  HeapLayout layout;
  const auto rows = [&](int64_t num_rows, int64_t columns) {
    return layout.Reserve(Bytes(num_rows, columns, element_bytes), kPage);
  };
  const auto floats = [&](int64_t num_rows, int64_t columns) {
    return layout.Reserve(Bytes(num_rows, columns, sizeof(float)), kPage);
  };
  // The shared expert's rows take no memory without one.
  const int64_t shared_rows = shape.shared_intermediate > 0 ? shape.num_tokens : 0;
  ScratchRegions regions;
  if (shape.pass == Pass::kForward) {
    regions.activation = rows(shape.ring_rows, shape.intermediate);
    regions.y = rows(shape.ring_rows, shape.hidden);
    regions.shared_activation = rows(shared_rows, shape.shared_intermediate);
    regions.shared_y = rows(shared_rows, shape.hidden);
  } else {
    regions.d_out = rows(shape.ring_rows, shape.hidden);
    regions.router_weight = floats(shape.ring_rows, 1);
    regions.d_gate = rows(shape.ring_rows, shape.intermediate);
    regions.d_up = rows(shape.ring_rows, shape.intermediate);
    regions.weighted_h = rows(shape.ring_rows, shape.intermediate);
    regions.d_router_partial = floats(shape.ring_rows, shape.intermediate_tiles);
    regions.d_router = floats(shape.ring_rows, 1);
    regions.d_x = rows(shape.ring_rows, shape.hidden);
    regions.shared_d_gate = rows(shared_rows, shape.shared_intermediate);
    regions.shared_d_up = rows(shared_rows, shape.shared_intermediate);
    regions.shared_weighted_h = rows(shared_rows, shape.shared_intermediate);
    regions.d_scale_partial = floats(shared_rows, shape.shared_intermediate_tiles);
    regions.shared_d_x = rows(shared_rows, shape.hidden);
    const int64_t carried = shape.carries ? shape.intermediate : 0;
    regions.carry_down = floats(carried, shape.hidden);
    regions.carry_gate = floats(carried, shape.hidden);
    regions.carry_up = floats(carried, shape.hidden);
  }
  regions.counters = layout.Reserve(static_cast<size_t>(shape.num_counters) * sizeof(Counter));
  regions.bytes = layout.bytes();
  return regions;
}

}  // namespace mok
