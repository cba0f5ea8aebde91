#include "mok_schedule/testing/naive_order.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

namespace mok::testing {
namespace {

struct Minibatch {
  int macrobatch;
  std::vector<int> blocks;
  bool ends_macrobatch;
};

class NaiveOrder {
 public:
  explicit NaiveOrder(const ProgramCase& program_case)
      : shape_(program_case.shape), table_(program_case.table) {
    for (int block = 0; block < static_cast<int>(table_.block_expert.size()); ++block) {
      const int macrobatch = block / static_cast<int>(shape_.ring.macrobatch_blocks);
      const bool new_macrobatch =
          minibatches_.empty() || minibatches_.back().macrobatch != macrobatch;
      if (new_macrobatch && !minibatches_.empty()) minibatches_.back().ends_macrobatch = true;
      if (new_macrobatch ||
          static_cast<int64_t>(minibatches_.back().blocks.size()) == shape_.ring.minibatch_blocks) {
        minibatches_.push_back({macrobatch, {}, false});
      }
      minibatches_.back().blocks.push_back(block);
    }
    if (!minibatches_.empty()) minibatches_.back().ends_macrobatch = true;
  }

  std::vector<Task> Forward() {
    std::stable_sort(
        minibatches_.begin(), minibatches_.end(),
        [](const Minibatch& a, const Minibatch& b) { return a.macrobatch > b.macrobatch; });
    Add(TaskKind::kEntryBarrier);
    AddTokenBlocks(TaskKind::kSharedGateUp, shape_.shared_intermediate_tiles);
    AddTokenBlocks(TaskKind::kSharedDown, shape_.has_shared_expert() ? shape_.hidden_tiles : 0);
    if (!minibatches_.empty()) AddBlocks(TaskKind::kDispatch, minibatches_[0], 1);
    for (size_t i = 0; i < minibatches_.size(); ++i) {
      AddBlocks(TaskKind::kGateUp, minibatches_[i], shape_.intermediate_tiles);
      AddBlocks(TaskKind::kDown, minibatches_[i], shape_.hidden_tiles);
      if (i + 1 < minibatches_.size()) AddBlocks(TaskKind::kDispatch, minibatches_[i + 1], 1);
      AddBlocks(TaskKind::kCombine, minibatches_[i], 1);
    }
    Add(TaskKind::kExitBarrier);
    AddTokenBlocks(TaskKind::kTokenReduce, 1);
    return tasks_;
  }

  std::vector<Task> Backward() {
    Add(TaskKind::kEntryBarrier);
    if (shape_.kept_macrobatches == 0) {
      AddTokenBlocks(TaskKind::kSharedRecomputeGateUp, shape_.shared_intermediate_tiles);
    }
    AddTokenBlocks(TaskKind::kSharedDownGrad, shape_.shared_intermediate_tiles);
    AddTokenBlocks(TaskKind::kSharedInputGrad,
                   shape_.has_shared_expert() ? shape_.hidden_tiles : 0);
    if (!minibatches_.empty()) AddIncoming(minibatches_[0]);
    for (size_t i = 0; i < minibatches_.size(); ++i) {
      const Minibatch& minibatch = minibatches_[i];
      if (minibatch.macrobatch >= shape_.kept_macrobatches) {
        AddBlocks(TaskKind::kRecomputeGateUp, minibatch, shape_.intermediate_tiles);
      }
      AddBlocks(TaskKind::kDownGrad, minibatch, shape_.intermediate_tiles);
      AddBlocks(TaskKind::kInputGrad, minibatch, shape_.hidden_tiles);
      if (minibatch.ends_macrobatch) AddPieces(minibatch.macrobatch);
      if (i + 1 < minibatches_.size()) AddIncoming(minibatches_[i + 1]);
      AddBlocks(TaskKind::kReverseDispatch, minibatch, 1);
    }
    for (int tile = 0; tile < shape_.shared_weight_grad_down_tiles; ++tile) {
      Add(TaskKind::kSharedWeightGradDown, -1, tile);
    }
    for (int tile = 0; tile < shape_.shared_weight_grad_gate_up_tiles; ++tile) {
      Add(TaskKind::kSharedWeightGradGateUp, -1, tile);
    }
    for (int expert = 0; expert < static_cast<int>(table_.expert_rows.size()); ++expert) {
      if (table_.expert_rows[expert] == 0) AddWeightGrad(expert, -1);
    }
    Add(TaskKind::kExitBarrier);
    AddTokenBlocks(TaskKind::kTokenReduce, 1);
    return tasks_;
  }

 private:
  void Add(TaskKind kind, int block = -1, int tile = 0, int expert = -1, int macrobatch = -1) {
    tasks_.push_back({kind, block, tile, expert, macrobatch});
  }

  void AddTokenBlocks(TaskKind kind, int tiles) {
    const int panel = static_cast<int>(shape_.ring.minibatch_blocks);
    const int end = static_cast<int>(shape_.token_blocks);
    for (int first = 0; first < end; first += panel) {
      for (int tile = 0; tile < tiles; ++tile) {
        for (int block = first; block < std::min(first + panel, end); ++block) {
          Add(kind, block, tile);
        }
      }
    }
  }

  void AddBlocks(TaskKind kind, const Minibatch& minibatch, int tiles) {
    for (int tile = 0; tile < tiles; ++tile) {
      for (const int block : minibatch.blocks) {
        Add(kind, block, tile, table_.block_expert[block], minibatch.macrobatch);
      }
    }
  }

  void AddIncoming(const Minibatch& minibatch) {
    if (minibatch.macrobatch >= shape_.kept_macrobatches) {
      AddBlocks(TaskKind::kRecomputeDispatch, minibatch, 1);
    }
    AddBlocks(TaskKind::kReverseCombine, minibatch, 1);
  }

  void AddPieces(int macrobatch) {
    std::set<int> experts;
    for (int block = 0; block < static_cast<int>(table_.block_expert.size()); ++block) {
      if (block / shape_.ring.macrobatch_blocks == macrobatch) {
        experts.insert(table_.block_expert[block]);
      }
    }
    for (const int expert : experts) AddWeightGrad(expert, macrobatch);
  }

  void AddWeightGrad(int expert, int macrobatch) {
    for (int tile = 0; tile < shape_.weight_grad_down_tiles; ++tile) {
      Add(TaskKind::kWeightGradDown, -1, tile, expert, macrobatch);
    }
    for (int tile = 0; tile < shape_.weight_grad_gate_up_tiles; ++tile) {
      Add(TaskKind::kWeightGradGateUp, -1, tile, expert, macrobatch);
    }
  }

  const ProgramShape& shape_;
  const BlockTable& table_;
  std::vector<Minibatch> minibatches_;
  std::vector<Task> tasks_;
};

}  // namespace

std::vector<Task> NaiveMergedOrder(const ProgramCase& program_case) {
  NaiveOrder order(program_case);
  return program_case.shape.pass == Pass::kForward ? order.Forward() : order.Backward();
}

}  // namespace mok::testing
