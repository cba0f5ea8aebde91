#include "mok_schedule/routing_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "mok_core/bits.h"

namespace mok {
namespace {

using ::testing::HasSubstr;

// A global batch: the same tokens can be split over ranks in many ways.
struct Batch {
  int topk = 1;
  int num_experts = 1;
  std::vector<int32_t> expert_ids;  // [tokens, topk]

  int64_t num_tokens() const { return static_cast<int64_t>(expert_ids.size()) / topk; }
};

// Owns nothing: the routes point into the batch.
std::vector<RankRoutes> SplitTokens(const Batch& batch, const std::vector<int64_t>& counts) {
  std::vector<RankRoutes> routes;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    routes.push_back({batch.expert_ids.data() + begin * batch.topk, count});
    begin += count;
  }
  return routes;
}

int64_t Uniform(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Cuts [0, total] at random places into `parts` parts, some of them often empty.
std::vector<int64_t> RandomSplit(std::mt19937_64& random, int64_t total, int parts) {
  std::vector<int64_t> cuts = {0, total};
  for (int i = 1; i < parts; ++i) cuts.push_back(Uniform(random, 0, total));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> counts;
  for (int i = 0; i < parts; ++i) counts.push_back(cuts[i + 1] - cuts[i]);
  return counts;
}

ExpertPartition RandomPartition(std::mt19937_64& random, int num_experts, int parts) {
  if (Uniform(random, 0, 2) == 0) return EvenPartition(num_experts, parts);
  ExpertPartition partition{{0}};
  for (const int64_t count : RandomSplit(random, num_experts, parts)) {
    partition.begin.push_back(partition.begin.back() + static_cast<int32_t>(count));
  }
  return partition;
}

Batch RandomBatch(std::mt19937_64& random) {
  Batch batch;
  batch.topk = static_cast<int>(Uniform(random, 1, 6));
  batch.num_experts = static_cast<int>(Uniform(random, 1, 20));
  const int64_t most = Uniform(random, 0, 9) == 0 ? 1500 : 60;
  const int64_t num_tokens = Uniform(random, 0, 7) == 0 ? 0 : Uniform(random, 0, most);
  const int64_t style = Uniform(random, 0, 3);
  const int32_t favourite = static_cast<int32_t>(Uniform(random, 0, batch.num_experts - 1));
  for (int64_t i = 0; i < num_tokens * batch.topk; ++i) {
    int32_t id = static_cast<int32_t>(Uniform(random, -1, batch.num_experts - 1));
    if (style == 1) id = favourite;                         // everything to one expert
    if (style == 2) id = std::min(id, favourite);           // high experts stay empty
    if (style == 3 && Uniform(random, 0, 1) == 0) id = -1;  // many routes masked
    batch.expert_ids.push_back(id);
  }
  return batch;
}

using Row = std::tuple<int32_t, int32_t>;            // source rank, source route
using ExpertRows = std::map<int, std::vector<Row>>;  // by global expert

// The definition, by sorting: the rows of every expert of all ranks.
ExpertRows SortedRows(const std::vector<RankRoutes>& routes, int topk) {
  const int64_t total = std::accumulate(
      routes.begin(), routes.end(), int64_t{0},
      [](int64_t sum, const RankRoutes& source) { return sum + source.num_tokens; });
  int num_bits = 0;
  while ((int64_t{1} << num_bits) < total) ++num_bits;
  std::map<int, std::vector<std::tuple<std::string, int, Row>>> keyed;
  int64_t global = 0;
  for (int source = 0; source < static_cast<int>(routes.size()); ++source) {
    for (int64_t token = 0; token < routes[source].num_tokens; ++token, ++global) {
      std::string reversed;  // lowest bit first: compares like the bit-reversed number
      for (int bit = 0; bit < num_bits; ++bit) reversed += (global >> bit & 1) ? '1' : '0';
      for (int k = 0; k < topk; ++k) {
        const int id = routes[source].expert_ids[token * topk + k];
        if (id < 0) continue;
        keyed[id].push_back({reversed, k, {source, static_cast<int32_t>(token * topk + k)}});
      }
    }
  }
  ExpertRows rows;
  for (auto& [expert, list] : keyed) {
    std::sort(list.begin(), list.end());
    for (const auto& [reversed, k, row] : list) rows[expert].push_back(row);
  }
  return rows;
}

// Checks the layout of one rank's table and moves its rows to `rows`.
void CollectRows(const RoutingTable& table, int first_expert, ExpertRows& rows) {
  ASSERT_EQ(table.expert_block_begin.size(), table.num_local_experts + 1u);
  ASSERT_EQ(table.expert_rows.size(), static_cast<size_t>(table.num_local_experts));
  ASSERT_EQ(table.expert_block_begin.front(), 0);
  ASSERT_EQ(table.expert_block_begin.back(), table.num_row_blocks());
  ASSERT_EQ(table.source_rank.size(), static_cast<size_t>(table.num_rows()));
  ASSERT_EQ(table.source_route.size(), static_cast<size_t>(table.num_rows()));
  int64_t num_valid_rows = 0;
  for (int expert = 0; expert < table.num_local_experts; ++expert) {
    const int64_t begin = table.expert_block_begin[expert];
    const int64_t end = table.expert_block_begin[expert + 1];
    const int64_t valid = table.expert_rows[expert];
    num_valid_rows += valid;
    ASSERT_EQ(end - begin, CeilDiv<int64_t>(valid, kRowBlock));  // never a block of padding
    for (int64_t row = begin * kRowBlock; row < end * kRowBlock; ++row) {
      if (row - begin * kRowBlock < valid) {
        rows[first_expert + expert].push_back({table.source_rank[row], table.source_route[row]});
      } else {
        ASSERT_EQ(table.source_rank[row], -1);
        ASSERT_EQ(table.source_route[row], -1);
      }
    }
    for (int64_t block = begin; block < end; ++block) {
      ASSERT_EQ(table.expert_of_block(block), expert);
      ASSERT_EQ(table.rows_in_block(block),
                std::min<int64_t>(kRowBlock, valid - (block - begin) * kRowBlock));
      ASSERT_GE(table.rows_in_block(block), 1);
    }
  }
  ASSERT_EQ(table.num_valid_rows(), num_valid_rows);
}

// Builds the tables of all ranks; the rows of all experts, in table order.
void BuildAll(const Batch& batch, const std::vector<RankRoutes>& routes,
              const ExpertPartition& partition, ExpertRows& rows) {
  for (int rank = 0; rank < partition.num_ranks(); ++rank) {
    const StatusOr<RoutingTable> table = BuildRoutingTable(routes, partition, rank, batch.topk);
    ASSERT_TRUE(table.ok()) << table.status();
    ASSERT_EQ(table->num_local_experts, partition.num_local_experts(rank));
    ASSERT_LE(table->num_rows(),
              RoutingTableCapacityRows(batch.num_tokens(), batch.topk, table->num_local_experts));
    ASSERT_NO_FATAL_FAILURE(CollectRows(*table, partition.begin[rank], rows));
  }
}

TEST(RoutingTableTest, HoldsEveryRouteOnceInTheDefinedOrder) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Batch batch = RandomBatch(random);
    const int ep_size = static_cast<int>(Uniform(random, 1, 8));
    const auto routes = SplitTokens(batch, RandomSplit(random, batch.num_tokens(), ep_size));
    const ExpertPartition partition = RandomPartition(random, batch.num_experts, ep_size);
    ExpertRows rows;
    ASSERT_NO_FATAL_FAILURE(BuildAll(batch, routes, partition, rows));
    ASSERT_EQ(rows, SortedRows(routes, batch.topk));
  }
}

