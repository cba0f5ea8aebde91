#include "mok_megakernel/sm90/forward_launch.h"

#include <algorithm>

#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_gemm/sm90/tensor_maps.h"

namespace mok {
namespace {

constexpr uint32_t kThreads = 384;
constexpr size_t kAlignment = 256;
constexpr int64_t kCounterFamiliesPerSlot = 4;  // of the forward
constexpr int64_t kCountersPerTokenBlock = 4;
constexpr int64_t kCountersPerPass = 3;

Status Require(const char* name, const void* pointer) {
  if (pointer == nullptr) return InvalidArgumentError(name, " is null");
  if (reinterpret_cast<uintptr_t>(pointer) % 16 == 0) return OkStatus();
  return InvalidArgumentError(name, " at ", pointer, " is not aligned to 16 bytes");
}

// A map of rows that the kernel loads, or of one row of `spare` memory if there is none.
StatusOr<TensorMap> RowsMap(const BFloat16* base, int64_t rows, int64_t columns,
                            const BFloat16* spare) {
  MOK_ASSIGN_OR_RETURN(
      const runtime::TensorMapSpec spec,
      ActivationMapSpec(rows > 0 ? base : spare, std::max<int64_t>(rows, 1), columns, columns));
  return runtime::EncodeTensorMap(spec);
}

class ParamsBuilder {
 public:
  ParamsBuilder(const ForwardLayerShape& shape, const ForwardConfig& config,
                const ForwardKernelInfo& kernel, const ForwardArguments& arguments)
      : shape_(shape), config_(config), kernel_(kernel), arguments_(arguments) {}

  StatusOr<ForwardParams> Build() {
    MOK_RETURN_IF_ERROR(Check());
    FillShape();
    FillTokens();
    MOK_RETURN_IF_ERROR(FillWeights());
    MOK_RETURN_IF_ERROR(FillRing());
    if (has_shared()) MOK_RETURN_IF_ERROR(FillShared());
    FillExchange();
    params_.schedule = arguments_.schedule;
    const DeviceWaitParams wait = {arguments_.record, arguments_.scratch.abort_flag,
                                   arguments_.timeout_ns, arguments_.peers.rank};
    params_.signals = {arguments_.scratch.counters, arguments_.scratch.state, wait, wait};
    params_.signals.wait.timeout_ns *= 2;
    return params_;
  }

 private:
  bool has_shared() const { return shape_.shared_intermediate > 0; }

  Status Check() const {
    const ForwardArguments::Tokens& tokens = arguments_.tokens;
    if (tokens.num_tokens < 0 || tokens.num_tokens > shape_.max_tokens) {
      return InvalidArgumentError("num_tokens is ", tokens.num_tokens, ", expected 0 to ",
                                  shape_.max_tokens);
    }
    if (tokens.num_tokens > 0) {
      MOK_RETURN_IF_ERROR(Require("x", tokens.x));
      MOK_RETURN_IF_ERROR(Require("topk_weight", tokens.topk_weight));
      MOK_RETURN_IF_ERROR(Require("expert_ids", tokens.expert_ids));
      MOK_RETURN_IF_ERROR(Require("out", tokens.out));
    }
    if (tokens.id_bytes != 4 && tokens.id_bytes != 8) {
      return InvalidArgumentError("id_bytes is ", tokens.id_bytes, ", expected 4 or 8");
    }
    if (!(arguments_.swiglu_limit > 0)) {
      return InvalidArgumentError("swiglu_limit is ", arguments_.swiglu_limit,
                                  ", expected more than 0");
    }
    const ForwardArguments::Weights& weights = arguments_.weights;
    if (shape_.num_local_experts > 0) {
      MOK_RETURN_IF_ERROR(Require("gate weights", weights.gate));
      MOK_RETURN_IF_ERROR(Require("up weights", weights.up));
      MOK_RETURN_IF_ERROR(Require("down weights", weights.down));
    }
    if (has_shared()) {
      MOK_RETURN_IF_ERROR(Require("shared gate weights", weights.shared_gate));
      MOK_RETURN_IF_ERROR(Require("shared up weights", weights.shared_up));
      MOK_RETURN_IF_ERROR(Require("shared down weights", weights.shared_down));
    }
    if (config_.chunk_bytes > kernel_.max_chunk_bytes ||
        config_.dedicated_chunk_bytes > kernel_.max_dedicated_chunk_bytes) {
      return InvalidArgumentError("chunks of ", config_.chunk_bytes, " and ",
                                  config_.dedicated_chunk_bytes, " bytes, expected at most ",
                                  kernel_.max_chunk_bytes, " and ",
                                  kernel_.max_dedicated_chunk_bytes);
    }
    return Require("wait record", arguments_.record);
  }

