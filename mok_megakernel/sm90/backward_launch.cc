#include "mok_megakernel/sm90/backward_launch.h"

#include <algorithm>

#include "mok_core/argument_checks.h"
#include "mok_core/device/runtime.h"
#include "mok_gemm/sm90/tensor_maps.h"
#include "mok_megakernel/sm90/pass_params_builder.h"
#include "mok_schedule/routing_table.h"

namespace mok {
namespace {

constexpr int64_t kTileRows = kRowBlock;

// Tiles of the weight gradient [m, n] (WeightGradShape): 128 rows by tile_columns.
int32_t GradTiles(int64_t m, int64_t n, int32_t tile_columns) {
  return TilesOf(m, kTileRows) * TilesOf(n, tile_columns);
}

Status EncodeContracted(const WeightMatrix& matrix, TensorMap& map) {
  if (matrix.experts == 0) return OkStatus();  // no task loads them
  MOK_ASSIGN_OR_RETURN(const runtime::TensorMapSpec spec, ContractedWeightMapSpec(matrix));
  MOK_ASSIGN_OR_RETURN(map, runtime::EncodeTensorMap(spec));
  return OkStatus();
}

BFloat16* GivenOr(BFloat16* given, BFloat16* otherwise) {
  return given != nullptr ? given : otherwise;
}

// What the GEMMs of the routed or of the shared expert work on.
struct ExpertOperands {
  int64_t experts, rows, intermediate;
  const BFloat16* spare;  // memory for the maps of a rank without rows
  const BFloat16 *x, *d_out;
  const BFloat16 *gate_weight, *up_weight, *down_weight;
  BFloat16 *gate, *up;
  BFloat16 *d_gate, *d_up, *weighted_h, *d_x;
  const float* router_weight;
  int32_t router_weight_step;
  float* router_partial;
  float *carry_gate, *carry_up, *carry_down;
  BackwardArguments::WeightGrads grads;
};

class ParamsBuilder : PassParamsBuilder<BackwardParams, BackwardArguments> {
 public:
  using PassParamsBuilder::PassParamsBuilder;

  StatusOr<BackwardParams> Build() {
    MOK_RETURN_IF_ERROR(Check());
    FillShape();
    FillTokens();
    MOK_RETURN_IF_ERROR(FillExperts(Routed(), params_.routed));
    if (has_shared()) MOK_RETURN_IF_ERROR(FillExperts(Shared(), params_.shared));
    FillExchange();
    params_.one = 1;
    return params_;
  }

 private:
  Status Check() const {
    MOK_RETURN_IF_ERROR(CheckCall("fused_backward_reduce", config_.fused_backward_reduce));
    if (has_tokens()) MOK_RETURN_IF_ERROR(CheckGradsOfTokens());
    MOK_RETURN_IF_ERROR(CheckRange("kept_macrobatches", arguments_.kept_macrobatches, 0, 1));
    if (shape_.num_local_experts > 0) {
      MOK_RETURN_IF_ERROR(CheckGrads("d_routed", arguments_.d_routed));
    }
    return has_shared() ? CheckGrads("d_shared", arguments_.d_shared) : OkStatus();
  }

  Status CheckGradsOfTokens() const {
    const BackwardArguments::Tokens& tokens = arguments_.tokens;
    const BackwardArguments::Peers& peers = arguments_.peers;
    MOK_RETURN_IF_ERROR(CheckTensor("topk_weight", peers.topk_weight_of_rank[peers.rank]));
    MOK_RETURN_IF_ERROR(CheckTensor("d_out", tokens.d_out));
    MOK_RETURN_IF_ERROR(CheckTensor("d_x", tokens.d_x));
    MOK_RETURN_IF_ERROR(CheckTensor("d_topk_weight", tokens.d_topk_weight));
    if (tokens.shared_scale != nullptr) {
      return CheckTensor("d_shared_scale", tokens.d_shared_scale);
    }
    if (tokens.d_shared_scale == nullptr) return OkStatus();
    return InvalidArgumentError("d_shared_scale: expected null without shared_scale");
  }

  static Status CheckGrads(const char* name, const BackwardArguments::WeightGrads& grads) {
    for (const void* pointer : {grads.gate, grads.up, grads.down}) {
      if (pointer != nullptr) MOK_RETURN_IF_ERROR(CheckTensor(name, pointer));
    }
    if (grads.dtype == DType::kBf16 || grads.dtype == DType::kFp32) return OkStatus();
    return TypeMismatchError(name, ".dtype: expected bf16 or fp32, got ", DTypeName(grads.dtype));
  }