// Each expert's rows as (global token, k).
std::map<int, std::vector<std::pair<int64_t, int>>> GlobalRows(
    const Batch& batch, const std::vector<RankRoutes>& routes, const ExpertRows& rows) {
  std::map<int, std::vector<std::pair<int64_t, int>>> global;
  for (const auto& [expert, list] : rows) {
    for (const auto& [source, route] : list) {
      const int64_t first_token =
          (routes[source].expert_ids - batch.expert_ids.data()) / batch.topk;
      global[expert].push_back({first_token + route / batch.topk, route % batch.topk});
    }
  }
  return global;
}

TEST(RoutingTableTest, RowOrderDoesNotDependOnTheSplitOverRanks) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Batch batch = RandomBatch(random);
    std::map<int, std::vector<std::pair<int64_t, int>>> expected;
    for (const int ep_size : {1, 2, 3, 4, 5, 8}) {
      const auto routes = SplitTokens(batch, RandomSplit(random, batch.num_tokens(), ep_size));
      const ExpertPartition partition = RandomPartition(random, batch.num_experts, ep_size);
      ExpertRows rows;
      ASSERT_NO_FATAL_FAILURE(BuildAll(batch, routes, partition, rows));
      if (ep_size == 1) expected = GlobalRows(batch, routes, rows);
      ASSERT_EQ(GlobalRows(batch, routes, rows), expected) << "EP size " << ep_size;
    }
  }
}

