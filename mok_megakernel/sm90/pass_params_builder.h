// What MakeForwardParams and MakeBackwardParams have in common: checks, shape, exchange, signals.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_megakernel/sm90/forward_config.h"
#include "mok_megakernel/sm90/pass_launch.h"
#include "mok_megakernel/sm90/pass_params.h"
#include "mok_schedule/program_shape.h"
#include "mok_schedule/routing_table.h"

namespace mok {

// Params, Arguments: of the forward or of the backward.
template <class Params, class Arguments>
class PassParamsBuilder {
 public:
  PassParamsBuilder(const ForwardLayerShape& shape, const ForwardConfig& config,
                    const PassKernelInfo& kernel, const Arguments& arguments)
      : shape_(shape), config_(config), kernel_(kernel), arguments_(arguments) {}

 protected:
  bool has_shared() const { return shape_.shared_intermediate > 0; }
  bool has_tokens() const { return arguments_.tokens.num_tokens > 0; }

  // fused_reduce: the configuration's of this pass; its name, for the error.
  Status CheckCall(const char* fused_name, int32_t fused_reduce) const {
    const auto& tokens = arguments_.tokens;
    MOK_RETURN_IF_ERROR(CheckRange("num_tokens", tokens.num_tokens, 0, shape_.max_tokens));
    MOK_RETURN_IF_ERROR(CheckTokens());
    if (tokens.id_bytes != 4 && tokens.id_bytes != 8) {
      return InvalidArgumentError("topk_idx_bytes: expected 4 or 8, got ", tokens.id_bytes);
    }
    if (!(arguments_.swiglu_limit > 0)) {
      return InvalidArgumentError("swiglu_limit: expected more than 0, got ",
                                  arguments_.swiglu_limit);
    }
    if (fused_reduce > 0 && !has_shared()) {
      return InvalidArgumentError(fused_name, ": expected 0 without a shared expert, got ",
                                  fused_reduce);
    }
    MOK_RETURN_IF_ERROR(CheckWeights());
    MOK_RETURN_IF_ERROR(CheckContext());
    MOK_RETURN_IF_ERROR(CheckChunks(config_, kernel_));
    return CheckTensor("record", arguments_.record);
  }

  void FillCommonShape(Pass pass, int32_t fused_reduce) {
    ProgramShape& program = params_.shape.program;
    const int32_t columns = kernel_.tile_columns;
    program.pass = pass;
    program.ring.minibatch_blocks = config_.minibatch_blocks;
    program.ring.macrobatch_blocks = config_.macrobatch_blocks;
    program.intermediate_tiles = TilesOf(shape_.intermediate, columns / 2);
    program.hidden_tiles = TilesOf(shape_.hidden, columns);
    program.output_panel_blocks = config_.output_panel_blocks;
    program.exchange_tiles = config_.exchange_tiles;
    program.token_reduce_tiles = config_.token_reduce_tiles;
    program.fused_reduce_width = fused_reduce;
    program.token_blocks = CeilDiv<int64_t>(arguments_.tokens.num_tokens, kRowBlock);
    program.shared_intermediate_tiles = TilesOf(shape_.shared_intermediate, columns / 2);
    params_.shape.hidden = static_cast<int32_t>(shape_.hidden);
    params_.shape.topk = shape_.topk;
    params_.shape.num_tokens = arguments_.tokens.num_tokens;
    params_.shape.mode = PassMode::kWhole;
    params_.shape.num_comm_sms = config_.num_comm_sms;
  }

  // Rows of every rank's tokens -> local rows of the ring; a token's rows cross the link once if
  // the ring holds them all.
  RowExchange Pull(BFloat16* local, const BFloat16* const* tokens_of_rank) const {
    RowExchange rows = Rows(local, const_cast<BFloat16* const*>(tokens_of_rank));
    rows.routes_per_row = shape_.topk;
    const FirstRows& first = arguments_.schedule.first_rows;
    rows.earlier = {first.of_token, first.max_tokens, CeilLog2(kRowBlock), config_.exchange_tiles};
    return rows;
  }
  // Local rows -> rows of every rank's routes.
  RowExchange Push(BFloat16* local) const {
    RowExchange rows = Rows(local, arguments_.peers.routes_of_rank);
    rows.interval_ns = config_.push_interval_ns;
    return rows;
  }

