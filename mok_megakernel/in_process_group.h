// Ranks that are threads of one process: hands each of them its symmetric heap.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "mok_comm/symmetric_heap.h"
#include "mok_core/status.h"
#include "mok_megakernel/workspace_layout.h"

namespace mok {

// The first rank to come decides the shape of the heaps; none waits for another.
class InProcessGroup {
 public:
  explicit InProcessGroup(int ep_size) : heaps_(static_cast<size_t>(ep_size)) {}

  int ep_size() const { return static_cast<int>(heaps_.size()); }

  // The heap of shape.rank. kInvalidArgument when the shape differs from that of the first rank
  // (names field, both values and both ranks); kFailedPrecondition when the rank has come before.
  StatusOr<std::unique_ptr<SymmetricHeap>> TakeHeap(const WorkspaceShape& shape);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<SymmetricHeap>> heaps_;  // [ep_size]; null once taken
  bool created_ = false;
  WorkspaceShape first_;
};

}  // namespace mok
