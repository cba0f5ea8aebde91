#include "mok_megakernel/sm90/testing/device_layer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "mok_core/device/runtime.h"
#include "mok_schedule/routing_table.h"

namespace mok::testing {
DeviceLayer::DeviceLayer(const LayerData& data, const DeviceLayerOptions& options,
                         KernelOf kernel_of)
    : data_(data), options_(options), kernel_of_(kernel_of) {
  ranks_.resize(static_cast<size_t>(data.spec.ep_size()));
  int64_t first_token = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    ranks_[rank].device = options.own_devices ? rank : 0;
    ranks_[rank].first_token = first_token;
    first_token += data.spec.tokens[rank];
    ChooseConfig(rank);
    UploadTokens(rank);
    UploadWeights(rank);
    AllocateOutputs(rank);
    UploadSchedule(rank);
  }
  if (options.device_schedule) PrepareDeviceSchedule();
  for (int rank = 0; rank < num_ranks(); ++rank) Connect(rank);
  if (options.trace_capacity == 0) return;
  trace_ =
      std::make_unique<TraceBuffer>(ranks_[0].device, config(0).num_blocks, options.trace_capacity);
  ranks_[0].params.trace = trace_->params();
}

void DeviceLayer::ChooseConfig(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  rank.shape.max_tokens = *std::max_element(spec.tokens.begin(), spec.tokens.end());
  rank.shape.hidden = spec.hidden;
  rank.shape.intermediate = spec.intermediate;
  rank.shape.shared_intermediate = spec.shared_intermediate;
  rank.shape.topk = spec.topk;
  rank.shape.num_experts = spec.num_experts();
  rank.shape.num_local_experts = spec.experts[index];
  rank.shape.ep_size = num_ranks();
  StatusOr<ForwardConfig> config =
      SelectForwardConfig(rank.shape, options_.device, options_.forward);
  MOK_CHECK(config.ok()) << config.status();
  rank.config = config.value();
  const auto override_with = [](auto& field, auto value) {
    if (value != 0) field = value;
  };
  override_with(rank.config.exchange_tiles, options_.exchange_tiles);
  override_with(rank.config.token_reduce_tiles, options_.token_reduce_tiles);
  if (options_.fused_forward_reduce >= 0) {
    rank.config.fused_forward_reduce = options_.fused_forward_reduce;
  }
  if (options_.fused_backward_reduce >= 0) {
    rank.config.fused_backward_reduce = options_.fused_backward_reduce;
  }
  override_with(rank.config.output_panel_blocks, options_.output_panel_blocks);
  override_with(rank.config.gate_up_panel_blocks, options_.gate_up_panel_blocks);
  override_with(rank.config.d_x_window_blocks, options_.d_x_window_blocks);
  override_with(rank.config.chunk_bytes, options_.chunk_bytes);
  const uint32_t most = kernel_of_(rank.config.order).max_dedicated_chunk_bytes;
  rank.config.dedicated_chunk_bytes = std::min(rank.config.dedicated_chunk_bytes, most);
  override_with(rank.config.push_interval_ns, options_.push_interval_ns);
  override_with(rank.config.push_interval_beside_pulls_ns, options_.push_interval_beside_pulls_ns);
}

void DeviceLayer::UploadTokens(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  ForwardArguments::Tokens& tokens = rank.arguments.tokens;
  const int64_t count = spec.tokens[index], first = rank.first_token;
  const int64_t routes = count * spec.topk;
  const int64_t* ids = data_.topk_idx.data() + first * spec.topk;
  tokens.num_tokens = count;
  tokens.x =
      memory_.UploadTensor(rank.device, data_.x, first * spec.hidden, count * spec.hidden, "x");
  tokens.topk_weight = memory_.Upload(rank.device, data_.topk_weight.data() + first * spec.topk,
                                      routes, "topk_weight");
  tokens.id_bytes = options_.id_bytes;
  if (options_.id_bytes == 8) {
    tokens.expert_ids = memory_.Upload(rank.device, ids, routes, "expert_ids");
  } else {
    const std::vector<int32_t> narrow(ids, ids + routes);
    tokens.expert_ids = memory_.Upload(rank.device, narrow.data(), routes, "expert_ids");
  }
  if (spec.shared_scale) {
    tokens.shared_scale =
        memory_.Upload(rank.device, data_.shared_scale.data() + first, count, "shared_scale");
  }
}

