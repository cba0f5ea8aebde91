#include "mok_megakernel/sm90/testing/schedule_ranks_on_device.h"

#include <algorithm>

#include "mok_core/device/runtime.h"
#include "mok_schedule/routing_table.h"

namespace mok::testing {
namespace {

constexpr int kGridBlocks = 2;

}  // namespace

ScheduleRanksOnDevice::ScheduleRanksOnDevice(const std::vector<ScheduleRank>& ranks, int topk,
                                             uint64_t timeout_ns)
    : ranks_(ranks), params_(ranks.size()) {
  const auto ep_size = static_cast<int32_t>(ranks.size());
  int64_t max_tokens = 0, total_tokens = 0;
  int32_t num_experts = 0;
  for (const ScheduleRank& rank : ranks) {
    max_tokens = std::max(max_tokens, rank.num_tokens);
    total_tokens += rank.num_tokens;
    num_experts += rank.num_local_experts;
  }
  const ScheduleExchangeLayout exchange(ep_size, max_tokens, topk);
  std::vector<std::byte*> regions;
  for (const ScheduleRank& rank : ranks) {
    regions.push_back(
        static_cast<std::byte*>(memory_.AllocateZeroed(rank.device, exchange.bytes(), "region")));
  }
  int32_t first_expert = 0;
  for (int32_t index = 0; index < ep_size; ++index) {
    const ScheduleRank& rank = ranks[index];
    for (const ScheduleRank& peer : ranks) {
      MustSucceed(runtime::EnablePeerAccess(rank.device, peer.device));
    }
    ScheduleParams& params = params_[index];
    params.tokens = {rank.expert_ids, rank.num_tokens, rank.id_bytes};
    params.layer = {index, ep_size, topk, num_experts, first_expert};
    first_expert += rank.num_local_experts;
    params.exchange = {memory_.Upload(rank.device, regions.data(),
                                      static_cast<int64_t>(regions.size()), "regions"),
                       exchange};
    const int64_t capacity = std::max<int64_t>(
        RoutingTableCapacityRows(total_tokens, topk, rank.num_local_experts), kRowBlock);
    const DeviceScheduleLayout layout(
        {capacity, rank.num_local_experts, rank.macrobatch_blocks, ep_size, max_tokens, topk});
    params.schedule = layout.At(memory_.Allocate(rank.device, layout.bytes(), "schedule"));
    const ScheduleScratchLayout scratch(ep_size, std::max<int64_t>(max_tokens, 1), topk,
                                        rank.num_local_experts, kGridBlocks);
    params.scratch = scratch.At(memory_.Allocate(rank.device, scratch.bytes(), "scratch"));
    params.state = static_cast<ScheduleState*>(
        memory_.AllocateZeroed(rank.device, sizeof(ScheduleState), "schedule state"));
    params.refusals = static_cast<RefusalState*>(
        memory_.AllocateZeroed(rank.device, sizeof(RefusalState), "refusals"));
    params.error = memory_.AllocateMapped<ScheduleErrorRecord>("schedule error");
    params.wait = {
        memory_.AllocateMapped<DeviceWaitRecord>("wait record"),
        static_cast<uint32_t*>(memory_.AllocateZeroed(rank.device, sizeof(uint32_t), "abort flag")),
        timeout_ns, index};
  }
}

Status ScheduleRanksOnDevice::Launch(int rank, ScheduleSteps steps) const {
  ScheduleParams params = params_[rank];
  params.steps = steps;
  return LaunchSchedule(GetScheduleKernel(), params,
                        {kGridBlocks, ranks_[rank].device, ranks_[rank].stream});
}

Status ScheduleRanksOnDevice::Check() const {
  for (const ScheduleParams& params : params_) {
    MOK_RETURN_IF_ERROR(CheckDeviceWaitRecord(*params.wait.record));
    if (params.error->state != 0) return InvalidArgumentError("the schedule kernel found an error");
  }
  return OkStatus();
}

}  // namespace mok::testing
