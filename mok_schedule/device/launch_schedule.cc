#include "mok_schedule/device/launch_schedule.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"

namespace mok {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

Status CheckParams(const ScheduleParams& params) {
  const ScheduleParams::Layer& layer = params.layer;
  MOK_RETURN_IF_ERROR(CheckRange("schedule: ep_size", layer.ep_size, 1, kMaxScheduleRanks));
  MOK_RETURN_IF_ERROR(CheckRange("schedule: rank", layer.rank, 0, layer.ep_size - 1));
  MOK_RETURN_IF_ERROR(CheckRange("schedule: topk", layer.topk, 1, kMaxInt32));
  MOK_RETURN_IF_ERROR(CheckRange("schedule: num_experts", layer.num_experts, 0, kMaxInt32));
  MOK_RETURN_IF_ERROR(CheckRange("schedule: num_local_experts", params.schedule.num_local_experts,
                                 0, std::min<int64_t>(kMaxScheduleExperts, layer.num_experts)));
  MOK_RETURN_IF_ERROR(CheckRange("schedule: first_expert", layer.first_expert, 0,
                                 layer.num_experts - params.schedule.num_local_experts));
  MOK_RETURN_IF_ERROR(
      CheckRange("schedule: macrobatch_blocks", params.schedule.macrobatch_blocks, 1, kMaxInt32));
  MOK_RETURN_IF_ERROR(CheckRange("schedule: num_tokens", params.tokens.num_tokens, 0,
                                 params.exchange.layout.max_tokens()));
  if (params.tokens.id_bytes != 4 && params.tokens.id_bytes != 8) {
    return InvalidArgumentError("schedule: id_bytes: expected 4 or 8, got ",
                                params.tokens.id_bytes);
  }
  // Rows, and routes of all ranks, are numbered in int32. With this bound every batch fits.
  const int64_t rows = RoutingTableCapacityRows(layer.ep_size * params.exchange.layout.max_tokens(),
                                                layer.topk, params.schedule.num_local_experts);
  MOK_RETURN_IF_ERROR(CheckRange("schedule: rows of the largest batch", rows, 0, kMaxInt32));
  return CheckRange("schedule: routes of the largest batch",
                    layer.ep_size * params.exchange.layout.max_tokens() * layer.topk, 0, kMaxInt32);
}

}  // namespace

int ScheduleGridBlocks(int64_t max_total_routes, int num_multiprocessors, int threads) {
  constexpr int64_t kRoutesPerThread = 4;
  const int64_t wanted = CeilDiv<int64_t>(max_total_routes, threads * kRoutesPerThread) + 1;
  return static_cast<int>(std::clamp<int64_t>(wanted, 2, std::max(2, num_multiprocessors)));
}

Status LaunchSchedule(const ScheduleKernelInfo& kernel, const ScheduleParams& params,
                      const ScheduleLaunch& launch) {
  MOK_RETURN_IF_ERROR(CheckParams(params));
  MOK_RETURN_IF_ERROR(CheckRange("schedule: grid_blocks", launch.grid_blocks, 2, kMaxInt32));
  runtime::LaunchConfig config;
  config.grid = {static_cast<uint32_t>(launch.grid_blocks), 1, 1};
  config.block = {static_cast<uint32_t>(kernel.threads), 1, 1};
  config.shared_bytes = static_cast<size_t>(kernel.shared_bytes);
  config.device = launch.device;
  config.stream = launch.stream;
  config.name = "schedule";
  return runtime::LaunchKernelAddress(kernel.address, config, &params, sizeof(params));
}

}  // namespace mok
