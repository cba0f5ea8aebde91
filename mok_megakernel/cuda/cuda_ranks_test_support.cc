#include "mok_megakernel/cuda/cuda_ranks_test_support.h"

#include <algorithm>
#include <numeric>

#include "mok_core/device/runtime.h"
#include "mok_megakernel/sm90/testing/device_memory.h"

namespace mok::testing {
namespace {

constexpr int64_t kElement = sizeof(BFloat16);

void MustSucceed(int32_t code) { MOK_CHECK(code == MOK_OK) << mok_last_error(); }

template <class Struct>
void SetSize(Struct& value) {
  value.struct_size = sizeof(value);
}

}  // namespace

LayerSpec SharedLayer(int num_ranks) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 24;
  spec.shared_scale = true;
  if (num_ranks == 1) {
    spec.tokens = {29};
    spec.experts = {4};
  } else if (num_ranks == 3) {
    spec.tokens = {9, 20, 4};
    spec.experts = {2, 1, 1};
  }
  return spec;
}

// Null for no bytes, as frameworks have it for empty tensors.
void* CudaRanks::Allocate(int device, int64_t bytes, const char* name) {
  if (bytes == 0) return nullptr;
  StatusOr<void*> memory = runtime::AllocateDevice(device, static_cast<size_t>(bytes), name);
  MOK_CHECK(memory.ok()) << memory.status();
  return memory.value();
}

void* CudaRanks::Upload(int device, const void* values, int64_t bytes, const char* name) {
  void* memory = Allocate(device, bytes, name);
  if (bytes > 0) {
    MustSucceed(runtime::CopyToDevice(memory, values, static_cast<size_t>(bytes)));
  }
  return memory;
}

void* CudaRanks::AllocatePoisoned(Rank& rank, int64_t bytes, const char* name) {
  void* memory = Allocate(rank.device, bytes, name);
  if (bytes > 0) rank.poisoned.push_back({memory, bytes});
  return memory;
}

CudaRanks::CudaRanks(const LayerData& data, const CudaRanksOptions& options)
    : data_(data), options_(options), ranks_(data.spec.tokens.size()) {
  const int num_ranks = data.spec.ep_size();
  for (int index = 0; index < num_ranks; ++index) MakeMemory(index);
  std::vector<void*> heaps;
  for (const Rank& rank : ranks_) heaps.push_back(rank.heap);
  for (int index = 0; index < num_ranks; ++index) {
    Rank& rank = ranks_[index];
    for (const Rank& peer : ranks_) {
      MustSucceed(runtime::EnablePeerAccess(rank.device, peer.device));
    }
    MokCudaAddresses addresses{};
    SetSize(addresses);
    addresses.heap_of_rank = heaps.data();
    addresses.state = rank.state;
    addresses.records = rank.records;
    MustSucceed(mok_cuda_workspace_create(&rank.options, &addresses, &rank.workspace));
    MakeLayer(index);
    UploadInputs(index);
    UploadWeights(index);
    MakeOutputs(index);
    MakeGradients(index);
  }
}

CudaRanks::~CudaRanks() {
  for (const Rank& rank : ranks_) mok_cuda_workspace_destroy(rank.workspace);
}

void CudaRanks::MakeMemory(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  rank.device = options_.own_devices ? index : 0;
  StatusOr<void*> stream = runtime::CreateStream(rank.device);
  MOK_CHECK(stream.ok());
  rank.stream = options_.own_devices || index == 0 ? stream.value() : ranks_[0].stream;
  rank.first_token = std::accumulate(spec.tokens.begin(), spec.tokens.begin() + index, int64_t{0});
  SetSize(rank.options);
  rank.options.rank = index;
  rank.options.ep_size = spec.ep_size();
  rank.options.max_tokens = *std::max_element(spec.tokens.begin(), spec.tokens.end());
  rank.options.hidden = static_cast<int32_t>(spec.hidden);
  rank.options.topk = spec.topk;
  rank.options.device = rank.device;
  rank.options.num_sms = options_.num_sms;
  rank.options.timeout_seconds = options_.timeout_seconds;
  if (options_.change_options) options_.change_options(index, rank.options);
  SetSize(rank.memory);
  MustSucceed(mok_cuda_memory(&rank.options, &rank.memory));
  rank.heap = Allocate(rank.device, rank.memory.heap_bytes, "heap");
  MustSucceed(runtime::Fill(rank.heap, 0, static_cast<size_t>(rank.memory.heap_zero_bytes)));
  rank.state = Allocate(rank.device, rank.memory.state_bytes, "state");
  MustSucceed(runtime::Fill(rank.state, 0, static_cast<size_t>(rank.memory.state_bytes)));
  StatusOr<void*> records =
      runtime::AllocateMappedHost(static_cast<size_t>(rank.memory.record_bytes), "records");
  MOK_CHECK(records.ok());
  rank.records = records.value();
}

