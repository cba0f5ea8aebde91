// Random task programs for property tests.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "mok_schedule/task_program.h"

namespace mok::testing {

// The part of a routing table that a task program reads.
struct BlockTable {
  std::vector<int32_t> expert_block_begin = {0};
  std::vector<int32_t> expert_rows;
  std::vector<int32_t> block_expert;

  // Appends an expert with this many valid rows.
  void AddExpert(int64_t rows);
  RoutingTableView view() const;
};

// A table, and a shape that fits it.
struct ProgramCase {
  BlockTable table;
  ProgramShape shape;

  TaskProgram Create() const;
  std::string Description() const;
};

// Small programs of many forms: no rows, no tokens, no shared expert, experts without rows or over
// many macrobatches, macrobatch shorter than, equal to and no multiple of the minibatch.
ProgramCase RandomProgram(std::mt19937_64& random, Pass pass);

// A case with experts of the given sizes in row blocks; one tile everywhere and no tokens.
ProgramCase ProgramOfBlocks(Pass pass, const std::vector<int64_t>& expert_blocks,
                            int64_t minibatch_blocks, int64_t macrobatch_blocks);

int64_t Uniform(std::mt19937_64& random, int64_t low, int64_t high);

}  // namespace mok::testing
