#include "mok_megakernel/workspace.h"

#include <cstring>
#include <utility>

namespace mok {

Workspace::Workspace(const WorkspaceShape& shape, std::unique_ptr<SymmetricHeap> heap,
                     std::chrono::nanoseconds timeout)
    : shape_(shape),
      regions_(LayOutHeap(shape)),
      timeout_(timeout),
      heap_(std::move(heap)),
      handshake_(*heap_, regions_, shape) {}

HandshakeRecord Workspace::NewRecord(Operation operation) const {
  HandshakeRecord record;
  record.operation = operation;
  record[AgreedField::kMaxTokens] = shape_.max_tokens;
  record[AgreedField::kHidden] = shape_.hidden;
  record[AgreedField::kTopk] = shape_.topk;
  record[AgreedField::kDType] = static_cast<int64_t>(shape_.dtype);
  return record;
}

Status Workspace::Meet(const HandshakeRecord& record, const PublishedRoutes& routes) {
  WaitContext context;
  context.rank = shape_.rank;
  context.task = OperationName(record.operation);
  context.task_index = handshake_.round();
  context.deadline = std::chrono::steady_clock::now() + timeout_;
  Status verdict;
  const Status waited = handshake_.Run(record, routes, context, &verdict);
  if (!waited.ok()) {
    Break(waited);
    return waited;
  }
  return verdict;
}

Status Workspace::MeetWithError(Operation operation, const Status& error) {
  HandshakeRecord record = NewRecord(operation);
  record.SetError(error);
  return Meet(record, {});
}

Status Workspace::CheckUsable() const {
  const std::lock_guard<std::mutex> lock(broken_mutex_);
  return broken_;
}

void Workspace::Break(const Status& error) {
  const std::lock_guard<std::mutex> lock(broken_mutex_);
  if (broken_.ok()) broken_ = error;
}

Status Workspace::ReserveWorkers(int num_workers, Isa isa) {
  MOK_RETURN_IF_ERROR(pool_.Reserve(num_workers));
  if (!tile_workers_.empty() && tile_workers_.front().isa() != isa) tile_workers_.clear();
  while (static_cast<int>(tile_workers_.size()) < num_workers) {
    tile_workers_.emplace_back(isa, shape_.dtype);
  }
  return OkStatus();
}

void Workspace::Poison() {
  std::memset(heap_->local() + regions_.data, 0xFF, regions_.bytes - regions_.data);
  if (scratch_.bytes() > 0) std::memset(scratch_.data(), 0xFF, scratch_.bytes());
}

}  // namespace mok