  int32_t Tiles(int64_t width, int64_t columns) const {
    return static_cast<int32_t>(CeilDiv(width, columns));
  }

  void FillShape() {
    ProgramShape& program = params_.shape.program;
    program.pass = Pass::kForward;
    program.ring.minibatch_blocks = config_.minibatch_blocks;
    program.ring.macrobatch_blocks = config_.macrobatch_blocks;
    program.intermediate_tiles = Tiles(shape_.intermediate, kernel_.tile_columns / 2);
    program.hidden_tiles = Tiles(shape_.hidden, kernel_.tile_columns);
    program.output_panel_blocks = config_.output_panel_blocks;
    program.exchange_tiles = config_.exchange_tiles;
    program.token_reduce_tiles = config_.token_reduce_tiles;
    program.token_blocks = CeilDiv<int64_t>(arguments_.tokens.num_tokens, kRowBlock);
    program.shared_intermediate_tiles = Tiles(shape_.shared_intermediate, kernel_.tile_columns / 2);
    params_.shape.hidden = static_cast<int32_t>(shape_.hidden);
    params_.shape.intermediate = static_cast<int32_t>(shape_.intermediate);
    params_.shape.shared_intermediate = static_cast<int32_t>(shape_.shared_intermediate);
    params_.shape.topk = shape_.topk;
    params_.shape.num_tokens = arguments_.tokens.num_tokens;
    params_.shape.swiglu_limit = arguments_.swiglu_limit;
    params_.shape.mode = ForwardMode::kWhole;
    params_.shape.num_comm_sms = config_.num_comm_sms;
  }

  void FillTokens() {
    const ForwardArguments::Tokens& tokens = arguments_.tokens;
    params_.tokens.topk_weight = tokens.topk_weight;
    params_.tokens.expert_ids = tokens.expert_ids;
    params_.tokens.shared_scale = tokens.shared_scale;
    params_.tokens.routes = arguments_.peers.routes_of_rank[arguments_.peers.rank];
    params_.tokens.out = tokens.out;
    params_.tokens.id_bytes = tokens.id_bytes;
    params_.tokens.has_shared_scale = tokens.shared_scale != nullptr;
  }

  Status EncodeWeights(const WeightMatrix& matrix, TensorMap& map) const {
    if (matrix.experts == 0) return OkStatus();  // no task loads them
    MOK_ASSIGN_OR_RETURN(const runtime::TensorMapSpec spec,
                         WeightMapSpec(matrix, config_.order, kernel_.tile_columns / 2));
    MOK_ASSIGN_OR_RETURN(map, runtime::EncodeTensorMap(spec));
    return OkStatus();
  }

  Status FillWeights() {
    const ForwardArguments::Weights& from = arguments_.weights;
    ForwardParams::Weights& to = params_.weights;
    const int64_t experts = shape_.num_local_experts, h = shape_.hidden, i = shape_.intermediate;
    MOK_RETURN_IF_ERROR(EncodeWeights({from.gate, experts, i, h}, to.gate));
    MOK_RETURN_IF_ERROR(EncodeWeights({from.up, experts, i, h}, to.up));
    MOK_RETURN_IF_ERROR(EncodeWeights({from.down, experts, h, i}, to.down));
    const int64_t one = has_shared() ? 1 : 0, shared = shape_.shared_intermediate;
    MOK_RETURN_IF_ERROR(EncodeWeights({from.shared_gate, one, shared, h}, to.shared_gate));
    MOK_RETURN_IF_ERROR(EncodeWeights({from.shared_up, one, shared, h}, to.shared_up));
    return EncodeWeights({from.shared_down, one, h, shared}, to.shared_down);
  }