  void FillShape() {
    FillCommonShape(Pass::kBackward, config_.fused_backward_reduce);
    ProgramShape& program = params_.shape.program;
    const int32_t columns = kernel_.tile_columns;
    const int64_t i = shape_.intermediate, h = shape_.hidden, shared = shape_.shared_intermediate;
    program.down_grad_tiles = TilesOf(i, columns);
    program.weight_grad_down_tiles = GradTiles(h, i, columns);
    program.weight_grad_gate_up_tiles = 2 * GradTiles(i, h, columns);
    program.shared_down_grad_tiles = TilesOf(shared, columns);
    program.shared_weight_grad_down_tiles = GradTiles(h, shared, columns);
    program.shared_weight_grad_gate_up_tiles = 2 * GradTiles(shared, h, columns);
    program.kept_macrobatches = arguments_.kept_macrobatches;
    program.d_x_window_blocks = config_.d_x_window_blocks;
    // Tiles of the shared expert's weight gradients sum over all tokens, those of a routed expert's
    // over its share of the ring: whether they take more than twice as long.
    program.early_shared_weight_grads =
        arguments_.tokens.num_tokens * shape_.num_local_experts > 2 * config_.ring_rows();
  }

  void FillTokens() {
    const BackwardArguments::Tokens& from = arguments_.tokens;
    const int32_t rank = arguments_.peers.rank;
    BackwardParams::Tokens& to = params_.tokens;
    to.expert_ids = from.expert_ids;
    to.routes = arguments_.peers.routes_of_rank[rank];
    to.d_router = arguments_.peers.d_router_of_rank[rank];
    to.shared_d_x = from.d_x;  // each lane reads what it overwrites
    to.d_scale_partial = arguments_.scratch.d_scale_partial;
    to.d_x = from.d_x;
    to.d_topk_weight = from.d_topk_weight;
    to.d_shared_scale = from.d_shared_scale;
    to.scale_parts = params_.shape.program.shared_down_grad_tiles;
    to.id_bytes = from.id_bytes;
    to.has_shared = has_shared();
    to.has_shared_scale = has_shared() && from.shared_scale != nullptr;
  }

  ExpertOperands Routed() const {
    const BackwardScratch& scratch = arguments_.scratch;
    const ForwardArguments::Weights& weights = arguments_.weights;
    const ForwardArguments::Context& context = arguments_.context;
    return {shape_.num_local_experts,
            config_.ring_rows(),
            shape_.intermediate,
            nullptr,
            context.ring_x,
            scratch.d_out,
            weights.gate,
            weights.up,
            weights.down,
            context.ring_gate,
            context.ring_up,
            GivenOr(arguments_.d_gate_up.gate, context.ring_gate),
            GivenOr(arguments_.d_gate_up.up, context.ring_up),
            scratch.weighted_h,
            scratch.d_x,
            scratch.router_weight,
            1,
            scratch.d_router_partial,
            scratch.carry_gate,
            scratch.carry_up,
            scratch.carry_down,
            arguments_.d_routed};
  }

  // router_weight stays null where there is no scale: the kernel's own 1 stands for it.
  ExpertOperands Shared() const {
    const BackwardScratch& scratch = arguments_.scratch;
    const ForwardArguments::Weights& weights = arguments_.weights;
    const BackwardArguments::Tokens& tokens = arguments_.tokens;
    const ForwardArguments::Context& context = arguments_.context;
    return {1,
            tokens.num_tokens,
            shape_.shared_intermediate,
            scratch.d_out,
            tokens.x,
            tokens.d_out,
            weights.shared_gate,
            weights.shared_up,
            weights.shared_down,
            context.shared_gate,
            context.shared_up,
            GivenOr(arguments_.d_gate_up.shared_gate, context.shared_gate),
            GivenOr(arguments_.d_gate_up.shared_up, context.shared_up),
            scratch.shared_weighted_h,
            tokens.d_x,
            tokens.shared_scale,
            tokens.shared_scale != nullptr ? 1 : 0,
            scratch.d_scale_partial,
            nullptr,
            nullptr,
            nullptr,
            arguments_.d_shared};
  }

