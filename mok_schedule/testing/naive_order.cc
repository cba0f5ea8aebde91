#include "mok_schedule/testing/naive_order.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

namespace mok::testing {
namespace {

using Blocks = std::vector<int>;

struct Macrobatch {
  int index;
  std::vector<Blocks> minibatches;
};

class NaiveOrder {
 public:
  explicit NaiveOrder(const ProgramCase& program_case)
      : shape_(program_case.shape), table_(program_case.table) {
    for (int block = 0; block < static_cast<int>(table_.block_expert.size()); ++block) {
      const int index = block / static_cast<int>(shape_.ring.macrobatch_blocks);
      if (macrobatches_.empty() || macrobatches_.back().index != index) {
        macrobatches_.push_back({index, {}});
      }
      std::vector<Blocks>& minibatches = macrobatches_.back().minibatches;
      if (minibatches.empty() ||
          static_cast<int64_t>(minibatches.back().size()) == shape_.ring.minibatch_blocks) {
        minibatches.emplace_back();
      }
      minibatches.back().push_back(block);
    }
  }

  std::vector<Task> Forward() {
    std::reverse(macrobatches_.begin(), macrobatches_.end());
    Add(TaskKind::kEntryBarrier);
    AddTokenBlocks(TaskKind::kSharedGateUp, shape_.shared_intermediate_tiles);
    AddLeadIn(0);
    for (size_t m = 0; m < macrobatches_.size(); ++m) ForwardMacrobatch(m);
    if (shape_.fused_reduce_width == 0) AddShared(TaskKind::kSharedDown);
    Add(TaskKind::kExitBarrier);
    AddReduction(TaskKind::kSharedDown);
    return tasks_;
  }

  std::vector<Task> Backward() {
    Add(TaskKind::kEntryBarrier);
    if (shape_.kept_macrobatches == 0) {
      AddTokenBlocks(TaskKind::kSharedRecomputeGateUp, shape_.shared_intermediate_tiles);
    }
    AddTokenBlocks(TaskKind::kSharedDownGrad, shape_.shared_down_grad_tiles);
    AddLeadIn(0);
    for (size_t m = 0; m < macrobatches_.size(); ++m) BackwardMacrobatch(m);
    if (shape_.fused_reduce_width == 0) AddShared(TaskKind::kSharedInputGrad);
    if (!shape_.early_shared_weight_grads || macrobatches_.empty()) AddSharedWeightGrads();
    for (int expert = 0; expert < static_cast<int>(table_.expert_rows.size()); ++expert) {
      if (table_.expert_rows[expert] == 0) AddWeightGrad(expert, -1);
    }
    Add(TaskKind::kExitBarrier);
    AddReduction(TaskKind::kSharedInputGrad);
    return tasks_;
  }

 private:
  void AddSharedWeightGrads() {
    for (int tile = 0; tile < shape_.shared_weight_grad_down_tiles; ++tile) {
      Add(TaskKind::kSharedWeightGradDown, -1, tile);
    }
    for (int tile = 0; tile < shape_.shared_weight_grad_gate_up_tiles; ++tile) {
      Add(TaskKind::kSharedWeightGradGateUp, -1, tile);
    }
  }

  // Minibatch j of macrobatch number m of the execution order; empty where there is none.
  Blocks Minibatch(size_t m, int j) const {
    const std::vector<Blocks>& minibatches = macrobatches_[m].minibatches;
    return j >= 0 && j < static_cast<int>(minibatches.size()) ? minibatches[j] : Blocks();
  }

  void ForwardMacrobatch(size_t m) {
    const int n = static_cast<int>(macrobatches_[m].minibatches.size());
    AddGateUp(Minibatch(m, 0));
    for (int j = 0; j < n; ++j) {
      AddGateUp(Minibatch(m, j + 1));
      AddExchange(TaskKind::kDispatch, Minibatch(m, j + 3));
      if (j == std::max(0, n - 2)) AddLeadIn(m + 1);
      AddExchange(TaskKind::kCombine, Minibatch(m, j - 1));
      AddOutputs(TaskKind::kDown, Minibatch(m, j));
    }
    AddExchange(TaskKind::kCombine, Minibatch(m, n - 1));
  }