  Status FillRing() {
    const ForwardArguments::Context& context = arguments_.context;
    const ForwardScratch& scratch = arguments_.scratch;
    ForwardParams::Ring& ring = params_.ring;
    const int64_t rows = config_.ring_rows();
    MOK_ASSIGN_OR_RETURN(ring.x, RowsMap(context.ring_x, rows, shape_.hidden, nullptr));
    MOK_ASSIGN_OR_RETURN(ring.activation, RowsMap(scratch.h, rows, shape_.intermediate, nullptr));
    ring.gate = context.ring_gate;
    ring.up = context.ring_up;
    ring.h = scratch.h;
    ring.y = scratch.y;
    return OkStatus();
  }

  Status FillShared() {
    const int64_t tokens = arguments_.tokens.num_tokens;
    const ForwardScratch& scratch = arguments_.scratch;
    MOK_ASSIGN_OR_RETURN(params_.tokens.x, RowsMap(arguments_.tokens.x, tokens, shape_.hidden,
                                                   arguments_.context.ring_x));
    MOK_ASSIGN_OR_RETURN(
        params_.shared.activation,
        RowsMap(scratch.shared_h, tokens, shape_.shared_intermediate, scratch.shared_h));
    params_.shared.gate = arguments_.context.shared_gate;
    params_.shared.up = arguments_.context.shared_up;
    params_.shared.h = scratch.shared_h;
    params_.shared.y = scratch.shared_y;
    return OkStatus();
  }

  void FillExchange() {
    const ForwardArguments::Peers& peers = arguments_.peers;
    ForwardParams::Exchange& exchange = params_.exchange;
    RowExchange rows = {};
    rows.sources = {arguments_.schedule.source_rank, arguments_.schedule.source_route};
    rows.peers.row_bytes = 2 * shape_.hidden;
    rows.own_rank = peers.rank;
    exchange.dispatch = rows;
    exchange.dispatch.local = reinterpret_cast<std::byte*>(arguments_.context.ring_x);
    exchange.dispatch.routes_per_row = shape_.topk;
    exchange.combine = rows;
    exchange.combine.local = reinterpret_cast<std::byte*>(arguments_.scratch.y);
    exchange.combine.routes_per_row = 1;
    exchange.combine.interval_ns = config_.push_interval_ns;
    exchange.meeting.rank = peers.rank;
    exchange.meeting.num_ranks = shape_.ep_size;
    for (int rank = 0; rank < shape_.ep_size; ++rank) {
      exchange.dispatch.peers.of_rank[rank] =
          reinterpret_cast<std::byte*>(const_cast<BFloat16*>(peers.x_of_rank[rank]));
      exchange.combine.peers.of_rank[rank] =
          reinterpret_cast<std::byte*>(peers.routes_of_rank[rank]);
      exchange.meeting.flags_of_rank[rank] = peers.flags_of_rank[rank];
    }
    exchange.chunk_bytes = config_.chunk_bytes;
    exchange.dedicated_chunk_bytes = config_.dedicated_chunk_bytes;
  }

