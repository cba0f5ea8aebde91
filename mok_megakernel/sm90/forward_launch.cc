#include "mok_megakernel/sm90/forward_launch.h"

#include "mok_megakernel/sm90/pass_params_builder.h"

namespace mok {
namespace {

class ParamsBuilder : PassParamsBuilder<ForwardParams, ForwardArguments> {
 public:
  using PassParamsBuilder::PassParamsBuilder;

  StatusOr<ForwardParams> Build() {
    MOK_RETURN_IF_ERROR(Check());
    FillShape();
    FillTokens();
    MOK_RETURN_IF_ERROR(FillWeights());
    MOK_RETURN_IF_ERROR(FillRing());
    if (has_shared()) MOK_RETURN_IF_ERROR(FillShared());
    FillExchange();
    return params_;
  }

 private:
  Status Check() const {
    MOK_RETURN_IF_ERROR(CheckCall("fused_forward_reduce", config_.fused_forward_reduce));
    if (!has_tokens()) return OkStatus();
    MOK_RETURN_IF_ERROR(CheckTensor("topk_weight", arguments_.tokens.topk_weight));
    return CheckTensor("out", arguments_.tokens.out);
  }

  void FillShape() {
    FillCommonShape(Pass::kForward, config_.fused_forward_reduce);
    params_.shape.program.gate_up_panel_blocks = config_.gate_up_panel_blocks;
    params_.shape.intermediate = static_cast<int32_t>(shape_.intermediate);
    params_.shape.shared_intermediate = static_cast<int32_t>(shape_.shared_intermediate);
    params_.shape.swiglu_limit = arguments_.swiglu_limit;
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
    ForwardParams::Exchange& exchange = params_.exchange;
    exchange.dispatch = Pull(arguments_.context.ring_x, arguments_.peers.x_of_rank);
    exchange.combine = Push(arguments_.scratch.y);
    exchange.combine.skips_own_rank = true;
    exchange.combine.interval_beside_pulls_ns = config_.push_interval_beside_pulls_ns;
    FillSignals();
  }
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
  y_ = plan_.Place(RowsToSend(shape, ring) * shape.hidden * kElement);
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

Status LaunchForward(const ForwardKernelInfo& kernel, const ForwardParams& params,
                     const ForwardLaunch& launch) {
  return LaunchWithMode(kernel, params, launch, "mok_forward");
}

}  // namespace mok
