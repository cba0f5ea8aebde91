#include "mok_megakernel/sm90/testing/device_backward.h"

#include <algorithm>

#include "mok_core/device/runtime.h"

namespace mok::testing {
namespace {

void MustSucceed(const Status& status) { MOK_CHECK(status.ok()) << status; }

Tensor Download(const void* memory, int64_t size, DType dtype) {
  Tensor tensor(dtype, size);
  if (size > 0) MustSucceed(runtime::CopyToHost(tensor.At(0), memory, tensor.bytes.size()));
  return tensor;
}

}  // namespace

template <class T>
T* DeviceBackward::Allocate(int device, int64_t count, const char* name) {
  const size_t bytes = std::max<size_t>(static_cast<size_t>(count) * sizeof(T), 256);
  StatusOr<void*> memory = runtime::AllocateDevice(device, bytes, name);
  MOK_CHECK(memory.ok()) << memory.status();
  allocations_.push_back(memory.value());
  return static_cast<T*>(memory.value());
}

template <class T>
T* DeviceBackward::Output(int device, int64_t count, const char* name) {
  T* memory = Allocate<T>(device, count, name);
  if (count > 0) poisoned_.emplace_back(memory, static_cast<size_t>(count) * sizeof(T));
  return memory;
}

void* DeviceBackward::Gradient(int device, int64_t count, const char* name) {
  if (!options_.has_weight_grads) return nullptr;
  if (!options_.accumulate) {
    return Output<std::byte>(device, count * ElementBytes(options_.grad_dtype), name);
  }
  void* memory = Allocate<std::byte>(device, count * ElementBytes(options_.grad_dtype), name);
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

DeviceBackward::~DeviceBackward() {
  for (void* allocation : allocations_) MustSucceed(runtime::Free(allocation));
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
  auto* d_out = Allocate<BFloat16>(from.device, elements, "d_out");
  if (count > 0) {
    MustSucceed(runtime::CopyToDevice(d_out, data.d_out.At(from.first_token * spec.hidden),
                                      static_cast<size_t>(elements) * sizeof(BFloat16)));
  }
  tokens.d_out = d_out;
  tokens.expert_ids = from.arguments.tokens.expert_ids;
  tokens.id_bytes = from.arguments.tokens.id_bytes;
  tokens.shared_scale = from.arguments.tokens.shared_scale;
  tokens.d_x = Output<BFloat16>(from.device, elements, "d_x");
  tokens.d_topk_weight = Output<float>(from.device, count * spec.topk, "d_topk_weight");
  if (tokens.shared_scale != nullptr) {
    tokens.d_shared_scale = Output<float>(from.device, count, "d_shared_scale");
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
      Allocate<std::byte>(from.device, static_cast<int64_t>(layout.bytes()), "backward scratch");
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
      Output<BFloat16>(from.device, routes * from.shape.hidden, "d_x of routes");
  peers.d_router_of_rank[index] = Output<float>(from.device, routes, "d_router of routes");
  if (options_.own_state) {
    const size_t flag_bytes = RankMeeting::FlagBytes(from.shape.ep_size);
    void* flags = Allocate<std::byte>(from.device, static_cast<int64_t>(flag_bytes), "flags");
    MustSucceed(runtime::Fill(flags, 0, flag_bytes));
    peers.flags_of_rank[index] = static_cast<uint64_t*>(flags);
  } else {
    static_cast<PassMemory&>(to.scratch) = from.arguments.scratch;
    peers.flags_of_rank[index] = from.arguments.peers.flags_of_rank[index];
  }
  StatusOr<void*> record = runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record");
  MOK_CHECK(record.ok()) << record.status();
  allocations_.push_back(record.value());
  to.record = static_cast<DeviceWaitRecord*>(record.value());
}

void DeviceBackward::FillGateUpGrads(int index) {
  const DeviceLayer::Rank& from = forward_.rank(index);
  BackwardArguments::GateUpGrads& to = ranks_[index].arguments.d_gate_up;
  const int64_t routed = from.config.ring_rows() * from.shape.intermediate;
  const int64_t shared = from.shape.max_tokens * from.shape.shared_intermediate;
  to.gate = Output<BFloat16>(from.device, routed, "d_gate");
  to.up = Output<BFloat16>(from.device, routed, "d_up");
  to.shared_gate = Output<BFloat16>(from.device, shared, "shared d_gate");
  to.shared_up = Output<BFloat16>(from.device, shared, "shared d_up");
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
  for (const auto& [memory, bytes] : poisoned_) MustSucceed(runtime::Fill(memory, 0xFF, bytes));
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
  const LayerSpec& spec = forward_.data().spec;
  LayerResult result;
  result.out = forward_.Out();
  result.d_x = Tensor(DType::kBf16, 0);
  result.d_gate = result.d_up = result.d_down = Tensor(options_.grad_dtype, 0);
  for (int index = 0; index < forward_.num_ranks(); ++index) {
    const BackwardArguments& from = ranks_[index].arguments;
    const int64_t tokens = spec.tokens[index];
    result.d_x.Append(Download(from.tokens.d_x, tokens * spec.hidden, DType::kBf16));
    result.d_topk_weight.Append(
        Download(from.tokens.d_topk_weight, tokens * spec.topk, DType::kFp32));
    if (spec.shared_scale) {
      result.d_shared_scale.Append(Download(from.tokens.d_shared_scale, tokens, DType::kFp32));
    }
    if (!options_.has_weight_grads) continue;
    const int64_t routed = spec.experts[index] * spec.hidden * spec.intermediate;
    result.d_gate.Append(Download(from.d_routed.gate, routed, options_.grad_dtype));
    result.d_up.Append(Download(from.d_routed.up, routed, options_.grad_dtype));
    result.d_down.Append(Download(from.d_routed.down, routed, options_.grad_dtype));
    const int64_t shared = spec.hidden * spec.shared_intermediate;
    if (shared == 0) continue;
    result.d_shared_gate.push_back(Download(from.d_shared.gate, shared, options_.grad_dtype));
    result.d_shared_up.push_back(Download(from.d_shared.up, shared, options_.grad_dtype));
    result.d_shared_down.push_back(Download(from.d_shared.down, shared, options_.grad_dtype));
  }
  return result;
}

}  // namespace mok::testing
