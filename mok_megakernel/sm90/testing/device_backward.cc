#include "mok_megakernel/sm90/testing/device_backward.h"

#include "mok_core/device/runtime.h"

namespace mok::testing {
void* DeviceBackward::Gradient(int device, int64_t count, const char* name) {
  if (!options_.has_weight_grads) return nullptr;
  const int64_t bytes = count * ElementBytes(options_.grad_dtype);
  if (!options_.accumulate) return memory_.Output<std::byte>(device, bytes, name);
  void* memory = memory_.Allocate(device, bytes, name);
  gradients_.emplace_back(memory, count);
  return memory;
}

DeviceBackward::DeviceBackward(const DeviceLayer& forward, const DeviceBackwardOptions& options,
                               KernelOf kernel_of)
    : forward_(forward),
      options_(options),
      kernel_of_(kernel_of),
      ranks_(static_cast<size_t>(forward.num_ranks())) {
  for (int rank = 0; rank < forward.num_ranks(); ++rank) {
    FillTokens(rank);
    FillGradients(rank);
    FillMemory(rank);
  }
  for (int rank = 0; rank < forward.num_ranks(); ++rank) Connect(rank);
  ResetGradients();
  if (options.trace_capacity == 0) return;
  const DeviceLayer::Rank& first = forward.rank(0);
  trace_ =
      std::make_unique<TraceBuffer>(first.device, first.config.num_blocks, options.trace_capacity);
  ranks_[0].params.trace = trace_->params();
}

PassKernelInfo DeviceBackward::KernelOfRank(int rank) const {
  return kernel_of_(forward_.config(rank).order);
}

void DeviceBackward::FillTokens(int index) {
  const DeviceLayer::Rank& from = forward_.rank(index);
  const LayerData& data = forward_.data();
  const LayerSpec& spec = data.spec;
  BackwardArguments& to = ranks_[index].arguments;
  BackwardArguments::Tokens& tokens = to.tokens;
  const int64_t count = spec.tokens[index], elements = count * spec.hidden;
  tokens.num_tokens = count;
  tokens.x = from.arguments.tokens.x;
  tokens.d_out = memory_.UploadTensor(from.device, data.d_out, from.first_token * spec.hidden,
                                      elements, "d_out");
  tokens.expert_ids = from.arguments.tokens.expert_ids;
  tokens.id_bytes = from.arguments.tokens.id_bytes;
  tokens.shared_scale = from.arguments.tokens.shared_scale;
  tokens.d_x = memory_.Output<BFloat16>(from.device, elements, "d_x");
  tokens.d_topk_weight = memory_.Output<float>(from.device, count * spec.topk, "d_topk_weight");
  if (tokens.shared_scale != nullptr) {
    tokens.d_shared_scale = memory_.Output<float>(from.device, count, "d_shared_scale");
  }
  to.weights = from.arguments.weights;
  to.context = from.arguments.context;
  to.kept_macrobatches = options_.kept_macrobatches;
  to.schedule = from.arguments.schedule;
  to.swiglu_limit = from.arguments.swiglu_limit;
  to.timeout_ns = from.arguments.timeout_ns;
}

void DeviceBackward::FillGradients(int index) {
  const DeviceLayer::Rank& from = forward_.rank(index);
  const LayerSpec& spec = forward_.data().spec;
  BackwardArguments& to = ranks_[index].arguments;
  const auto fill = [&](BackwardArguments::WeightGrads& grads, int64_t count) {
    grads.gate = Gradient(from.device, count, "gate gradient");
    grads.up = Gradient(from.device, count, "up gradient");
    grads.down = Gradient(from.device, count, "down gradient");
    grads.dtype = options_.grad_dtype;
    grads.accumulate = options_.accumulate;
  };
  fill(to.d_routed, spec.experts[index] * spec.hidden * spec.intermediate);
  if (spec.shared_intermediate > 0) fill(to.d_shared, spec.hidden * spec.shared_intermediate);
}

void DeviceBackward::FillMemory(int index) {
  const DeviceLayer::Rank& from = forward_.rank(index);
  Rank& rank = ranks_[index];
  BackwardArguments& to = rank.arguments;
  const BackwardScratchLayout layout(from.shape, from.config, KernelOfRank(index));
  rank.scratch_bytes = layout.bytes();
  rank.poison_begin = layout.state_bytes();
  rank.scratch =
      memory_.Allocate(from.device, static_cast<int64_t>(layout.bytes()), "backward scratch");
  MustSucceed(runtime::Fill(rank.scratch, 0, layout.state_bytes()));
  to.scratch = layout.At(rank.scratch);
  if (options_.keeps_context) FillGateUpGrads(index);
  const int64_t routes = from.shape.max_tokens * from.shape.topk;
  BackwardArguments::Peers& peers = to.peers;
  peers.rank = index;
  peers.x_of_rank[index] = to.tokens.x;
  peers.d_out_of_rank[index] = to.tokens.d_out;
  peers.topk_weight_of_rank[index] = from.arguments.tokens.topk_weight;
  peers.routes_of_rank[index] =
      memory_.Output<BFloat16>(from.device, routes * from.shape.hidden, "d_x of routes");
  peers.d_router_of_rank[index] = memory_.Output<float>(from.device, routes, "d_router of routes");
  if (options_.own_state) {
    const auto flag_bytes = static_cast<int64_t>(RankMeeting::FlagBytes(from.shape.ep_size));
    peers.flags_of_rank[index] =
        static_cast<uint64_t*>(memory_.AllocateZeroed(from.device, flag_bytes, "flags"));
  } else {
    static_cast<PassMemory&>(to.scratch) = from.arguments.scratch;
    peers.flags_of_rank[index] = from.arguments.peers.flags_of_rank[index];
  }
  to.record = memory_.AllocateMapped<DeviceWaitRecord>("wait_record");
}

void DeviceBackward::FillGateUpGrads(int index) {
  const DeviceLayer::Rank& from = forward_.rank(index);
  BackwardArguments::GateUpGrads& to = ranks_[index].arguments.d_gate_up;
  const int64_t routed = from.config.ring_rows() * from.shape.intermediate;
  const int64_t shared = from.shape.max_tokens * from.shape.shared_intermediate;
  to.gate = memory_.Output<BFloat16>(from.device, routed, "d_gate");
  to.up = memory_.Output<BFloat16>(from.device, routed, "d_up");
  to.shared_gate = memory_.Output<BFloat16>(from.device, shared, "shared d_gate");
  to.shared_up = memory_.Output<BFloat16>(from.device, shared, "shared d_up");
}

void DeviceBackward::Connect(int index) {
  Rank& rank = ranks_[index];
  BackwardArguments::Peers& peers = rank.arguments.peers;
  for (int peer = 0; peer < forward_.num_ranks(); ++peer) {
    const BackwardArguments::Peers& other = ranks_[peer].arguments.peers;
    peers.x_of_rank[peer] = other.x_of_rank[peer];
    peers.d_out_of_rank[peer] = other.d_out_of_rank[peer];
    peers.topk_weight_of_rank[peer] = other.topk_weight_of_rank[peer];
    peers.routes_of_rank[peer] = other.routes_of_rank[peer];
    peers.d_router_of_rank[peer] = other.d_router_of_rank[peer];
    peers.flags_of_rank[peer] = other.flags_of_rank[peer];
  }
  const DeviceLayer::Rank& from = forward_.rank(index);
  StatusOr<BackwardParams> params =
      MakeBackwardParams(from.shape, from.config, KernelOfRank(index), rank.arguments);
  MOK_CHECK(params.ok()) << params.status();
  rank.params = params.value();
}

void DeviceBackward::ResetGradients() {
  for (const auto& [memory, count] : gradients_) {
    if (count == 0) continue;
    Tensor initial(options_.grad_dtype, count);
    for (int64_t i = 0; i < count; ++i) initial.Set(i, options_.initial_grad);
    MustSucceed(runtime::CopyToDevice(memory, initial.At(0), initial.bytes.size()));
  }
}

void DeviceBackward::Poison() {
  if (trace_ != nullptr) trace_->Clear();
  memory_.Poison();
  ResetGradients();
  for (int index = 0; index < forward_.num_ranks(); ++index) {
    const Rank& rank = ranks_[index];
    MustSucceed(runtime::Fill(static_cast<std::byte*>(rank.scratch) + rank.poison_begin, 0xFF,
                              rank.scratch_bytes - rank.poison_begin));
    if (options_.kept_macrobatches > 0) continue;
    const DeviceLayer::Rank& from = forward_.rank(index);
    const ForwardArguments::Context& context = rank.arguments.context;
    const auto poison = [](BFloat16* matrix, int64_t elements) {
      const size_t bytes = static_cast<size_t>(elements) * sizeof(BFloat16);
      if (bytes > 0) MustSucceed(runtime::Fill(matrix, 0xFF, bytes));
    };
    const int64_t ring = from.config.ring_rows();
    poison(context.ring_x, ring * from.shape.hidden);
    poison(context.ring_gate, ring * from.shape.intermediate);
    poison(context.ring_up, ring * from.shape.intermediate);
    const int64_t tokens = rank.arguments.tokens.num_tokens;
    poison(context.shared_gate, tokens * from.shape.shared_intermediate);
    poison(context.shared_up, tokens * from.shape.shared_intermediate);
  }
}

Status DeviceBackward::Launch(int index, PassMode mode, const PassKernelInfo& kernel) {
  const DeviceLayer::Rank& from = forward_.rank(index);
  return LaunchBackward(kernel, ranks_[index].params,
                        {mode, from.config.num_blocks, from.device, from.stream});
}

Status DeviceBackward::LaunchAll() {
  const auto launch = [&](PassMode mode) {
    for (int rank = 0; rank < forward_.num_ranks(); ++rank) {
      MOK_RETURN_IF_ERROR(Launch(rank, mode, KernelOfRank(rank)));
    }
    return OkStatus();
  };
  if (forward_.ranks_meet()) return launch(PassMode::kWhole);
  MOK_RETURN_IF_ERROR(launch(PassMode::kExchangeAndCompute));
  return launch(PassMode::kReduceOnly);
}

Status DeviceBackward::LaunchAll(const PassKernelInfo& kernel) {
  for (int rank = 0; rank < forward_.num_ranks(); ++rank) {
    MOK_RETURN_IF_ERROR(Launch(rank, PassMode::kWhole, kernel));
  }
  return OkStatus();
}

Status DeviceBackward::CheckRecords() const {
  for (const Rank& rank : ranks_) MOK_RETURN_IF_ERROR(CheckPassRecord(*rank.arguments.record));
  return OkStatus();
}

LayerResult DeviceBackward::Result() const {
  std::vector<DeviceGradients> ranks;
  for (const Rank& rank : ranks_) {
    const BackwardArguments::Tokens& tokens = rank.arguments.tokens;
    const auto weights = [](const BackwardArguments::WeightGrads& grads) {
      return DeviceGradients::Weights{grads.gate, grads.up, grads.down};
    };
    ranks.push_back({tokens.d_x, tokens.d_topk_weight, tokens.d_shared_scale,
                     weights(rank.arguments.d_routed), weights(rank.arguments.d_shared),
                     options_.grad_dtype});
  }
  LayerResult result = DownloadGradients(forward_.data().spec, ranks);
  result.out = forward_.Out();
  return result;
}

}  // namespace mok::testing
