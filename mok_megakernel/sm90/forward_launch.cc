#include "mok_megakernel/sm90/forward_launch.h"

#include "mok_core/bits.h"

namespace mok {
namespace {

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
    params_.signals = MakePassSignals(arguments_.scratch, arguments_.record, arguments_.timeout_ns,
                                      arguments_.peers.rank);
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
      MOK_RETURN_IF_ERROR(RequireAligned("x", tokens.x));
      MOK_RETURN_IF_ERROR(RequireAligned("topk_weight", tokens.topk_weight));
      MOK_RETURN_IF_ERROR(RequireAligned("expert_ids", tokens.expert_ids));
      MOK_RETURN_IF_ERROR(RequireAligned("out", tokens.out));
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
      MOK_RETURN_IF_ERROR(RequireAligned("gate weights", weights.gate));
      MOK_RETURN_IF_ERROR(RequireAligned("up weights", weights.up));
      MOK_RETURN_IF_ERROR(RequireAligned("down weights", weights.down));
    }
    if (has_shared()) {
      MOK_RETURN_IF_ERROR(RequireAligned("shared gate weights", weights.shared_gate));
      MOK_RETURN_IF_ERROR(RequireAligned("shared up weights", weights.shared_up));
      MOK_RETURN_IF_ERROR(RequireAligned("shared down weights", weights.shared_down));
    }
    if (config_.fused_forward_reduce > 0 && !has_shared()) {
      return InvalidArgumentError("fused_forward_reduce is ", config_.fused_forward_reduce,
                                  ", expected 0: there is no shared expert");
    }
    MOK_RETURN_IF_ERROR(CheckChunks(config_, kernel_));
    return RequireAligned("wait record", arguments_.record);
  }

  void FillShape() {
    ProgramShape& program = params_.shape.program;
    program.pass = Pass::kForward;
    program.ring.minibatch_blocks = config_.minibatch_blocks;
    program.ring.macrobatch_blocks = config_.macrobatch_blocks;
    program.intermediate_tiles = TilesOf(shape_.intermediate, kernel_.tile_columns / 2);
    program.hidden_tiles = TilesOf(shape_.hidden, kernel_.tile_columns);
    program.output_panel_blocks = config_.output_panel_blocks;
    program.gate_up_panel_blocks = config_.gate_up_panel_blocks;
    program.exchange_tiles = config_.exchange_tiles;
    program.token_reduce_tiles = config_.token_reduce_tiles;
    program.fused_reduce_width = config_.fused_forward_reduce;
    program.token_blocks = CeilDiv<int64_t>(arguments_.tokens.num_tokens, kRowBlock);
    program.shared_intermediate_tiles =
        TilesOf(shape_.shared_intermediate, kernel_.tile_columns / 2);
    params_.shape.hidden = static_cast<int32_t>(shape_.hidden);
    params_.shape.intermediate = static_cast<int32_t>(shape_.intermediate);
    params_.shape.shared_intermediate = static_cast<int32_t>(shape_.shared_intermediate);
    params_.shape.topk = shape_.topk;
    params_.shape.num_tokens = arguments_.tokens.num_tokens;
    params_.shape.swiglu_limit = arguments_.swiglu_limit;
    params_.shape.mode = PassMode::kWhole;
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

  Status FillWeights() {
    const ForwardArguments::Weights& from = arguments_.weights;
    ForwardParams::Weights& to = params_.weights;
    const int64_t experts = shape_.num_local_experts, h = shape_.hidden, i = shape_.intermediate;
    const auto encode = [&](const WeightMatrix& matrix, TensorMap& map) {
      return EncodeWeights(matrix, config_.order, kernel_.tile_columns / 2, map);
    };
    MOK_RETURN_IF_ERROR(encode({from.gate, experts, i, h}, to.gate));
    MOK_RETURN_IF_ERROR(encode({from.up, experts, i, h}, to.up));
    MOK_RETURN_IF_ERROR(encode({from.down, experts, h, i}, to.down));
    const int64_t one = has_shared() ? 1 : 0, shared = shape_.shared_intermediate;
    MOK_RETURN_IF_ERROR(encode({from.shared_gate, one, shared, h}, to.shared_gate));
    MOK_RETURN_IF_ERROR(encode({from.shared_up, one, shared, h}, to.shared_up));
    return encode({from.shared_down, one, h, shared}, to.shared_down);
  }

  Status FillRing() {
    const ForwardArguments::Context& context = arguments_.context;
    const ForwardScratch& scratch = arguments_.scratch;
    ForwardParams::Ring& ring = params_.ring;
    const int64_t rows = config_.ring_rows();
    MOK_RETURN_IF_ERROR(EncodeRows(context.ring_x, rows, shape_.hidden, nullptr, ring.x));
    MOK_RETURN_IF_ERROR(EncodeRows(scratch.h, rows, shape_.intermediate, nullptr, ring.activation));
    ring.gate = context.ring_gate;
    ring.up = context.ring_up;
    ring.h = scratch.h;
    ring.y = scratch.y;
    return OkStatus();
  }

  Status FillShared() {
    const int64_t tokens = arguments_.tokens.num_tokens;
    const ForwardScratch& scratch = arguments_.scratch;
    MOK_RETURN_IF_ERROR(EncodeRows(arguments_.tokens.x, tokens, shape_.hidden,
                                   arguments_.context.ring_x, params_.tokens.x));
    MOK_RETURN_IF_ERROR(EncodeRows(scratch.shared_h, tokens, shape_.shared_intermediate,
                                   scratch.shared_h, params_.shared.activation));
    params_.shared.gate = arguments_.context.shared_gate;
    params_.shared.up = arguments_.context.shared_up;
    params_.shared.h = scratch.shared_h;
    params_.shared.y = scratch.shared_y;
    return OkStatus();
  }

  void FillExchange() {
    const ForwardArguments::Peers& peers = arguments_.peers;
    ForwardParams::Exchange& exchange = params_.exchange;
    const RowExchange rows =
        MakeRowExchange({arguments_.schedule.source_rank, arguments_.schedule.source_route},
                        shape_.hidden, peers.rank);
    exchange.dispatch = rows;
    exchange.dispatch.local = reinterpret_cast<std::byte*>(arguments_.context.ring_x);
    exchange.dispatch.routes_per_row = shape_.topk;
    exchange.combine = rows;
    exchange.combine.local = reinterpret_cast<std::byte*>(arguments_.scratch.y);
    exchange.combine.interval_ns = config_.push_interval_ns;
    exchange.combine.interval_beside_pulls_ns = config_.push_interval_beside_pulls_ns;
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
                                           const ForwardConfig& config)
    : memory_(shape, config) {
  const int64_t ring = config.ring_rows(), shared = shape.shared_intermediate;
  const int64_t shared_tokens = shared > 0 ? shape.max_tokens : 0;
  constexpr int64_t kElement = sizeof(BFloat16);
  plan_.Place(static_cast<int64_t>(memory_.bytes()));
  h_ = plan_.Place(ring * shape.intermediate * kElement);
  y_ = plan_.Place(ring * shape.hidden * kElement);
  // One row more: the maps of a rank without tokens need memory.
  shared_h_ = plan_.Place((shared_tokens + 1) * shared * kElement);
  shared_y_ =
      plan_.Place(config.fused_forward_reduce > 0 ? 0 : shared_tokens * shape.hidden * kElement);
}

ForwardScratch ForwardScratchLayout::At(void* base) const {
  const auto rows = [&](size_t offset) {
    return reinterpret_cast<BFloat16*>(static_cast<std::byte*>(base) + offset);
  };
  return {memory_.At(base), rows(h_), rows(y_), rows(shared_h_), rows(shared_y_)};
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
  params.shape.mode = launch.mode;
  return LaunchPass(kernel, launch, params.shape.num_comm_sms, &params, sizeof params,
                    "mok_forward");
}

}  // namespace mok