// Consecutive rows come from different ranks when tokens are spread evenly: no hot spot.
TEST(RoutingTableTest, ConsecutiveRowsSpreadOverTheSourceRanks) {
  constexpr int kRanks = 8;
  const Batch batch = {1, 1, std::vector<int32_t>(4096, 0)};
  const auto routes = SplitTokens(batch, std::vector<int64_t>(kRanks, 4096 / kRanks));
  const auto table = BuildRoutingTable(routes, EvenPartition(1, kRanks), 0, 1);
  ASSERT_TRUE(table.ok()) << table.status();
  for (int64_t row = 0; row < 4096; row += kRanks) {
    std::vector<int32_t> sources(&table->source_rank[row], &table->source_rank[row] + kRanks);
    std::sort(sources.begin(), sources.end());
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(sources[rank], rank) << "row " << row;
  }
}

TEST(RoutingTableTest, KnownSmallTable) {
  // Ranks with 0, 3 and 2 tokens; global ids 0..4, three bits; reversed order 0, 4, 2, 1, 3.
  const std::vector<int32_t> ids = {4, 4, -1, -1, 0, 4, 4, 1, 4, -1};
  const std::vector<RankRoutes> routes = {{nullptr, 0}, {ids.data(), 3}, {ids.data() + 6, 2}};
  const ExpertPartition partition = {{0, 1, 1, 5}};  // experts 1 to 4 on rank 2
  const auto table = BuildRoutingTable(routes, partition, 2, 2);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_THAT(table->expert_rows, ::testing::ElementsAre(1, 0, 0, 5));
  EXPECT_THAT(table->expert_block_begin, ::testing::ElementsAre(0, 1, 1, 1, 2));
  EXPECT_THAT(table->block_expert, ::testing::ElementsAre(0, 3));
  const std::vector<int32_t> rank(table->source_rank.begin() + 128,
                                  table->source_rank.begin() + 134);
  const std::vector<int32_t> route(table->source_route.begin() + 128,
                                   table->source_route.begin() + 134);
  EXPECT_THAT(rank, ::testing::ElementsAre(1, 1, 2, 1, 2, -1));  // tokens 0, 0, 4, 2, 3
  EXPECT_THAT(route, ::testing::ElementsAre(0, 1, 2, 5, 0, -1));
  // A rank that owns no experts has an empty table.
  const auto none = BuildRoutingTable(routes, partition, 1, 2);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->num_row_blocks(), 0);
  EXPECT_THAT(none->expert_block_begin, ::testing::ElementsAre(0));
}

TEST(RoutingTableTest, CountsAroundTheRowBlock) {
  for (const int32_t count : {1, 31, 32, 33, 127, 128, 129, 255, 256, 257}) {
    const std::vector<int32_t> ids(count, 1);
    const std::vector<RankRoutes> routes = {{ids.data(), count}};
    const auto table = BuildRoutingTable(routes, EvenPartition(3, 1), 0, 1);
    ASSERT_TRUE(table.ok()) << table.status();
    EXPECT_EQ(table->num_row_blocks(), (count + 127) / 128);
    EXPECT_EQ(table->rows_in_block(table->num_row_blocks() - 1), (count - 1) % 128 + 1);
  }
}

// Largest padded size over all ways to distribute `routes` routes over `experts` experts.
int64_t LargestRows(int64_t routes, int experts) {
  if (experts == 0) return 0;
  if (experts == 1) return RoundUp<int64_t>(routes, kRowBlock);
  int64_t largest = 0;
  for (int64_t first = 0; first <= routes; ++first) {
    largest = std::max(
        largest, RoundUp<int64_t>(first, kRowBlock) + LargestRows(routes - first, experts - 1));
  }
  return largest;
}

