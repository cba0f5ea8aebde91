#include "mok_schedule/testing/random_program.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "mok_core/bits.h"
#include "mok_core/status.h"

namespace mok::testing {

int64_t Uniform(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

void BlockTable::AddExpert(int64_t rows) {
  const auto expert = static_cast<int32_t>(expert_rows.size());
  expert_rows.push_back(static_cast<int32_t>(rows));
  block_expert.resize(block_expert.size() + CeilDiv<int64_t>(rows, kRowBlock), expert);
  expert_block_begin.push_back(static_cast<int32_t>(block_expert.size()));
}

RoutingTableView BlockTable::view() const {
  return {nullptr,
          nullptr,
          expert_block_begin.data(),
          expert_rows.data(),
          block_expert.data(),
          static_cast<int32_t>(expert_rows.size())};
}

TaskProgram ProgramCase::Create() const {
  StatusOr<TaskProgram> program = TaskProgram::Create(shape, table.view());
  MOK_CHECK(program.ok()) << program.status() << " for " << Description();
  return std::move(program).value();
}

std::string ProgramCase::Description() const {
  std::string text =
      StrCat(shape.pass == Pass::kForward ? "forward" : "backward", ", minibatch ",
             shape.ring.minibatch_blocks, ", macrobatch ", shape.ring.macrobatch_blocks, ", tiles ",
             shape.intermediate_tiles, " ", shape.down_grad_tiles, " ", shape.hidden_tiles, " ",
             shape.weight_grad_down_tiles, " ", shape.weight_grad_gate_up_tiles, ", panels ",
             shape.output_panel_blocks, " ", shape.gate_up_panel_blocks, ", exchange tiles ",
             shape.exchange_tiles, ", reduce tiles ", shape.token_reduce_tiles, ", token blocks ",
             shape.token_blocks, ", shared tiles ", shape.shared_intermediate_tiles, " ",
             shape.shared_down_grad_tiles, ", kept ", shape.kept_macrobatches,
             shape.early_shared_weight_grads ? ", early" : "", ", fused ", shape.fused_reduce_width,
             ", window ", shape.d_x_window_blocks, ", rows of experts");
  for (const int32_t rows : table.expert_rows) text += StrCat(" ", rows);
  return text;
}

ProgramCase RandomProgram(std::mt19937_64& random, Pass pass) {
  ProgramCase result;
  const int64_t num_experts = Uniform(random, 0, 6);
  const int64_t largest = Uniform(random, 0, 6) * kRowBlock;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    int64_t rows = Uniform(random, 0, 3) == 0 ? 0 : Uniform(random, 0, largest);
    if (Uniform(random, 0, 9) == 0) rows += 8 * kRowBlock;
    result.table.AddExpert(rows);
  }
  ProgramShape& shape = result.shape;
  shape.pass = pass;
  shape.ring.num_row_blocks = result.table.view().num_row_blocks();
  shape.ring.macrobatch_blocks = Uniform(random, 1, 9);
  shape.ring.minibatch_blocks =
      Uniform(random, 0, 3) == 0 ? shape.ring.macrobatch_blocks : Uniform(random, 1, 5);
  shape.intermediate_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  shape.down_grad_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  shape.hidden_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  shape.weight_grad_down_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  shape.weight_grad_gate_up_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  for (int32_t* panel : {&shape.output_panel_blocks, &shape.gate_up_panel_blocks}) {
    *panel = static_cast<int32_t>(
        std::max<int64_t>(0, Uniform(random, -3, shape.ring.minibatch_blocks)));
  }
  shape.exchange_tiles = 1 << std::max<int64_t>(0, Uniform(random, -2, 2));
  shape.token_reduce_tiles = 1 << std::max<int64_t>(0, Uniform(random, -2, 2));
  shape.token_blocks = Uniform(random, 0, 4);
  shape.kept_macrobatches = static_cast<int32_t>(Uniform(random, 0, 1));
  shape.early_shared_weight_grads = Uniform(random, 0, 1) == 1;
  if (Uniform(random, 0, 2) > 0) {
    const int64_t macrobatch = shape.ring.macrobatch_blocks;
    shape.d_x_window_blocks =
        Uniform(random, std::min(shape.ring.minibatch_blocks, macrobatch), macrobatch);
  }
  if (Uniform(random, 0, 2) > 0) {
    shape.shared_intermediate_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
    shape.shared_down_grad_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
    shape.shared_weight_grad_down_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
    shape.shared_weight_grad_gate_up_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
    shape.fused_reduce_width = static_cast<int32_t>(std::max<int64_t>(0, Uniform(random, -2, 3)));
  }
  return result;
}

ProgramCase ProgramOfBlocks(Pass pass, const std::vector<int64_t>& expert_blocks,
                            int64_t minibatch_blocks, int64_t macrobatch_blocks) {
  ProgramCase result;
  for (const int64_t blocks : expert_blocks) result.table.AddExpert(blocks * kRowBlock);
  result.shape.pass = pass;
  result.shape.ring = {result.table.view().num_row_blocks(), minibatch_blocks, macrobatch_blocks};
  return result;
}

}  // namespace mok::testing
