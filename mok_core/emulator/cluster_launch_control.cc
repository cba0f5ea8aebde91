// Taking over clusters that have not started.
#include <cstring>

#include "mok_core/emulator/engine.h"

namespace mok::emulator {
namespace {

constexpr uint32_t kResponseMark = 0xC1C0;
constexpr uint32_t kCanceled = 1u << 31;

struct Response {
  uint32_t x, y, z, flags;
};

}  // namespace

void ClusterLaunchTryCancel(uint32_t shared_response, uint32_t barrier_address) {
  Enter("clusterlaunchcontrol.try_cancel", barrier_address);
  if (shared_response % 16 != 0) Fail("usage", "try_cancel response is not 16-byte aligned");
  Block* block = CheckShared(shared_response, sizeof(Response), "try_cancel");
  Barrier* barrier = &BarrierAt(barrier_address, "try_cancel");
  TouchBarrier(*barrier, AccessKind::kAsync);
  BeginTransfer(*barrier, sizeof(Response));
  const uint32_t offset = shared_response & kOffsetMask;
  const Access access{barrier->phase + 1, barrier->agent, AccessKind::kAsync, 0xF};
  RecordAccess(true, {block, offset, nullptr, sizeof(Response)}, g_current->clock, access,
               "try_cancel response");
  Grid* grid = block->grid;
  AddAsync([=] {
    Response response{0, 0, 0, kResponseMark};
    if (grid->next_cluster < grid->num_clusters) {
      const Index3& size = grid->options.grid;
      const auto first = static_cast<uint32_t>(grid->next_cluster++ * grid->cluster_size);
      response = {first % size.x, first / size.x % size.y, first / size.x / size.y,
                  kResponseMark | kCanceled};
      ++grid->finished_clusters;  // its work is now the taker's
    }
    std::memcpy(block->shared + offset, &response, sizeof response);
    CompleteTransfer(*barrier, sizeof(Response));
    return true;
  });
}

bool ClusterLaunchQuery(const void* shared_response, Index3* block_index) {
  Enter("clusterlaunchcontrol.query_cancel");
  const uint32_t address = SharedAddress(shared_response);
  Block* block = CheckShared(address, sizeof(Response), "query_cancel");
  RecordAccess(false, {block, address & kOffsetMask, nullptr, sizeof(Response)}, g_current->clock,
               FiberAccess(AccessKind::kGeneric), "query_cancel");
  Response response;
  std::memcpy(&response, shared_response, sizeof response);
  if ((response.flags & 0xFFFF) != kResponseMark) {
    Fail("usage", "query_cancel on bytes that are not a try_cancel response");
  }
  *block_index = {response.x, response.y, response.z};
  return (response.flags & kCanceled) != 0;
}

}  // namespace mok::emulator
