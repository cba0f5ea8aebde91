// Sizes that determine a task program, and the tables that go with them.
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/macros.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"
#include "mok_schedule/task.h"

namespace mok {

// Everything a task program depends on, apart from which expert each row block belongs to.
// "Tiles" are counts of output tiles; the program does not know their sizes.
struct ProgramShape {
  Pass pass = Pass::kForward;
  RingPlan ring;
  int32_t intermediate_tiles = 1;         // of GateUp and its recomputation, over I, per row block
  int32_t down_grad_tiles = 1;            // of DownGrad, over I, per row block
  int32_t hidden_tiles = 1;               // of Down and InputGrad, over H, per row or token block
  int32_t weight_grad_down_tiles = 1;     // of WeightGradDown, per expert
  int32_t weight_grad_gate_up_tiles = 1;  // of WeightGradGateUp, per expert
  // Down and InputGrad take the row blocks of a minibatch in panels of this many, tiles outer and
  // blocks inner inside a panel, so that the first blocks can be sent before the last are computed;
  // 0: the whole minibatch is one panel. Their shared twins likewise, unless they do TokenReduce's
  // work: TokenReduce of the first token blocks can begin before the last are computed.
  int32_t output_panel_blocks = 0;
  // Likewise for GateUp, which has no rows to send early, but shares fewest operands in L2 when a
  // wave of tiles is a square.
  int32_t gate_up_panel_blocks = 0;
  int32_t exchange_tiles = 1;             // tasks that share the rows of a block in each exchange
  int32_t token_reduce_tiles = 1;         // tasks that share the tokens of a block in TokenReduce
  int64_t token_blocks = 0;               // ceil(T / kRowBlock) of this rank's own tokens
  int32_t shared_intermediate_tiles = 0;  // of SharedGateUp, likewise; 0: no shared expert
  int32_t shared_down_grad_tiles = 0;     // 0 exactly when there is no shared expert
  int32_t shared_weight_grad_down_tiles = 0;     // 0 exactly when there is no shared expert
  int32_t shared_weight_grad_gate_up_tiles = 0;  // 0 exactly when there is no shared expert
  // How many macrobatches, counted from 0, the backward finds in the ring: 1 after a forward over
  // the same table with the same macrobatch (the minibatch may differ); 0 recomputes all of them
  // and the shared expert as well. The forward does not read it.
  int32_t kept_macrobatches = 1;
  // Where the backward computes the shared expert's weight gradients, whose tiles sum over all
  // tokens of the rank: among the last tasks, or, for tiles that take much longer than the routed
  // experts', behind the first minibatch of DownGrad. The last tasks should be short; in exchange
  // the first rows to come in have more to hide behind.
  bool early_shared_weight_grads = false;
  // Row blocks of the buffer between InputGrad and ReverseDispatch, whose rows nobody reads again
  // once they have been sent; row block b lies in slot b % d_x_slots(). At least a minibatch, which
  // InputGrad is ahead of what has been sent; 0, and at most: as many as the ring has.
  int64_t d_x_window_blocks = 0;

  // > 0: the last tiles of the shared expert (SharedDown, SharedInputGrad), once multiplied, add
  // the rows of the routes themselves and write the output. They are then the last tasks, behind
  // the exit barrier, each of so many tiles side by side, and there is no TokenReduce. Needs a
  // shared expert.
  int32_t fused_reduce_width = 0;