void DeviceLayer::UploadWeights(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  int64_t first_expert = 0;
  for (int lower = 0; lower < index; ++lower) first_expert += spec.experts[lower];
  const int64_t expert = spec.hidden * spec.intermediate, begin = first_expert * expert;
  const int64_t count = spec.experts[index] * expert;
  ForwardArguments::Weights& weights = rank.arguments.weights;
  weights.gate = memory_.UploadTensor(rank.device, data_.gate, begin, count, "gate weights");
  weights.up = memory_.UploadTensor(rank.device, data_.up, begin, count, "up weights");
  weights.down = memory_.UploadTensor(rank.device, data_.down, begin, count, "down weights");
  const int64_t shared = spec.hidden * spec.shared_intermediate;
  if (shared == 0) return;
  weights.shared_gate =
      memory_.UploadTensor(rank.device, data_.shared_gate, 0, shared, "shared gate");
  weights.shared_up = memory_.UploadTensor(rank.device, data_.shared_up, 0, shared, "shared up");
  weights.shared_down =
      memory_.UploadTensor(rank.device, data_.shared_down, 0, shared, "shared down");
}

void DeviceLayer::AllocateOutputs(int index) {
  Rank& rank = ranks_[index];
  const ForwardLayerShape& shape = rank.shape;
  ForwardArguments& arguments = rank.arguments;
  const auto rows = [&](int64_t count, int64_t width, const char* name) {
    return memory_.Output<BFloat16>(rank.device, count * width, name);
  };
  const int64_t ring = rank.config.ring_rows(), tokens = shape.max_tokens;
  arguments.tokens.out = rows(tokens, shape.hidden, "out");
  arguments.context.ring_x = rows(ring, shape.hidden, "ring x");
  arguments.context.ring_gate = rows(ring, shape.intermediate, "ring gate");
  arguments.context.ring_up = rows(ring, shape.intermediate, "ring up");
  arguments.context.shared_gate = rows(tokens, shape.shared_intermediate, "shared gate");
  arguments.context.shared_up = rows(tokens, shape.shared_intermediate, "shared up");
  BFloat16* routes = rows(tokens * shape.topk, shape.hidden, "routes");
  arguments.peers.routes_of_rank[index] = routes;
  arguments.peers.rank = index;
  arguments.peers.x_of_rank[index] = arguments.tokens.x;

  const ForwardScratchLayout layout(shape, rank.config);
  rank.scratch = memory_.Allocate(rank.device, static_cast<int64_t>(layout.bytes()), "scratch");
  rank.scratch_bytes = layout.bytes();
  rank.poison_begin = layout.state_bytes();
  MustSucceed(runtime::Fill(rank.scratch, 0, layout.state_bytes()));
  arguments.scratch = layout.At(rank.scratch);
  const auto flag_bytes = static_cast<int64_t>(RankMeeting::FlagBytes(shape.ep_size));
  arguments.peers.flags_of_rank[index] =
      static_cast<uint64_t*>(memory_.AllocateZeroed(rank.device, flag_bytes, "flags"));
  arguments.record = memory_.AllocateMapped<DeviceWaitRecord>("wait_record");
  arguments.timeout_ns = options_.timeout_ns;
  const float limit = data_.spec.swiglu_limit;
  arguments.swiglu_limit = limit > 0 ? limit : INFINITY;
  StatusOr<void*> stream = runtime::CreateStream(rank.device);
  MOK_CHECK(stream.ok()) << stream.status();
  // Ranks that share a device follow each other.
  rank.stream = options_.own_devices || index == 0 ? stream.value() : ranks_[0].stream;
}

