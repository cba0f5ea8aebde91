// The routing table: which route of which source rank every row of this rank's experts holds.
//
// Each rank knows the top-k expert ids of every rank and lists, for its own experts, the routes
// they receive. One table serves all four transfers (dispatch, combine, reverse combine, reverse
// dispatch). The rows of one expert are contiguous and end in padding up to a row block, so that
// no row block mixes experts.
//
// Row order inside an expert: ascending ReverseBits(global token id, ceil(log2(total tokens))),
// then ascending k. A global token id is the number of tokens on lower ranks plus the index on the
// token's own rank, so the order depends on the global batch and not on how ranks split it, and
// consecutive rows come from ranks far apart: no rank is a hot spot of a transfer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mok_core/macros.h"
#include "mok_core/status.h"

namespace mok {

// Rows of one row block: the unit of transfer, of a GEMM tile and of the counters.
inline constexpr int kRowBlock = 128;

// Contiguous ranges of experts, one per rank. Ranks may own different numbers, also none.
struct ExpertPartition {
  std::vector<int32_t> begin;  // [R + 1] first global expert of each rank; begin[R] = E

  int num_ranks() const { return static_cast<int>(begin.size()) - 1; }
  int num_experts() const { return begin.back(); }
  int num_local_experts(int rank) const { return begin[rank + 1] - begin[rank]; }
};

// Splits `num_experts` over `ep_size` ranks; sizes differ by at most one, larger ranges first.
ExpertPartition EvenPartition(int num_experts, int ep_size);

// The routes of one source rank.
struct RankRoutes {
  const int32_t* expert_ids;  // [num_tokens, topk] global expert ids; -1 = no route
  int64_t num_tokens;         // may be 0, expert_ids is then not read
};

// The table as plain pointers into host or device memory. Device code and the task program read
// this form; the arrays may lie in any allocation with the capacities named below.
struct RoutingTableView {
  const int32_t* source_rank;         // [padded rows] rank that holds the token; -1 = padding
  const int32_t* source_route;        // [padded rows] token * topk + k there; -1 = padding
  const int32_t* expert_block_begin;  // [num_local_experts + 1] first row block of each expert
  const int32_t* expert_rows;         // [num_local_experts] valid rows of each expert
  const int32_t* block_expert;        // [row blocks] local expert of each row block
  int32_t num_local_experts;

  MOK_HOST_DEVICE int64_t num_row_blocks() const { return expert_block_begin[num_local_experts]; }
  MOK_HOST_DEVICE int expert_of_block(int64_t block) const { return block_expert[block]; }

  // Valid rows of a row block, 1..kRowBlock: padding is only at the end of an expert's last block.
  MOK_HOST_DEVICE int rows_in_block(int64_t block) const {
    const int expert = block_expert[block];
    const int64_t rest =
        expert_rows[expert] - (block - expert_block_begin[expert]) * int64_t{kRowBlock};
    return rest < kRowBlock ? static_cast<int>(rest) : kRowBlock;
  }
};

// The table of one rank, owned by the host.
struct RoutingTable {
  int num_local_experts = 0;
  int topk = 0;
  int ep_size = 0;
  int rank = 0;
  std::vector<int32_t> source_rank;         // [padded rows] -1 = padding
  std::vector<int32_t> source_route;        // [padded rows] -1 = padding
  std::vector<int32_t> expert_block_begin;  // [num_local_experts + 1] in row blocks
  std::vector<int32_t> expert_rows;         // [num_local_experts] valid rows, from the first on
  std::vector<int32_t> block_expert;        // [row blocks] local expert of each row block

  int64_t num_row_blocks() const { return static_cast<int64_t>(block_expert.size()); }
  int64_t num_rows() const { return num_row_blocks() * kRowBlock; }  // with padding
  int64_t num_valid_rows() const;
  int expert_of_block(int64_t block) const { return view().expert_of_block(block); }
  int rows_in_block(int64_t block) const { return view().rows_in_block(block); }

  // Valid as long as this table lives and is not changed.
  RoutingTableView view() const {
    return {source_rank.data(), source_route.data(), expert_block_begin.data(),
            expert_rows.data(), block_expert.data(), num_local_experts};
  }
};

// Rows, padding included, that a table can have when `max_tokens_total` tokens of all ranks send
// every route to the `num_local_experts` experts of one rank and spread them so that padding is
// largest. A token may name one expert several times, so all counts that add up to the number of
// routes can occur. Exact: some input reaches it, none exceeds it.
int64_t RoutingTableCapacityRows(int64_t max_tokens_total, int topk, int num_local_experts);

// Builds the table of `rank` from the routes of all ranks: count, prefix sum, place; no sorting.
// Time O(tokens * topk + experts), memory that of the result plus the per-expert counts.
//
// Errors, each naming the values: kInvalidArgument for an inconsistent partition, rank or topk;
// kOutOfRange for an expert id outside [-1, E) (names rank, token, k and id); kResourceExhausted
// when tokens, the routes of a rank or the rows of the table do not fit in int32.
StatusOr<RoutingTable> BuildRoutingTable(std::span<const RankRoutes> routes,
                                         const ExpertPartition& partition, int rank, int topk);

}  // namespace mok
