#include "mok_megakernel/in_process_group.h"

#include <utility>

namespace mok {
namespace {

Status CompareField(const char* name, int64_t first, int64_t mine, int first_rank, int my_rank) {
  if (first == mine) return OkStatus();
  return InvalidArgumentError("workspace_create: ranks disagree on ", name, ": rank ", first_rank,
                              " has ", first, ", rank ", my_rank, " has ", mine);
}

Status CompareShapes(const WorkspaceShape& first, const WorkspaceShape& mine) {
  const auto compare = [&](const char* name, int64_t first_value, int64_t my_value) {
    return CompareField(name, first_value, my_value, first.rank, mine.rank);
  };
  MOK_RETURN_IF_ERROR(compare("max_tokens", first.max_tokens, mine.max_tokens));
  MOK_RETURN_IF_ERROR(compare("hidden", first.hidden, mine.hidden));
  MOK_RETURN_IF_ERROR(compare("topk", first.topk, mine.topk));
  return compare("dtype", static_cast<int64_t>(first.dtype), static_cast<int64_t>(mine.dtype));
}

}  // namespace

StatusOr<std::unique_ptr<SymmetricHeap>> InProcessGroup::TakeHeap(const WorkspaceShape& shape) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (shape.ep_size != ep_size()) {
    return InvalidArgumentError("ep_size: the group has ", ep_size(), " ranks, got ",
                                shape.ep_size);
  }
  if (!created_) {
    MOK_ASSIGN_OR_RETURN(heaps_, CreateInProcessHeaps(ep_size(), LayOutHeap(shape).bytes));
    first_ = shape;
    created_ = true;
  }
  MOK_RETURN_IF_ERROR(CompareShapes(first_, shape));
  std::unique_ptr<SymmetricHeap>& heap = heaps_[static_cast<size_t>(shape.rank)];
  if (heap == nullptr) {
    return FailedPreconditionError("rank ", shape.rank,
                                   " of this group has created its workspace before");
  }
  return std::move(heap);
}

}  // namespace mok
