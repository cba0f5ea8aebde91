#include "mok_schedule/routing_table.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "mok_core/bits.h"
#include "mok_core/status.h"

namespace mok {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

Status CheckArguments(std::span<const RankRoutes> routes, const ExpertPartition& partition,
                      int rank, int topk) {
  if (partition.begin.size() != routes.size() + 1) {
    return InvalidArgumentError("expert partition: expected ", routes.size() + 1,
                                " bounds for the routes of ", routes.size(), " ranks, got ",
                                partition.begin.size());
  }
  if (partition.begin.front() != 0 ||
      !std::is_sorted(partition.begin.begin(), partition.begin.end())) {
    return InvalidArgumentError("expert partition: bounds must start at 0 and never decrease");
  }
  const int num_ranks = partition.num_ranks();
  if (rank < 0 || rank >= num_ranks) {
    return InvalidArgumentError("rank: expected 0 to ", num_ranks - 1, ", got ", rank);
  }
  if (topk < 1) return InvalidArgumentError("topk: expected at least 1, got ", topk);
  int64_t total_tokens = 0;
  for (int source = 0; source < num_ranks; ++source) {
    const int64_t num_tokens = routes[source].num_tokens;
    if (num_tokens < 0) {
      return InvalidArgumentError("num_tokens of rank ", source, ": expected at least 0, got ",
                                  num_tokens);
    }
    // A table entry holds token * topk + k, and a global token id has to fit in its type as well.
    if (num_tokens > kMaxInt32 / topk) {
      return ResourceExhaustedError("rank ", source, " has ", num_tokens, " tokens with topk ",
                                    topk, ": its routes do not fit in int32 (at most ",
                                    kMaxInt32 / topk, " tokens)");
    }
    total_tokens += num_tokens;
    if (total_tokens > kMaxInt32) {
      return ResourceExhaustedError("the tokens of ranks 0 to ", source, ", ", total_tokens,
                                    ", do not fit in int32");
    }
  }
  return OkStatus();
}

// Counts the rows of each local expert and checks every id.
StatusOr<std::vector<int64_t>> CountRows(std::span<const RankRoutes> routes,
                                         const ExpertPartition& partition, int rank, int topk) {
  const int32_t num_experts = partition.num_experts();
  const int32_t first = partition.begin[rank];
  const auto num_local = static_cast<uint32_t>(partition.num_local_experts(rank));
  // The last count collects all other ids: a branch would be mispredicted all the time.
  std::vector<int64_t> counts(num_local + 1, 0);
  for (size_t source = 0; source < routes.size(); ++source) {
    const int32_t* ids = routes[source].expert_ids;
    const int64_t num_routes = routes[source].num_tokens * topk;
    for (int64_t route = 0; route < num_routes; ++route) {
      const int32_t id = ids[route];
      if (id < -1 || id >= num_experts) {
        return OutOfRangeError("expert id of rank ", source, ", token ", route / topk, ", k ",
                               route % topk, ": expected -1 to ", num_experts - 1, ", got ", id);
      }
      const auto local = static_cast<uint32_t>(id) - static_cast<uint32_t>(first);
      ++counts[std::min(local, num_local)];  // ids below `first` wrap to large numbers
    }
  }
  counts.pop_back();
  return counts;
}

// Lays the experts out one after the other, each padded to row blocks.
Status LayOutExperts(std::span<const int64_t> counts, RoutingTable& table) {
  table.expert_block_begin.assign(1, 0);
  int64_t num_blocks = 0;
  for (const int64_t count : counts) {
    num_blocks += CeilDiv<int64_t>(count, kRowBlock);
    if (num_blocks > kMaxInt32 / kRowBlock) {
      return ResourceExhaustedError("the rows of rank ", table.rank, ", more than ",
                                    kMaxInt32 / kRowBlock * kRowBlock, ", do not fit in int32");
    }
    table.expert_rows.push_back(static_cast<int32_t>(count));
    table.expert_block_begin.push_back(static_cast<int32_t>(num_blocks));
    table.block_expert.resize(num_blocks, static_cast<int32_t>(table.expert_rows.size()) - 1);
  }
  table.source_rank.assign(num_blocks * kRowBlock, -1);
  table.source_route.assign(num_blocks * kRowBlock, -1);
  return OkStatus();
}

// Visits all tokens in bit-reversed order and appends their routes to the experts.
void PlaceRoutes(std::span<const RankRoutes> routes, int32_t first_expert, RoutingTable& table) {
  std::vector<int64_t> token_begin(routes.size() + 1, 0);  // first global token id of each rank
  for (size_t source = 0; source < routes.size(); ++source) {
    token_begin[source + 1] = token_begin[source] + routes[source].num_tokens;
  }
  std::vector<int64_t> next_row(table.num_local_experts);
  for (int expert = 0; expert < table.num_local_experts; ++expert) {
    next_row[expert] = int64_t{table.expert_block_begin[expert]} * kRowBlock;
  }
  const int topk = table.topk;
  const int num_bits = CeilLog2(token_begin.back());
  const int64_t num_positions = token_begin.back() == 0 ? 0 : int64_t{1} << num_bits;
  for (int64_t position = 0; position < num_positions; ++position) {
    const int64_t id = ReverseBits(static_cast<uint32_t>(position), num_bits);
    if (id >= token_begin.back()) continue;
    // The last rank whose first token is not above the id: ranks without tokens are skipped.
    const auto above = std::upper_bound(token_begin.begin(), token_begin.end(), id);
    const int64_t source = above - token_begin.begin() - 1;
    const int64_t first_route = (id - token_begin[source]) * topk;
    const int32_t* ids = routes[source].expert_ids + first_route;
    for (int k = 0; k < topk; ++k) {
      const auto local = static_cast<uint32_t>(ids[k]) - static_cast<uint32_t>(first_expert);
      if (local >= static_cast<uint32_t>(table.num_local_experts)) continue;
      const int64_t row = next_row[local]++;
      table.source_rank[row] = static_cast<int32_t>(source);
      table.source_route[row] = static_cast<int32_t>(first_route + k);
    }
  }
}

}  // namespace

