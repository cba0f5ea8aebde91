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
  enum class Kind : int32_t { kEnd, kGemm, kSwiGluGemm, kReduce };

  GemmTask gemm;  // kGemm, kSwiGluGemm
  Kind kind;
  TokenRange tokens;  // kReduce
  int32_t signal;     // counter to increment once the tile is stored; -1: none
  int32_t task_kind;  // for reports
  int64_t task;
};

namespace forward_internal {

template <class Gemm>
MOK_DEVICE void FillDown(const pass_internal::TileOperands& operands, BFloat16* y, int32_t tile,
                         GemmTask& task) {
  pass_internal::FillTile<Gemm, false>(operands, tile, task);
  task.out = y + int64_t{operands.a_row} * operands.width + tile * Gemm::kTileN;
  task.gate = nullptr;
  task.up = nullptr;
  task.swiglu_limit = 0;
}

}  // namespace forward_internal

// Fills `work` for a task of the compute queue.
template <class Config>
MOK_DEVICE void FillWork(const ForwardParams& p, const ProgramView& program, const Task& task,
                         ForwardWork& work) {
  using namespace forward_internal;
  using pass_internal::FillGateUp;
  using Gemm = typename Config::Gemm;
  const ForwardParams::Shape& shape = p.shape;
  const bool is_routed = task.kind == TaskKind::kGateUp || task.kind == TaskKind::kDown;
  BlockPlace place =
      is_routed ? PlaceInRing(program, task.block) : PlaceOfTokens(shape.num_tokens, task.block);
  if (!is_routed && Config::kBug == PassBug::kWrongSharedRows) place.rows = kRowBlock;
  switch (task.kind) {
    case TaskKind::kGateUp:
      work.kind = ForwardWork::Kind::kSwiGluGemm;
      FillGateUp<Gemm>({&p.ring.x,
                        {&p.weights.gate, &p.weights.up},
                        place.row,
                        place.rows,
                        task.expert,
                        shape.intermediate,
                        shape.hidden},
                       {p.ring.gate, p.ring.up, p.ring.h}, task.tile, shape.swiglu_limit,
                       work.gemm);
      break;
    case TaskKind::kSharedGateUp:
      work.kind = ForwardWork::Kind::kSwiGluGemm;
      FillGateUp<Gemm>({&p.tokens.x,
                        {&p.weights.shared_gate, &p.weights.shared_up},
                        place.row,
                        place.rows,
                        0,
                        shape.shared_intermediate,
                        shape.hidden},
                       {p.shared.gate, p.shared.up, p.shared.h}, task.tile, shape.swiglu_limit,
                       work.gemm);
      break;
    case TaskKind::kDown:
      work.kind = ForwardWork::Kind::kGemm;
      FillDown<Gemm>({&p.ring.activation,
                      {&p.weights.down, &p.weights.down},
                      place.row,
                      place.rows,
                      task.expert,
                      shape.hidden,
                      shape.intermediate},
                     p.ring.y, task.tile, work.gemm);
      break;
    case TaskKind::kSharedDown:
      work.kind = ForwardWork::Kind::kGemm;
      FillDown<Gemm>({&p.shared.activation,
                      {&p.weights.shared_down, &p.weights.shared_down},
                      place.row,
                      place.rows,
                      0,
                      shape.hidden,
                      shape.shared_intermediate},
                     p.shared.y, task.tile, work.gemm);
      break;
    default:  // kTokenReduce
      work.kind = ForwardWork::Kind::kReduce;
      work.tokens = TokensOfTask(program.shape(), shape.num_tokens, task);
      break;
  }
}

}  // namespace mok