  const ForwardLayerShape& shape_;
  const ForwardConfig& config_;
  const ForwardKernelInfo& kernel_;
  const ForwardArguments& arguments_;
  ForwardParams params_ = {};
};

}  // namespace

ForwardScratchLayout::ForwardScratchLayout(const ForwardLayerShape& shape,
                                           const ForwardConfig& config) {
  const auto place = [&](Part part, int64_t bytes) {
    begin_[part] = bytes_;
    bytes_ += RoundUp(static_cast<size_t>(bytes), kAlignment);
  };
  const int64_t token_blocks = CeilDiv<int64_t>(shape.max_tokens, kRowBlock);
  const int64_t counters = kCountersPerPass + kCounterFamiliesPerSlot * config.macrobatch_blocks +
                           kCountersPerTokenBlock * token_blocks;
  const int64_t ring = config.ring_rows(), shared = shape.shared_intermediate;
  const int64_t shared_tokens = shared > 0 ? shape.max_tokens : 0;
  constexpr int64_t kElement = sizeof(BFloat16);
  place(kState, sizeof(ForwardState));
  place(kAbortFlag, sizeof(uint32_t));
  place(kCounters, counters * static_cast<int64_t>(sizeof(uint64_t)));
  place(kH, ring * shape.intermediate * kElement);
  place(kY, ring * shape.hidden * kElement);
  // One row more: the maps of a rank without tokens need memory.
  place(kSharedH, (shared_tokens + 1) * shared * kElement);
  place(kSharedY, shared_tokens * shape.hidden * kElement);
}

ForwardScratch ForwardScratchLayout::At(void* base) const {
  const auto at = [&](Part part) { return static_cast<std::byte*>(base) + begin_[part]; };
  const auto rows = [&](Part part) { return reinterpret_cast<BFloat16*>(at(part)); };
  return {reinterpret_cast<ForwardState*>(at(kState)),
          reinterpret_cast<uint32_t*>(at(kAbortFlag)),
          reinterpret_cast<uint64_t*>(at(kCounters)),
          rows(kH),
          rows(kY),
          rows(kSharedH),
          rows(kSharedY)};
}

StatusOr<ForwardParams> MakeForwardParams(const ForwardLayerShape& shape,
                                          const ForwardConfig& config,
                                          const ForwardKernelInfo& kernel,
                                          const ForwardArguments& arguments) {
  return ParamsBuilder(shape, config, kernel, arguments).Build();
}

Status LaunchForward(const ForwardKernelInfo& kernel, const ForwardParams& forward_params,
                     const ForwardLaunch& launch) {
  ForwardParams params = forward_params;
  if (launch.num_blocks <= params.shape.num_comm_sms) {
    return InvalidArgumentError("num_blocks is ", launch.num_blocks, ", expected more than the ",
                                params.shape.num_comm_sms, " that only exchange");
  }
  params.shape.mode = launch.mode;
  runtime::LaunchConfig config;
  config.grid = {static_cast<uint32_t>(launch.num_blocks), 1, 1};
  config.block = {kThreads, 1, 1};
  config.shared_bytes = kernel.shared_bytes;
  config.registers_per_thread = kSm90LaunchRegisters;
  config.device = launch.device;
  config.stream = launch.stream;
  config.name = "mok_forward";
  return runtime::LaunchKernelAddress(kernel.address, config, &params, sizeof params);
}

const char* ForwardRoleName(int32_t role) {
  static constexpr const char* kNames[] = {"consumer", "producer", "scheduler",
                                           "pull",     "push",     "meeting"};
  return role >= 0 && role < 6 ? kNames[role] : "unknown";
}

Status CheckForwardRecord(const DeviceWaitRecord& record) {
  if (record.state == 2 && record.role == static_cast<int32_t>(ForwardRole::kMeeting)) {
    const bool is_entry = record.task_kind == static_cast<int32_t>(TaskKind::kEntryBarrier);
    return DeadlineExceededError("rank ", record.rank, " waited ", record.waited_ns / 1000000,
                                 " ms for rank ", record.task, " at the ",
                                 is_entry ? "entry" : "exit", " of pass ", record.expected,
                                 ", which it last reached in pass ", record.observed);
  }
  return CheckDeviceWaitRecord(record, {ForwardRoleName, [](int32_t value) {
                                          return TaskKindName(static_cast<TaskKind>(value));
                                        }});
}

}  // namespace mok