void CudaRanks::MakeLayer(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  SetSize(rank.layer);
  rank.layer.num_local_experts = spec.experts[index];
  rank.layer.first_expert =
      std::accumulate(spec.experts.begin(), spec.experts.begin() + index, int32_t{0});
  rank.layer.num_experts = spec.num_experts();
  rank.layer.intermediate = static_cast<int32_t>(spec.intermediate);
  rank.layer.shared_intermediate = static_cast<int32_t>(spec.shared_intermediate);
  rank.layer.num_comm_sms = options_.num_comm_sms;
  rank.layer.num_sms = options_.layer_num_sms;
  rank.layer.num_tokens = spec.tokens[index];
  rank.layer.minibatch_rows = options_.minibatch_rows;
  rank.layer.macrobatch_rows = options_.macrobatch_rows;
  SetSize(rank.layer_memory);
  MustSucceed(mok_cuda_layer_memory(rank.workspace, &rank.layer, &rank.layer_memory));
}

void CudaRanks::UploadInputs(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  const int64_t tokens = spec.tokens[index], routes = tokens * spec.topk;
  const int64_t row_bytes = spec.hidden * kElement;
  MokCudaForwardArgs& args = rank.forward;
  SetSize(args);
  const void* x = data_.x.At(rank.first_token * spec.hidden);
  if (options_.x_in_heap) {
    void* staged = static_cast<std::byte*>(rank.heap) + rank.memory.x_offset;
    MustSucceed(runtime::CopyToDevice(staged, x, static_cast<size_t>(tokens * row_bytes)));
    args.layer.x = staged;
  } else {
    args.layer.x = Upload(rank.device, x, tokens * row_bytes, "x");
  }
  args.layer.topk_weight = static_cast<const float*>(
      Upload(rank.device, data_.topk_weight.data() + rank.first_token * spec.topk,
             routes * int64_t{sizeof(float)}, "topk_weight"));
  if (spec.shared_scale) {
    args.layer.shared_scale =
        static_cast<const float*>(Upload(rank.device, data_.shared_scale.data() + rank.first_token,
                                         tokens * int64_t{sizeof(float)}, "shared_scale"));
  }
  args.layer.swiglu_limit = spec.swiglu_limit;
  args.topk_idx = Allocate(rank.device, routes * options_.id_bytes, "topk_idx");
  args.topk_idx_bytes = options_.id_bytes;
  SetSize(rank.schedule);
  rank.schedule.topk_idx = args.topk_idx;
  rank.schedule.topk_idx_bytes = options_.id_bytes;
  if (index + 1 == spec.ep_size()) SetIds(data_.topk_idx);
}

void CudaRanks::SetIds(const std::vector<int64_t>& ids) {
  const int topk = data_.spec.topk;
  for (size_t index = 0; index < ranks_.size(); ++index) {
    const Rank& rank = ranks_[index];
    const int64_t* own = ids.data() + rank.first_token * topk;
    const auto routes = static_cast<size_t>(data_.spec.tokens[index] * topk);
    if (routes == 0) continue;
    void* to = const_cast<void*>(rank.forward.topk_idx);
    if (options_.id_bytes == 8) {
      MustSucceed(runtime::CopyToDevice(to, own, routes * sizeof(int64_t)));
    } else {
      const std::vector<int32_t> narrow(own, own + routes);
      MustSucceed(runtime::CopyToDevice(to, narrow.data(), routes * sizeof(int32_t)));
    }
  }
}