  // The meetings, the schedule, what is waited for.
  void FillSignals() {
    auto& exchange = params_.exchange;
    exchange.meeting.rank = arguments_.peers.rank;
    exchange.meeting.num_ranks = shape_.ep_size;
    for (int rank = 0; rank < shape_.ep_size; ++rank) {
      exchange.meeting.flags_of_rank[rank] = arguments_.peers.flags_of_rank[rank];
    }
    exchange.chunk_bytes = config_.chunk_bytes;
    exchange.dedicated_chunk_bytes = config_.dedicated_chunk_bytes;
    params_.schedule = arguments_.schedule;
    params_.signals = MakePassSignals(arguments_.scratch, arguments_.record, arguments_.timeout_ns,
                                      arguments_.peers.rank);
  }

  const ForwardLayerShape& shape_;
  const ForwardConfig& config_;
  const PassKernelInfo& kernel_;
  const Arguments& arguments_;
  Params params_ = {};

 private:
  Status CheckTokens() const {
    const auto& tokens = arguments_.tokens;
    if (tokens.shared_scale != nullptr && !has_shared()) {
      return InvalidArgumentError("shared_scale: expected null without a shared expert");
    }
    if (!has_tokens()) return OkStatus();
    MOK_RETURN_IF_ERROR(CheckTensor("x", tokens.x));
    MOK_RETURN_IF_ERROR(CheckTensor("topk_idx", tokens.expert_ids));
    return tokens.shared_scale != nullptr ? CheckTensor("shared_scale", tokens.shared_scale)
                                          : OkStatus();
  }

  Status CheckWeights() const {
    const auto& weights = arguments_.weights;
    if (shape_.num_local_experts > 0) {
      MOK_RETURN_IF_ERROR(CheckTensor("routed.gate", weights.gate));
      MOK_RETURN_IF_ERROR(CheckTensor("routed.up", weights.up));
      MOK_RETURN_IF_ERROR(CheckTensor("routed.down", weights.down));
    }
    if (!has_shared()) return OkStatus();
    MOK_RETURN_IF_ERROR(CheckTensor("shared.gate", weights.shared_gate));
    MOK_RETURN_IF_ERROR(CheckTensor("shared.up", weights.shared_up));
    return CheckTensor("shared.down", weights.shared_down);
  }

  // The ring always: which routes lead here the host does not know.
  Status CheckContext() const {
    const auto& context = arguments_.context;
    MOK_RETURN_IF_ERROR(CheckTensor("context.ring_x", context.ring_x));
    MOK_RETURN_IF_ERROR(CheckTensor("context.ring_gate", context.ring_gate));
    MOK_RETURN_IF_ERROR(CheckTensor("context.ring_up", context.ring_up));
    if (!has_shared() || !has_tokens()) return OkStatus();
    MOK_RETURN_IF_ERROR(CheckTensor("context.shared_gate", context.shared_gate));
    return CheckTensor("context.shared_up", context.shared_up);
  }

  RowExchange Rows(BFloat16* local, BFloat16* const* of_rank) const {
    const DeviceSchedule& schedule = arguments_.schedule;
    RowExchange rows = MakeRowExchange({schedule.source_rank, schedule.source_route}, shape_.hidden,
                                       arguments_.peers.rank);
    rows.local = reinterpret_cast<std::byte*>(local);
    for (int rank = 0; rank < shape_.ep_size; ++rank) {
      rows.peers.of_rank[rank] = reinterpret_cast<std::byte*>(of_rank[rank]);
    }
    return rows;
  }
};

// Launches the kernel in launch.mode. whole: its parameters in another.
template <class Params>
Status LaunchWithMode(const PassKernelInfo& kernel, const Params& whole, const PassLaunch& launch,
                      const char* name) {
  Params params = whole;
  if (params.trace.capacity > 0 && !kernel.traces) {
    return InvalidArgumentError("trace: expected none, the kernel does not fill it");
  }
  params.shape.mode = launch.mode;
  return LaunchPass(kernel, launch, params.shape.num_comm_sms, &params, sizeof params, name);
}

}  // namespace mok