  void BackwardMacrobatch(size_t m) {
    const int n = static_cast<int>(macrobatches_[m].minibatches.size());
    const bool recomputed = macrobatches_[m].index >= shape_.kept_macrobatches;
    const int recompute_tiles = recomputed ? shape_.intermediate_tiles : 0;
    AddOutputTiles(TaskKind::kRecomputeGateUp, Minibatch(m, 0), recompute_tiles);
    AddOutputTiles(TaskKind::kRecomputeGateUp, Minibatch(m, 1), recompute_tiles);
    AddOutputTiles(TaskKind::kDownGrad, Minibatch(m, 0), shape_.down_grad_tiles);
    if (shape_.early_shared_weight_grads && m == 0) AddSharedWeightGrads();
    for (int j = 0; j < n; ++j) {
      AddOutputTiles(TaskKind::kRecomputeGateUp, Minibatch(m, j + 2), recompute_tiles);
      AddOutputTiles(TaskKind::kDownGrad, Minibatch(m, j + 1), shape_.down_grad_tiles);
      if (recomputed) AddExchange(TaskKind::kRecomputeDispatch, Minibatch(m, j + 3));
      AddExchange(TaskKind::kReverseCombine, Minibatch(m, j + 3));
      AddExchange(TaskKind::kReverseDispatch, Minibatch(m, j - 1));
      AddOutputs(TaskKind::kInputGrad, Minibatch(m, j));
    }
    AddPieces(macrobatches_[m].index);
    AddExchange(TaskKind::kReverseDispatch, Minibatch(m, n - 1));
    AddLeadIn(m + 1);
  }

  // Brings in the first three minibatches of a macrobatch.
  void AddLeadIn(size_t m) {
    if (m >= macrobatches_.size()) return;
    const bool forward = shape_.pass == Pass::kForward;
    if (!forward && macrobatches_[m].index >= shape_.kept_macrobatches) {
      for (int j = 0; j < 3; ++j) AddExchange(TaskKind::kRecomputeDispatch, Minibatch(m, j));
    }
    for (int j = 0; j < 3; ++j) {
      AddExchange(forward ? TaskKind::kDispatch : TaskKind::kReverseCombine, Minibatch(m, j));
    }
  }

  void Add(TaskKind kind, int block = -1, int tile = 0, int expert = -1, int macrobatch = -1) {
    tasks_.push_back({kind, block, tile, expert, macrobatch});
  }

  void AddTokenBlocks(TaskKind kind, int tiles, int panel_blocks = 0) {
    const int panel =
        panel_blocks > 0 ? panel_blocks : static_cast<int>(shape_.ring.minibatch_blocks);
    const int end = static_cast<int>(shape_.token_blocks);
    for (int first = 0; first < end; first += panel) {
      for (int tile = 0; tile < tiles; ++tile) {
        for (int block = first; block < std::min(first + panel, end); ++block) {
          Add(kind, block, tile);
        }
      }
    }
  }

  // The shared expert's last tiles.
  void AddShared(TaskKind kind) {
    AddTokenBlocks(kind, shape_.has_shared_expert() ? shape_.hidden_tiles : 0,
                   shape_.output_panel_blocks);
  }

  void AddReduction(TaskKind last_shared) {
    if (shape_.fused_reduce_width > 0) {
      int tasks = 0;
      for (int tile = 0; tile < shape_.hidden_tiles; tile += shape_.fused_reduce_width) ++tasks;
      return AddTokenBlocks(last_shared, tasks);
    }
    for (int block = 0; block < static_cast<int>(shape_.token_blocks); ++block) {
      for (int part = 0; part < shape_.token_reduce_tiles; ++part) {
        Add(TaskKind::kTokenReduce, block, part);
      }
    }
  }

  void AddBlock(TaskKind kind, int block, int tile) {
    Add(kind, block, tile, table_.block_expert[block],
        block / static_cast<int>(shape_.ring.macrobatch_blocks));
  }

  void AddOutputTiles(TaskKind kind, const Blocks& blocks, int tiles) {
    for (int tile = 0; tile < tiles; ++tile) {
      for (const int block : blocks) AddBlock(kind, block, tile);
    }
  }

  void AddPanels(TaskKind kind, const Blocks& blocks, int tiles, int panel_blocks) {
    const size_t panel = panel_blocks > 0 ? panel_blocks : blocks.size();
    for (size_t first = 0; first < blocks.size(); first += panel) {
      const size_t end = std::min(first + panel, blocks.size());
      AddOutputTiles(kind, Blocks(blocks.begin() + first, blocks.begin() + end), tiles);
    }
  }
  void AddGateUp(const Blocks& blocks) {
    AddPanels(TaskKind::kGateUp, blocks, shape_.intermediate_tiles, shape_.gate_up_panel_blocks);
  }
  void AddOutputs(TaskKind kind, const Blocks& blocks) {
    AddPanels(kind, blocks, shape_.hidden_tiles, shape_.output_panel_blocks);
  }

  void AddExchange(TaskKind kind, const Blocks& blocks) {
    for (const int block : blocks) {
      for (int tile = 0; tile < shape_.exchange_tiles; ++tile) AddBlock(kind, block, tile);
    }
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
  std::vector<Macrobatch> macrobatches_;
  std::vector<Task> tasks_;
};

}  // namespace

std::vector<Task> NaiveMergedOrder(const ProgramCase& program_case) {
  NaiveOrder order(program_case);
  return program_case.shape.pass == Pass::kForward ? order.Forward() : order.Backward();
}

}  // namespace mok::testing