void DeviceLayer::UploadSchedule(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  std::vector<int32_t> ids(data_.topk_idx.begin(), data_.topk_idx.end());
  std::vector<RankRoutes> routes;
  for (int source = 0; source < num_ranks(); ++source) {
    const int64_t first =
        std::accumulate(spec.tokens.begin(), spec.tokens.begin() + source, int64_t{0});
    routes.push_back({ids.data() + first * spec.topk, spec.tokens[source]});
  }
  ExpertPartition partition;
  partition.begin.push_back(0);
  for (const int32_t count : spec.experts)
    partition.begin.push_back(partition.begin.back() + count);
  StatusOr<RoutingTable> built = BuildRoutingTable(routes, partition, index, spec.topk);
  MOK_CHECK(built.ok()) << built.status();
  const RoutingTable& table = built.value();
  rank.num_rows = table.num_valid_rows();

  const int64_t capacity = std::max<int64_t>(table.num_rows(), kRowBlock);
  const DeviceScheduleLayout layout({capacity, table.num_local_experts,
                                     rank.config.macrobatch_blocks, num_ranks(),
                                     rank.shape.max_tokens, spec.topk});
  std::vector<std::byte> host(static_cast<size_t>(layout.bytes()));
  const DeviceSchedule schedule = layout.At(host.data());
  *schedule.result = {table.num_row_blocks(), spec.num_tokens(), 0};
  std::copy(table.source_rank.begin(), table.source_rank.end(), schedule.source_rank);
  std::copy(table.source_route.begin(), table.source_route.end(), schedule.source_route);
  std::copy(table.expert_block_begin.begin(), table.expert_block_begin.end(),
            schedule.expert_block_begin);
  std::copy(table.expert_rows.begin(), table.expert_rows.end(), schedule.expert_rows);
  std::copy(table.block_expert.begin(), table.block_expert.end(), schedule.block_expert);
  for (int64_t row = table.num_rows() - 1; schedule.first_rows.of_token != nullptr && row >= 0;
       --row) {
    const int64_t source = table.source_rank[row], token = table.source_route[row] / spec.topk;
    const int64_t entry = source * schedule.first_rows.max_tokens + token;
    if (source >= 0) schedule.first_rows.of_token[entry] = static_cast<int32_t>(row);
  }
  RingPlan ring;
  ring.num_row_blocks = table.num_row_blocks();
  ring.macrobatch_blocks = rank.config.macrobatch_blocks;
  BuildPieceTables(ring, table.view(), schedule.pieces);
  rank.arguments.schedule = layout.At(
      memory_.Upload(rank.device, host.data(), static_cast<int64_t>(host.size()), "schedule"));
}

void DeviceLayer::PrepareDeviceSchedule() {
  std::vector<ScheduleRank> schedule_ranks;
  for (int index = 0; index < num_ranks(); ++index) {
    const Rank& rank = ranks_[index];
    const ForwardArguments::Tokens& tokens = rank.arguments.tokens;
    schedule_ranks.push_back({rank.device, rank.stream, tokens.expert_ids, tokens.id_bytes,
                              tokens.num_tokens, rank.shape.num_local_experts,
                              rank.config.macrobatch_blocks});
  }
  schedules_ =
      std::make_unique<ScheduleRanksOnDevice>(schedule_ranks, data_.spec.topk, options_.timeout_ns);
  for (int index = 0; index < num_ranks(); ++index) {
    ranks_[index].arguments.schedule = schedules_->schedule(index);
  }
}

