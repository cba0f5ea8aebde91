// From a compute task of the program to the work of a block: which rows, weights and outputs.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/gemm_task.h"
#include "mok_megakernel/sm90/forward_params.h"
#include "mok_megakernel/sm90/pass_work.h"

namespace mok {

// What a scheduler hands to the producer and the consumers of its block.
struct ForwardWork {
  static constexpr Pass kPass = Pass::kForward;
  enum class Kind : int32_t { kEnd, kGemm, kSwiGluGemm, kFusedReduce, kReduce };

  GemmTask gemm;  // of all kinds of GEMM; kFusedReduce: of its first tile, without the outputs
  Kind kind;
  OwnRows own_rows;              // kGemm: OwnRowsOf; kSwiGluGemm: none
  TokenRange tokens;             // kReduce
  ReduceTile reduced;            // kFusedReduce
  int32_t signal;                // counter to increment once the tile is stored; -1: none
  const uint64_t* late_counter;  // of this GPU, 1 when the epilogue may begin; null: at once
  int32_t task_kind;             // for reports
  int64_t task;
};

namespace forward_internal {

// The operands of a tile. Routed and shared kinds differ in addresses alone: device code that
// selects them is shorter than code for each kind.
MOK_DEVICE pass_internal::TileOperands OperandsOf(const ForwardParams& p, const BlockPlace& place,
                                                  const Task& task, bool is_routed,
                                                  bool is_gate_up) {
  const ForwardParams::Shape& shape = p.shape;
  const TensorMap* x = is_routed ? &p.ring.x : &p.tokens.x;
  const TensorMap* gate = is_routed ? &p.weights.gate : &p.weights.shared_gate;
  const TensorMap* up = is_routed ? &p.weights.up : &p.weights.shared_up;
  const TensorMap* activation = is_routed ? &p.ring.activation : &p.shared.activation;
  const TensorMap* down = is_routed ? &p.weights.down : &p.weights.shared_down;
  const int32_t intermediate = is_routed ? shape.intermediate : shape.shared_intermediate;
  return {is_gate_up ? x : activation,
          {is_gate_up ? gate : down, is_gate_up ? up : down},
          place.row,
          place.rows,
          is_routed ? task.expert : 0,
          is_gate_up ? intermediate : shape.hidden,
          is_gate_up ? shape.hidden : intermediate};
}

}  // namespace forward_internal

// Fills `work` for a task of the compute queue.
template <class Config>
MOK_DEVICE void FillWork(const ForwardParams& p, const ProgramView& program, const Task& task,
                         ForwardWork& work) {
  using namespace forward_internal;
  using Gemm = typename Config::Gemm;
  const ForwardParams::Shape& shape = p.shape;
  if (task.kind == TaskKind::kTokenReduce) {
    work.kind = ForwardWork::Kind::kReduce;
    work.tokens = TokensOfTask(program.shape(), shape.num_tokens, task);
    return;
  }
  const bool is_routed = task.kind == TaskKind::kGateUp || task.kind == TaskKind::kDown;
  const bool is_gate_up = task.kind == TaskKind::kGateUp || task.kind == TaskKind::kSharedGateUp;
  BlockPlace place =
      is_routed ? PlaceInRing(program, task.block) : PlaceOfTokens(shape.num_tokens, task.block);
  if (!is_routed && Config::kBug == PassBug::kWrongSharedRows) place.rows = kRowBlock;
  const pass_internal::TileOperands operands = OperandsOf(p, place, task, is_routed, is_gate_up);
  if (is_gate_up) {
    work.kind = ForwardWork::Kind::kSwiGluGemm;
    work.own_rows.table_row = -1;
    pass_internal::FillGateUp<Gemm>(
        operands,
        {is_routed ? p.ring.gate : p.shared.gate, is_routed ? p.ring.up : p.shared.up,
         is_routed ? p.ring.h : p.shared.h},
        task.tile, shape.swiglu_limit, work.gemm);
    return;
  }
  const bool is_fused = !is_routed && program.shape().fuses_token_reduce();
  const int32_t width = is_fused ? program.shape().fused_reduce_width : 1;
  const int32_t tile = task.tile * width;
  pass_internal::FillTile<Gemm, false>(operands, tile, work.gemm);
  if (is_fused) {
    const int32_t column = tile * Gemm::kTileN, rest = shape.hidden - column;
    const int32_t most = width * Gemm::kTileN;
    work.kind = ForwardWork::Kind::kFusedReduce;
    work.reduced = {place.row, column, place.rows, rest < most ? rest : most};
    return;
  }
  work.kind = ForwardWork::Kind::kGemm;
  work.gemm.out =
      (is_routed ? p.ring.y : p.shared.y) + int64_t{place.row} * shape.hidden + tile * Gemm::kTileN;
  work.own_rows = OwnRowsOf<Config>(p.exchange.combine, is_routed, task.block, tile);
  work.gemm.gate = nullptr;
  work.gemm.up = nullptr;
  work.gemm.swiglu_limit = 0;
}

}  // namespace mok