TEST(RoutingTableTest, CapacityIsTheExactWorstCase) {
  for (int experts = 0; experts <= 3; ++experts) {
    for (const int64_t routes : {0, 1, 2, 3, 127, 128, 129, 130, 131, 257, 258, 259, 390}) {
      EXPECT_EQ(RoutingTableCapacityRows(routes, 1, experts), LargestRows(routes, experts))
          << routes << " routes, " << experts << " experts";
    }
  }
  EXPECT_EQ(RoutingTableCapacityRows(65, 2, 2), 3 * 128);  // 130 routes = 1 + 129: 1 + 2 blocks
  EXPECT_EQ(RoutingTableCapacityRows(int64_t{1} << 40, 8, 4), (int64_t{1} << 43) + 3 * 128);
}

TEST(RoutingTableTest, EvenPartitionDiffersByAtMostOneLargerFirst) {
  EXPECT_THAT(EvenPartition(10, 4).begin, ::testing::ElementsAre(0, 3, 6, 8, 10));
  EXPECT_THAT(EvenPartition(2, 4).begin, ::testing::ElementsAre(0, 1, 2, 2, 2));
  EXPECT_THAT(EvenPartition(0, 2).begin, ::testing::ElementsAre(0, 0, 0));
  EXPECT_THAT(EvenPartition(8, 1).begin, ::testing::ElementsAre(0, 8));
}

void ExpectError(const StatusOr<RoutingTable>& table, StatusCode code, const std::string& text) {
  ASSERT_FALSE(table.ok());
  EXPECT_EQ(table.status().code(), code);
  EXPECT_THAT(table.status().message(), HasSubstr(text));
}

TEST(RoutingTableTest, ErrorsNameTheValue) {
  const std::vector<int32_t> ids = {0, 1, 2, 7, -2, 0};
  const std::vector<RankRoutes> routes = {{ids.data(), 1}, {ids.data() + 2, 2}};
  const auto build = [&](ExpertPartition partition, int rank = 0, int topk = 2) {
    return BuildRoutingTable(routes, partition, rank, topk);
  };
  ExpectError(build({{0, 4, 7}}), StatusCode::kOutOfRange,
              "expert id of rank 1, token 0, k 1: expected -1 to 6, got 7");
  ExpectError(build({{0, 4, 8}}), StatusCode::kOutOfRange,
              "expert id of rank 1, token 1, k 0: expected -1 to 7, got -2");
  ExpectError(build({{0, 8}}), StatusCode::kInvalidArgument, "expected 3 bounds");
  ExpectError(build({{0, 9, 8}}), StatusCode::kInvalidArgument, "never decrease");
  ExpectError(build({{1, 4, 8}}), StatusCode::kInvalidArgument, "start at 0");
  ExpectError(build({{0, 4, 8}}, 2), StatusCode::kInvalidArgument, "expected 0 to 1, got 2");
  ExpectError(build({{0, 4, 8}}, 0, 0), StatusCode::kInvalidArgument, "topk");
  const std::vector<RankRoutes> negative = {{ids.data(), -1}};
  ExpectError(BuildRoutingTable(negative, EvenPartition(8, 1), 0, 2), StatusCode::kInvalidArgument,
              "num_tokens of rank 0");
}

TEST(RoutingTableTest, WhatDoesNotFitInInt32IsAnErrorBeforeAnyWork) {
  // The pointers are never read.
  const std::vector<RankRoutes> wide = {{nullptr, 0}, {nullptr, (int64_t{1} << 31) / 8}};
  ExpectError(BuildRoutingTable(wide, EvenPartition(8, 2), 0, 8), StatusCode::kResourceExhausted,
              "rank 1 has 268435456 tokens with topk 8");
  const std::vector<RankRoutes> many(3, {nullptr, int64_t{1} << 30});
  ExpectError(BuildRoutingTable(many, EvenPartition(8, 3), 0, 1), StatusCode::kResourceExhausted,
              "the tokens of ranks 0 to 1");
}

TEST(RoutingTableTest, RowsThatDoNotFitInInt32AreAnError) {
  // One row for each of 2^24 experts: with padding 2^31 rows, one more than int32 can number.
  constexpr int32_t kExperts = 1 << 24;
  std::vector<int32_t> ids(kExperts);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<RankRoutes> routes = {{ids.data(), kExperts}};
  ExpectError(BuildRoutingTable(routes, EvenPartition(kExperts, 1), 0, 1),
              StatusCode::kResourceExhausted, "the rows of rank 0");
}

}  // namespace
}  // namespace mok
