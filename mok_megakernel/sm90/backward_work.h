// From a compute task of the program to the work of a block: which rows, weights and outputs.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/backward_task.h"
#include "mok_gemm/sm90/gemm_task.h"
#include "mok_megakernel/sm90/backward_params.h"
#include "mok_megakernel/sm90/pass_work.h"

namespace mok {

// What a scheduler hands to the producer and the consumers of its block.
struct BackwardWork {
  static constexpr Pass kPass = Pass::kBackward;
  enum class Kind : int32_t {
    kEnd,
    kRecompute,
    kProduct,
    kFusedReduce,  // InputGrad tiles with a fused reduction; the first is `product`
    kReduce,
    kNothing,  // a gradient that the caller does not want
  };

  union {
    GemmTask recompute;
    BackwardTask product;
  };
  Kind kind;
  TokenRange tokens;             // kReduce
  ReduceTile reduced;            // kFusedReduce
  int32_t signal;                // counter to increment once the tile is stored; -1: none
  const uint64_t* late_counter;  // of this GPU, 1 when the epilogue may begin; null: at once
  int32_t task_kind;             // for reports
  int64_t task;
};

namespace backward_internal {

template <class Gemm>
MOK_DEVICE void FillRecompute(const RecomputeMatrices& m, const RowBlockPlace& place, int32_t tile,
                              BackwardWork& work) {
  work.kind = BackwardWork::Kind::kRecompute;
  pass_internal::FillGateUp<Gemm>({&m.x,
                                   {&m.gate_weight, &m.up_weight},
                                   place.row,
                                   place.rows,
                                   place.expert,
                                   m.intermediate,
                                   m.hidden},
                                  {m.gate, m.up, m.h}, tile, m.swiglu_limit, work.recompute);
}

template <class Gemm>
MOK_DEVICE void FillGradient(const WeightGradMatrices& m, const WeightGradPlace& place,
                             int32_t tile, BackwardWork& work) {
  work.kind = BackwardWork::Kind::kNothing;
  if (m.out == nullptr) return;
  work.kind = BackwardWork::Kind::kProduct;
  FillWeightGrad<Gemm>(m, place, tile, work.product);
}

// Tiles of the gate and the up gradient alternate: both read the same rows of x.
template <class Gemm>
MOK_DEVICE void FillGateUpGradient(const BackwardExperts& experts, const WeightGradPlace& place,
                                   int32_t tile, BackwardWork& work) {
  FillGradient<Gemm>(tile % 2 == 0 ? experts.weight_grad_gate : experts.weight_grad_up, place,
                     tile / 2, work);
}

MOK_DEVICE WeightGradPlace PlaceOfPiece(const ProgramView& program, const Task& task) {
  const WeightGradPiece piece = program.PieceOf(task);
  const auto slot = static_cast<int32_t>(program.shape().ring.slot_of_block(piece.first_block));
  return {task.expert, slot * kRowBlock, static_cast<int32_t>(piece.num_rows), piece.carry_in,
          piece.carry_out};
}

// Where InputGrad puts the rows of a block that are not of the rank's own tokens.
MOK_DEVICE int32_t RowInWindow(const ProgramView& program, int32_t block) {
  const auto slots = static_cast<uint32_t>(program.shape().d_x_slots());
  return static_cast<int32_t>(static_cast<uint32_t>(block) % slots) * kRowBlock;
}

template <class Config>
MOK_DEVICE void FillRouted(const BackwardParams& p, const ProgramView& program, const Task& task,
                           BackwardWork& work) {
  using Gemm = typename Config::Gemm;
  const BackwardExperts& experts = p.routed;
  if (task.kind == TaskKind::kWeightGradDown) {
    return FillGradient<Gemm>(experts.weight_grad_down, PlaceOfPiece(program, task), task.tile,
                              work);
  }
  if (task.kind == TaskKind::kWeightGradGateUp) {
    return FillGateUpGradient<Gemm>(experts, PlaceOfPiece(program, task), task.tile, work);
  }
  const BlockPlace block = PlaceInRing(program, task.block);
  const RowBlockPlace place = {block.row, block.rows, task.expert};
  work.kind = BackwardWork::Kind::kProduct;
  if (task.kind == TaskKind::kRecomputeGateUp) {
    FillRecompute<Gemm>(experts.recompute, place, task.tile, work);
  } else if (task.kind == TaskKind::kDownGrad) {
    FillDownGrad<Gemm>(experts.down_grad, place, task.tile, work.product);
  } else {
    FillInputGrad<Gemm>(experts.input_grad, place, RowInWindow(program, task.block), task.tile,
                        work.product);
    work.product.input_grad.own_rows =
        OwnRowsOf<Config>(p.exchange.reverse_dispatch, true, task.block, task.tile);
  }
}

template <class Config>
MOK_DEVICE void FillShared(const BackwardParams& p, const ProgramView& program, const Task& task,
                           BackwardWork& work) {
  using Gemm = typename Config::Gemm;
  const BackwardExperts& experts = p.shared;
  const auto num_tokens = static_cast<int32_t>(p.shape.num_tokens);
  if (task.kind == TaskKind::kSharedWeightGradDown) {
    return FillGradient<Gemm>(experts.weight_grad_down, {0, 0, num_tokens, false, false}, task.tile,
                              work);
  }
  if (task.kind == TaskKind::kSharedWeightGradGateUp) {
    return FillGateUpGradient<Gemm>(experts, {0, 0, num_tokens, false, false}, task.tile, work);
  }
  BlockPlace block = PlaceOfTokens(num_tokens, task.block);
  if (Config::kBug == PassBug::kWrongSharedRows) block.rows = kRowBlock;
  const RowBlockPlace place = {block.row, block.rows, 0};
  work.kind = BackwardWork::Kind::kProduct;
  if (task.kind == TaskKind::kSharedRecomputeGateUp) {
    FillRecompute<Gemm>(experts.recompute, place, task.tile, work);
  } else if (task.kind == TaskKind::kSharedDownGrad) {
    FillDownGrad<Gemm>(experts.down_grad, place, task.tile, work.product);
    if (!p.tokens.has_shared_scale) work.product.down_grad.router_weight = &p.one;
  } else {
    const int32_t width = program.shape().fused_reduce_width, hidden = p.shape.hidden;
    const int32_t tile = width > 0 ? task.tile * width : task.tile;
    FillInputGrad<Gemm>(experts.input_grad, place, place.row, tile, work.product);
    if (width == 0) return;
    const int32_t column = tile * Gemm::kTileN, most = width * Gemm::kTileN;
    work.kind = BackwardWork::Kind::kFusedReduce;
    work.reduced = {place.row, column, place.rows, hidden - column < most ? hidden - column : most};
  }
}

}  // namespace backward_internal

// Fills `work` for a task of the compute queue.
template <class Config>
MOK_DEVICE void FillWork(const BackwardParams& p, const ProgramView& program, const Task& task,
                         BackwardWork& work) {
  using namespace backward_internal;
  switch (task.kind) {
    case TaskKind::kRecomputeGateUp:
    case TaskKind::kDownGrad:
    case TaskKind::kInputGrad:
    case TaskKind::kWeightGradDown:
    case TaskKind::kWeightGradGateUp:
      FillRouted<Config>(p, program, task, work);
      break;
    case TaskKind::kTokenReduce:
      work.kind = BackwardWork::Kind::kReduce;
      work.tokens = TokensOfTask(program.shape(), p.shape.num_tokens, task);
      break;
    default:
      FillShared<Config>(p, program, task, work);
      break;
  }
}

}  // namespace mok