void DeviceLayer::Connect(int index) {
  Rank& rank = ranks_[index];
  for (int peer = 0; peer < num_ranks(); ++peer) {
    MustSucceed(runtime::EnablePeerAccess(rank.device, ranks_[peer].device));
    const ForwardArguments::Peers& other = ranks_[peer].arguments.peers;
    rank.arguments.peers.x_of_rank[peer] = other.x_of_rank[peer];
    rank.arguments.peers.routes_of_rank[peer] = other.routes_of_rank[peer];
    rank.arguments.peers.flags_of_rank[peer] = other.flags_of_rank[peer];
  }
  StatusOr<ForwardParams> params =
      MakeForwardParams(rank.shape, rank.config, kernel_of_(rank.config.order), rank.arguments);
  MOK_CHECK(params.ok()) << params.status();
  rank.params = params.value();
}

void DeviceLayer::Poison() {
  if (trace_ != nullptr) trace_->Clear();
  memory_.Poison();
  for (const Rank& rank : ranks_) {
    MustSucceed(runtime::Fill(static_cast<std::byte*>(rank.scratch) + rank.poison_begin, 0xFF,
                              rank.scratch_bytes - rank.poison_begin));
  }
}

Status DeviceLayer::Launch(int index, PassMode mode, const ForwardKernelInfo& kernel) {
  const Rank& rank = ranks_[index];
  return LaunchForward(kernel, rank.params,
                       {mode, rank.config.num_blocks, rank.device, rank.stream});
}

Status DeviceLayer::Launch(int index, PassMode mode) {
  return Launch(index, mode, kernel_of_(ranks_[index].config.order));
}

Status DeviceLayer::LaunchSchedules() const {
  if (schedules_ == nullptr) return OkStatus();
  const bool together = ranks_meet();
  for (const ScheduleSteps steps : {ScheduleSteps::kStage, ScheduleSteps::kBuild}) {
    if (together && steps == ScheduleSteps::kBuild) continue;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      MOK_RETURN_IF_ERROR(schedules_->Launch(rank, together ? ScheduleSteps::kAll : steps));
    }
  }
  return OkStatus();
}

Status DeviceLayer::LaunchAll() {
  MOK_RETURN_IF_ERROR(LaunchSchedules());
  if (ranks_meet()) {
    for (int rank = 0; rank < num_ranks(); ++rank) {
      MOK_RETURN_IF_ERROR(Launch(rank, PassMode::kWhole));
    }
    return OkStatus();
  }
  for (const PassMode mode : {PassMode::kExchangeAndCompute, PassMode::kReduceOnly}) {
    for (int rank = 0; rank < num_ranks(); ++rank) MOK_RETURN_IF_ERROR(Launch(rank, mode));
  }
  return OkStatus();
}

Status DeviceLayer::LaunchAll(const ForwardKernelInfo& kernel) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    MOK_RETURN_IF_ERROR(Launch(rank, PassMode::kWhole, kernel));
  }
  return OkStatus();
}

Status DeviceLayer::CheckRecords() const {
  for (const Rank& rank : ranks_) {
    MOK_RETURN_IF_ERROR(CheckPassRecord(*rank.arguments.record));
  }
  return schedules_ != nullptr ? schedules_->Check() : OkStatus();
}

Tensor DeviceLayer::Out() const {
  Tensor all(DType::kBf16, 0);
  for (int index = 0; index < num_ranks(); ++index) {
    all.Append(Download(ranks_[index].arguments.tokens.out,
                        data_.spec.tokens[index] * data_.spec.hidden, DType::kBf16));
  }
  return all;
}

double DeviceLayer::flops() const {
  double most = 0;
  for (const Rank& rank : ranks_) {
    const auto hidden = static_cast<double>(rank.shape.hidden);
    const double routed = static_cast<double>(rank.num_rows * rank.shape.intermediate);
    const double shared =
        static_cast<double>(rank.arguments.tokens.num_tokens * rank.shape.shared_intermediate);
    most = std::max(most, 6 * hidden * (routed + shared));
  }
  return most;
}

}  // namespace mok::testing
