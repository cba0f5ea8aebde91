// The ring plan: how the row blocks of a rank stream through a ring of one macrobatch.
//
// Row block b lives in ring slot b % macrobatch_blocks. A macrobatch is a window of consecutive
// row blocks that fills the ring once; a minibatch is a part of a macrobatch and the unit of
// overlap between communication and compute. Only the last macrobatch, and the last minibatch of
// each macrobatch, can be shorter than the rest.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"

namespace mok {

// All quantities are in row blocks of kRowBlock rows.
struct RingPlan {
  int64_t num_row_blocks = 0;     // B >= 0: row blocks of the routing table
  int64_t minibatch_blocks = 1;   // >= 1; more than macrobatch_blocks counts as macrobatch_blocks
  int64_t macrobatch_blocks = 1;  // M >= 1: slots of the ring, no multiple of the minibatch needed

  MOK_HOST_DEVICE int64_t num_macrobatches() const {
    return (num_row_blocks + macrobatch_blocks - 1) / macrobatch_blocks;
  }
  // Slots that are used at all: the ring needs no more rows than this.
  MOK_HOST_DEVICE int64_t num_slots() const {
    return num_row_blocks < macrobatch_blocks ? num_row_blocks : macrobatch_blocks;
  }
  MOK_HOST_DEVICE int64_t macrobatch_of_block(int64_t block) const {
    return block / macrobatch_blocks;
  }
  MOK_HOST_DEVICE int64_t slot_of_block(int64_t block) const { return block % macrobatch_blocks; }
  // Row blocks that pass through a slot in one pass.
  MOK_HOST_DEVICE int64_t blocks_in_slot(int64_t slot) const {
    return (num_row_blocks - slot + macrobatch_blocks - 1) / macrobatch_blocks;
  }
  MOK_HOST_DEVICE int64_t first_block_of_macrobatch(int64_t macrobatch) const {
    return macrobatch * macrobatch_blocks;
  }
  MOK_HOST_DEVICE int64_t blocks_in_macrobatch(int64_t macrobatch) const {
    const int64_t rest = num_row_blocks - macrobatch * macrobatch_blocks;
    return rest < macrobatch_blocks ? rest : macrobatch_blocks;
  }
  MOK_HOST_DEVICE int64_t minibatches_in_macrobatch(int64_t macrobatch) const {
    return (blocks_in_macrobatch(macrobatch) + minibatch_blocks - 1) / minibatch_blocks;
  }
  // `minibatch` counts inside its macrobatch.
  MOK_HOST_DEVICE int64_t blocks_in_minibatch(int64_t macrobatch, int64_t minibatch) const {
    const int64_t rest = blocks_in_macrobatch(macrobatch) - minibatch * minibatch_blocks;
    return rest < minibatch_blocks ? rest : minibatch_blocks;
  }
  MOK_HOST_DEVICE int64_t first_block_of_minibatch(int64_t macrobatch, int64_t minibatch) const {
    return first_block_of_macrobatch(macrobatch) + minibatch * minibatch_blocks;
  }
};

// What the minibatch heuristic knows about the machine and the gate+up grouped GEMM.
struct MinibatchModel {
  int64_t intermediate = 0;      // I: the GEMM has 2 * I output columns (gate and up)
  int64_t tile_rows = 256;       // output tile that `workers_per_tile` workers compute together
  int64_t tile_columns = 256;    // gate and up columns counted together
  int64_t workers_per_tile = 2;  // SMs of a cluster, or 1 thread
  int64_t num_workers = 0;       // SMs of the device, or threads
  int64_t waves = 2;             // full rounds of tiles over all workers
};

// The smallest minibatch, in rows and a multiple of kRowBlock, whose gate+up grouped GEMM has at
// least `waves` tiles for every worker (group). Less leaves the last wave of each minibatch ragged,
// more delays the first GEMM behind a longer dispatch. For I = 2048, 256x256 tiles of 2-SM clusters
// and 148 SMs the formula gives 2,368 rows, which are 18.5 row blocks: the result is 2,432.
int64_t DefaultMinibatchRows(const MinibatchModel& model);

// What the macrobatch heuristic knows about the layer.
struct MacrobatchModel {
  int64_t total_tokens = 0;    // tokens of all ranks
  int topk = 1;                // K
  int num_experts = 1;         // E, all ranks
  int num_local_experts = 0;   // experts of this rank
  int64_t minibatch_rows = 1;  // > 0, a multiple of kRowBlock
};

// The ring size in rows: the rows of a balanced load (total_tokens * K * local experts / E) with
// 25 % to spare and one row block of padding for each local expert, rounded up to a minibatch, at
// most the capacity of the routing table (where no step, however skewed, recomputes) and at least
// one row block. With it an ordinary step recomputes nothing.
int64_t DefaultMacrobatchRows(const MacrobatchModel& model);

}  // namespace mok