void CudaRanks::UploadWeights(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  const int64_t expert = spec.hidden * spec.intermediate;
  const int64_t first = rank.layer.first_expert * expert;
  const auto upload = [&](const Tensor& tensor, int64_t begin, int64_t count, const char* name) {
    return Upload(rank.device, tensor.At(begin), count * kElement, name);
  };
  MokWeights& routed = rank.forward.layer.routed;
  routed.gate = upload(data_.gate, first, rank.layer.num_local_experts * expert, "gate");
  routed.up = upload(data_.up, first, rank.layer.num_local_experts * expert, "up");
  routed.down = upload(data_.down, first, rank.layer.num_local_experts * expert, "down");
  routed.intermediate = spec.intermediate;
  if (spec.shared_intermediate == 0) return;
  MokWeights& shared = rank.forward.layer.shared;
  const int64_t size = spec.hidden * spec.shared_intermediate;
  shared.gate = upload(data_.shared_gate, 0, size, "shared gate");
  shared.up = upload(data_.shared_up, 0, size, "shared up");
  shared.down = upload(data_.shared_down, 0, size, "shared down");
  shared.intermediate = spec.shared_intermediate;
}

void CudaRanks::MakeOutputs(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  const int64_t tokens = spec.tokens[index];
  // A rank to which no routing can lead a row needs no ring.
  const bool may_have_rows = spec.experts[index] > 0 && rank.options.max_tokens > 0;
  const int64_t ring = may_have_rows ? rank.layer_memory.ring_rows : 0;
  const auto rows = [&](int64_t count, int64_t width, const char* name) {
    return AllocatePoisoned(rank, count * width * kElement, name);
  };
  rank.forward.out = rows(tokens, spec.hidden, "out");
  MokContext& context = rank.forward.context;
  context.ring_rows = ring;
  context.ring_x = rows(ring, spec.hidden, "ring x");
  context.ring_gate = rows(ring, spec.intermediate, "ring gate");
  context.ring_up = rows(ring, spec.intermediate, "ring up");
  context.shared_gate = rows(tokens, spec.shared_intermediate, "shared gate context");
  context.shared_up = rows(tokens, spec.shared_intermediate, "shared up context");
  rank.forward.scratch =
      AllocatePoisoned(rank, rank.layer_memory.forward_scratch_bytes, "forward scratch");
  rank.schedule.scratch =
      AllocatePoisoned(rank, rank.layer_memory.schedule_scratch_bytes, "schedule scratch");
  SetSchedule(index, NewSchedule(index));
  rank.schedule.stream = rank.forward.stream = rank.stream;
  const int64_t zero = rank.memory.heap_zero_bytes;
  const int64_t end = options_.x_in_heap ? rank.memory.x_offset : rank.memory.heap_bytes;
  rank.poisoned.push_back({static_cast<std::byte*>(rank.heap) + zero, end - zero});
}

void CudaRanks::MakeGradients(int index) {
  const LayerSpec& spec = data_.spec;
  Rank& rank = ranks_[index];
  const int64_t tokens = spec.tokens[index];
  MokCudaBackwardArgs& args = rank.backward;
  SetSize(args);
  args.layer = rank.forward.layer;
  args.context = rank.forward.context;
  args.topk_idx = rank.forward.topk_idx;
  args.topk_idx_bytes = rank.forward.topk_idx_bytes;
  args.stream = rank.stream;
  args.scratch =
      AllocatePoisoned(rank, rank.layer_memory.backward_scratch_bytes, "backward scratch");
  args.d_out = Upload(rank.device, data_.d_out.At(rank.first_token * spec.hidden),
                      tokens * spec.hidden * kElement, "d_out");
  args.kept_macrobatches = options_.kept_macrobatches;
  constexpr int64_t kFloat = sizeof(float);
  args.d_x = AllocatePoisoned(rank, tokens * spec.hidden * kElement, "d_x");
  args.d_topk_weight =
      static_cast<float*>(AllocatePoisoned(rank, tokens * spec.topk * kFloat, "d_topk_weight"));
  if (spec.shared_scale) {
    args.d_shared_scale =
        static_cast<float*>(AllocatePoisoned(rank, tokens * kFloat, "d_shared_scale"));
  }
  const auto fill = [&](MokWeightGrads& grads, int64_t count) {
    Tensor initial(options_.grad_dtype, count);
    for (int64_t i = 0; i < count; ++i) initial.Set(i, options_.initial_grad);
    const auto bytes = static_cast<int64_t>(initial.bytes.size());
    for (void** grad : {&grads.gate, &grads.up, &grads.down}) {
      *grad = options_.accumulate ? Upload(rank.device, initial.At(0), bytes, "gradient")
                                  : AllocatePoisoned(rank, bytes, "gradient");
    }
    grads.dtype = options_.grad_dtype == DType::kFp32 ? MOK_FP32 : MOK_BF16;
    grads.accumulate = options_.accumulate ? 1 : 0;
  };
  fill(args.d_routed, spec.experts[index] * spec.hidden * spec.intermediate);
  if (spec.shared_intermediate > 0) fill(args.d_shared, spec.hidden * spec.shared_intermediate);
}