  Status FillExperts(const ExpertOperands& from, BackwardExperts& to) const {
    MOK_RETURN_IF_ERROR(FillRecompute(from, to.recompute));
    MOK_RETURN_IF_ERROR(FillDownGrad(from, to.down_grad));
    MOK_RETURN_IF_ERROR(FillInputGrad(from, to.input_grad));
    const int64_t h = shape_.hidden, i = from.intermediate;
    const BackwardArguments::WeightGrads& grads = from.grads;
    const auto fill = [&](const BFloat16* a, int64_t m, const BFloat16* b, int64_t n, void* out,
                          float* carry, WeightGradMatrices& matrices) {
      MOK_RETURN_IF_ERROR(EncodeRows(a, from.rows, m, from.spare, matrices.a));
      MOK_RETURN_IF_ERROR(EncodeRows(b, from.rows, n, from.spare, matrices.b));
      matrices.m = static_cast<int32_t>(m);
      matrices.n = static_cast<int32_t>(n);
      matrices.out = out;
      matrices.out_dtype = grads.dtype;
      matrices.accumulate = grads.accumulate;
      matrices.carry = carry;
      return OkStatus();
    };
    MOK_RETURN_IF_ERROR(
        fill(from.d_out, h, from.weighted_h, i, grads.down, from.carry_down, to.weight_grad_down));
    MOK_RETURN_IF_ERROR(
        fill(from.d_gate, i, from.x, h, grads.gate, from.carry_gate, to.weight_grad_gate));
    return fill(from.d_up, i, from.x, h, grads.up, from.carry_up, to.weight_grad_up);
  }

  Status FillRecompute(const ExpertOperands& from, RecomputeMatrices& to) const {
    MOK_RETURN_IF_ERROR(EncodeRows(from.x, from.rows, shape_.hidden, from.spare, to.x));
    const WeightMatrix gate = {from.gate_weight, from.experts, from.intermediate, shape_.hidden};
    const WeightMatrix up = {from.up_weight, from.experts, from.intermediate, shape_.hidden};
    const int32_t half = kernel_.tile_columns / 2;
    MOK_RETURN_IF_ERROR(EncodeWeights(gate, config_.order, half, to.gate_weight));
    MOK_RETURN_IF_ERROR(EncodeWeights(up, config_.order, half, to.up_weight));
    to.gate = from.gate;
    to.up = from.up;
    to.h = from.weighted_h;
    to.hidden = static_cast<int32_t>(shape_.hidden);
    to.intermediate = static_cast<int32_t>(from.intermediate);
    to.swiglu_limit = arguments_.swiglu_limit;
    return OkStatus();
  }

  Status FillDownGrad(const ExpertOperands& from, DownGradMatrices& to) const {
    const int64_t i = from.intermediate;
    MOK_RETURN_IF_ERROR(EncodeRows(from.d_out, from.rows, shape_.hidden, from.spare, to.d_out));
    MOK_RETURN_IF_ERROR(
        EncodeContracted({from.down_weight, from.experts, shape_.hidden, i}, to.weight));
    MOK_RETURN_IF_ERROR(EncodeRows(from.gate, from.rows, i, from.spare, to.gate));
    MOK_RETURN_IF_ERROR(EncodeRows(from.up, from.rows, i, from.spare, to.up));
    to.hidden = static_cast<int32_t>(shape_.hidden);
    to.intermediate = static_cast<int32_t>(i);
    to.router_weight = from.router_weight;
    to.router_weight_step = from.router_weight_step;
    to.swiglu_limit = arguments_.swiglu_limit;
    to.d_gate = from.d_gate;
    to.d_up = from.d_up;
    to.weighted_h = from.weighted_h;
    to.router_partial = from.router_partial;
    return OkStatus();
  }

  Status FillInputGrad(const ExpertOperands& from, InputGradMatrices& to) const {
    const int64_t i = from.intermediate, h = shape_.hidden;
    MOK_RETURN_IF_ERROR(EncodeRows(from.d_gate, from.rows, i, from.spare, to.d_gate));
    MOK_RETURN_IF_ERROR(EncodeRows(from.d_up, from.rows, i, from.spare, to.d_up));
    MOK_RETURN_IF_ERROR(EncodeContracted({from.gate_weight, from.experts, i, h}, to.gate));
    MOK_RETURN_IF_ERROR(EncodeContracted({from.up_weight, from.experts, i, h}, to.up));
    to.hidden = static_cast<int32_t>(h);
    to.intermediate = static_cast<int32_t>(i);
    to.d_x = from.d_x;
    return OkStatus();
  }