ExpertPartition EvenPartition(int num_experts, int ep_size) {
  MOK_CHECK(num_experts >= 0 && ep_size > 0)
      << "EvenPartition of " << num_experts << " experts over " << ep_size << " ranks";
  ExpertPartition partition;
  const int smaller = num_experts / ep_size;
  const int num_larger = num_experts % ep_size;
  for (int rank = 0; rank <= ep_size; ++rank) {
    partition.begin.push_back(rank * smaller + std::min(rank, num_larger));
  }
  return partition;
}

int64_t RoutingTable::num_valid_rows() const {
  return std::accumulate(expert_rows.begin(), expert_rows.end(), int64_t{0});
}

int64_t RoutingTableCapacityRows(int64_t max_tokens_total, int topk, int num_local_experts) {
  // Most blocks: one row in a block of its own for every expert, then only full blocks.
  const int64_t num_routes = max_tokens_total * topk;
  const int64_t lone_rows = std::min<int64_t>(num_routes, num_local_experts);
  if (lone_rows == 0) return 0;
  return (lone_rows + (num_routes - lone_rows) / kRowBlock) * kRowBlock;
}

StatusOr<RoutingTable> BuildRoutingTable(std::span<const RankRoutes> routes,
                                         const ExpertPartition& partition, int rank, int topk) {
  MOK_RETURN_IF_ERROR(CheckArguments(routes, partition, rank, topk));
  RoutingTable table;
  table.num_local_experts = partition.num_local_experts(rank);
  table.topk = topk;
  table.ep_size = partition.num_ranks();
  table.rank = rank;
  MOK_ASSIGN_OR_RETURN(const std::vector<int64_t> counts, CountRows(routes, partition, rank, topk));
  MOK_RETURN_IF_ERROR(LayOutExperts(counts, table));
  PlaceRoutes(routes, partition.begin[rank], table);
  return table;
}

}  // namespace mok