void CudaRanks::Poison() {
  for (const Rank& rank : ranks_) {
    for (const Rank::Region& region : rank.poisoned) {
      MustSucceed(runtime::Fill(region.begin, 0xFF, static_cast<size_t>(region.bytes)));
    }
  }
}

void* CudaRanks::NewSchedule(int index) {
  Rank& rank = ranks_[index];
  return AllocatePoisoned(rank, rank.layer_memory.schedule_bytes, "schedule");
}

void CudaRanks::SetSchedule(int index, void* schedule) {
  Rank& rank = ranks_[index];
  rank.schedule.schedule = schedule;
  rank.forward.schedule = rank.backward.schedule = schedule;
}

int32_t CudaRanks::BuildSchedule(int index, int32_t part) {
  Rank& rank = ranks_[index];
  rank.schedule.part = part;
  return mok_cuda_schedule_build(rank.workspace, &rank.layer, &rank.schedule);
}

int32_t CudaRanks::Forward(int index, int32_t part) {
  Rank& rank = ranks_[index];
  rank.forward.part = part;
  return mok_cuda_forward(rank.workspace, &rank.layer, &rank.forward);
}

int32_t CudaRanks::ReportError(int index, int32_t code, int32_t place) {
  Rank& rank = ranks_[index];
  MokCudaErrorArgs args{};
  SetSize(args);
  args.code = code;
  args.place = place;
  args.scratch = Allocate(rank.device, rank.memory.error_scratch_bytes, "error scratch");
  args.stream = rank.stream;
  return mok_cuda_report_error(rank.workspace, &args);
}

int32_t CudaRanks::Backward(int index, int32_t part) {
  Rank& rank = ranks_[index];
  rank.backward.part = part;
  return mok_cuda_backward(rank.workspace, &rank.layer, &rank.backward);
}

int32_t CudaRanks::Check(int index) {
  return mok_cuda_check(ranks_[index].workspace, ranks_[index].stream);
}

void CudaRanks::QueueParts(const std::vector<int32_t>& parts,
                           int32_t (CudaRanks::*call)(int, int32_t)) {
  const int num_ranks = data_.spec.ep_size();
  const bool whole = options_.own_devices || num_ranks == 1;
  for (const int32_t part : whole ? std::vector<int32_t>{MOK_CUDA_WHOLE} : parts) {
    for (int rank = 0; rank < num_ranks; ++rank) MustSucceed((this->*call)(rank, part));
  }
}

void CudaRanks::QueueAll() {
  QueueParts({MOK_CUDA_STAGE, MOK_CUDA_BUILD}, &CudaRanks::BuildSchedule);
  QueueParts({MOK_CUDA_STAGE, MOK_CUDA_EXCHANGE, MOK_CUDA_REDUCE}, &CudaRanks::Forward);
}

void CudaRanks::QueueBackward() {
  QueueParts({MOK_CUDA_STAGE, MOK_CUDA_EXCHANGE, MOK_CUDA_REDUCE}, &CudaRanks::Backward);
}

Tensor CudaRanks::Out() const {
  Tensor all(DType::kBf16, 0);
  for (size_t index = 0; index < ranks_.size(); ++index) {
    all.Append(Download(ranks_[index].forward.out, data_.spec.tokens[index] * data_.spec.hidden,
                        DType::kBf16));
  }
  return all;
}

LayerResult CudaRanks::Result() const {
  std::vector<DeviceGradients> ranks;
  for (const Rank& rank : ranks_) {
    const MokCudaBackwardArgs& args = rank.backward;
    ranks.push_back({args.d_x,
                     args.d_topk_weight,
                     args.d_shared_scale,
                     {args.d_routed.gate, args.d_routed.up, args.d_routed.down},
                     {args.d_shared.gate, args.d_shared.up, args.d_shared.down},
                     options_.grad_dtype});
  }
  LayerResult result = DownloadGradients(data_.spec, ranks);
  result.out = Out();
  return result;
}

}  // namespace mok::testing