  void FillExchange() {
    const BackwardArguments::Peers& peers = arguments_.peers;
    const BackwardScratch& scratch = arguments_.scratch;
    BackwardParams::Exchange& exchange = params_.exchange;
    exchange.recompute_dispatch = Pull(arguments_.context.ring_x, peers.x_of_rank);
    exchange.reverse_combine = Pull(scratch.d_out, peers.d_out_of_rank);
    exchange.reverse_dispatch = Push(scratch.d_x);
    exchange.reverse_dispatch.skips_own_rank = true;
    exchange.router_weights.local = scratch.router_weight;
    exchange.d_router.parts = scratch.d_router_partial;
    exchange.d_router.num_parts = params_.shape.program.down_grad_tiles;
    for (int rank = 0; rank < shape_.ep_size; ++rank) {
      exchange.router_weights.peers.of_rank[rank] =
          const_cast<float*>(peers.topk_weight_of_rank[rank]);
      exchange.d_router.peers.of_rank[rank] = peers.d_router_of_rank[rank];
    }
    exchange.d_x_rows = static_cast<int32_t>(config_.d_x_rows());
    FillSignals();
  }
};

}  // namespace

BackwardScratchLayout::BackwardScratchLayout(const ForwardLayerShape& shape,
                                             const ForwardConfig& config,
                                             const PassKernelInfo& kernel)
    : memory_(shape, config) {
  constexpr int64_t kElement = sizeof(BFloat16), kFloat = sizeof(float);
  const int32_t columns = kernel.tile_columns;
  const int64_t ring = config.ring_rows(), h = shape.hidden, i = shape.intermediate;
  const int64_t shared = shape.shared_intermediate;
  // One row more: the maps of a rank without tokens need memory.
  const int64_t tokens = shared > 0 ? shape.max_tokens + 1 : 0;
  carries_ = shape.num_local_experts > 0 && !config.one_macrobatch;
  const int64_t carry_tile = carries_ ? kTileRows * columns * kFloat : 0;
  plan_.Place(static_cast<int64_t>(memory_.bytes()));
  const auto place = [&](Part part, int64_t bytes) { begin_[part] = plan_.Place(bytes); };
  place(kDOut, ring * h * kElement);
  place(kWeightedH, ring * i * kElement);
  place(kDX, RowsToSend(shape, config.d_x_rows()) * h * kElement);
  place(kRouterWeight, ring * kFloat);
  place(kDRouterPartial, ring * TilesOf(i, columns) * kFloat);
  place(kCarryGate, GradTiles(i, h, columns) * carry_tile);
  place(kCarryUp, GradTiles(i, h, columns) * carry_tile);
  place(kCarryDown, GradTiles(h, i, columns) * carry_tile);
  place(kSharedWeightedH, tokens * shared * kElement);
  place(kDScalePartial, tokens * TilesOf(shared, columns) * kFloat);
}

BackwardScratch BackwardScratchLayout::At(void* base) const {
  const auto at = [&](Part part) { return static_cast<std::byte*>(base) + begin_[part]; };
  const auto rows = [&](Part part) { return reinterpret_cast<BFloat16*>(at(part)); };
  const auto floats = [&](Part part) { return reinterpret_cast<float*>(at(part)); };
  const auto carry = [&](Part part) { return carries_ ? floats(part) : nullptr; };
  return {memory_.At(base),      rows(kDOut),
          rows(kWeightedH),      rows(kDX),
          floats(kRouterWeight), floats(kDRouterPartial),
          carry(kCarryGate),     carry(kCarryUp),
          carry(kCarryDown),     rows(kSharedWeightedH),
          floats(kDScalePartial)};
}

StatusOr<BackwardParams> MakeBackwardParams(const ForwardLayerShape& shape,
                                            const ForwardConfig& config,
                                            const PassKernelInfo& kernel,
                                            const BackwardArguments& arguments) {
  return ParamsBuilder(shape, config, kernel, arguments).Build();
}

Status LaunchBackward(const PassKernelInfo& kernel, const BackwardParams& params,
                      const PassLaunch& launch) {
  return LaunchWithMode(kernel, params, launch, "mok_backward");
}

}  // namespace mok