  // Exchange tile t moves rows t * n .. t * n + n - 1 of its row block, as far as they are valid.
  MOK_HOST_DEVICE int32_t rows_per_exchange_tile() const { return kRowBlock / exchange_tiles; }
  // Likewise for the tokens of TokenReduce.
  MOK_HOST_DEVICE int32_t tokens_per_reduce_tile() const { return kRowBlock / token_reduce_tiles; }
  MOK_HOST_DEVICE bool fuses_token_reduce() const { return fused_reduce_width > 0; }
  // Per token block; the last one may have fewer tiles.
  MOK_HOST_DEVICE int32_t fused_reduce_tasks() const {
    return CeilDiv(hidden_tiles, fused_reduce_width);
  }
  // How many tasks of the compute queue, its last ones, sum the routes into the output.
  MOK_HOST_DEVICE int64_t num_reductions() const {
    return token_blocks * (fuses_token_reduce() ? fused_reduce_tasks() : token_reduce_tiles);
  }
  MOK_HOST_DEVICE bool has_shared_expert() const { return shared_intermediate_tiles > 0; }
  MOK_HOST_DEVICE bool is_recomputed(int64_t macrobatch) const {
    return pass == Pass::kBackward && macrobatch >= kept_macrobatches;
  }
  MOK_HOST_DEVICE bool is_shared_recomputed() const {
    return pass == Pass::kBackward && kept_macrobatches == 0;
  }
  MOK_HOST_DEVICE int64_t d_x_slots() const {
    const bool is_window = d_x_window_blocks > 0 && d_x_window_blocks < ring.macrobatch_blocks;
    return is_window ? d_x_window_blocks : ring.macrobatch_blocks;
  }
  MOK_HOST_DEVICE int64_t weight_grad_tiles() const {
    return int64_t{weight_grad_down_tiles} + weight_grad_gate_up_tiles;
  }
};

// A piece: the row blocks that one expert has inside one macrobatch. A weight gradient tile sums
// over the rows of one piece; its fp32 partial continues from the expert's earlier piece and into
// its next one through the carry buffer. At most one expert crosses a macrobatch boundary, so one
// buffer, of one expert's weight gradients, carries all.
//
// The arrays may lie in host or device memory; sizes with E_l local experts and N macrobatches.
struct PieceTables {
  int32_t* piece_begin;   // [N + 2] first piece of each macrobatch; "macrobatch" N lists the
                          // experts without rows
  int32_t* piece_expert;  // [E_l + N] local expert of each piece, in row order
  int32_t* carry_owner;   // [N + 1] whose partial the carry buffer holds (or last held) when the
                          // macrobatch begins; -1 = nobody's yet
};

// Fills the piece tables, in time O(E_l + N), sequentially.
MOK_HOST_DEVICE inline void BuildPieceTables(const RingPlan& ring, const RoutingTableView& table,
                                             const PieceTables& pieces) {
  const int64_t num_macrobatches = ring.num_macrobatches();
  int32_t count = 0;
  int32_t expert = 0;
  pieces.carry_owner[0] = -1;
  for (int64_t macrobatch = 0; macrobatch < num_macrobatches; ++macrobatch) {
    const int64_t begin = ring.first_block_of_macrobatch(macrobatch);
    const int64_t end = begin + ring.blocks_in_macrobatch(macrobatch);
    pieces.piece_begin[macrobatch] = count;
    pieces.carry_owner[macrobatch + 1] = pieces.carry_owner[macrobatch];
    for (; expert < table.num_local_experts && table.expert_block_begin[expert] < end; ++expert) {
      const int64_t expert_end = table.expert_block_begin[expert + 1];
      if (expert_end == table.expert_block_begin[expert]) continue;
      pieces.piece_expert[count++] = expert;
      if (expert_end > end) {
        pieces.carry_owner[macrobatch + 1] = expert;
        break;  // the next macrobatch begins with the same expert
      }
    }
  }
  pieces.piece_begin[num_macrobatches] = count;
  for (int32_t empty = 0; empty < table.num_local_experts; ++empty) {
    if (table.expert_block_begin[empty + 1] == table.expert_block_begin[empty]) {
      pieces.piece_expert[count++] = empty;
    }
  }
  pieces.piece_begin[num_macrobatches + 1] = count;
}

// The rows that a routed weight gradient task sums over, and where its partial sums come from and
// go to. An expert without rows has num_blocks = 0 and neither carry: the task writes zeros, or
// leaves an accumulated gradient alone.
struct WeightGradPiece {
  int64_t first_block;  // row block of the table; slot = ring.slot_of_block(first_block)
  int64_t num_blocks;   // contiguous, in the table and in the ring
  int64_t num_rows;     // valid rows; padding follows the last only
  bool carry_in;        // starts from the carry buffer
  bool carry_out;       // ends in the carry buffer, not in the gradient
};

}  // namespace mok
