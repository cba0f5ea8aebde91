#include "mok_comm/rank_barrier.h"

#include <cstring>
#include <string>

namespace mok {

RankBarrier::RankBarrier(const SymmetricHeap& heap, size_t offset) : heap_(heap), offset_(offset) {
  MOK_CHECK(offset % alignof(Counter) == 0) << "barrier region at byte " << offset;
  MOK_CHECK(offset + RegionBytes(heap.size()) <= heap.bytes())
      << "barrier region at byte " << offset << " ends outside a heap of " << heap.bytes();
}

Counter* RankBarrier::Arrivals(int rank) const {
  return reinterpret_cast<Counter*>(heap_.base(rank) + offset_);
}

Status RankBarrier::Arrive() {
  if (waiting_) {
    return FailedPreconditionError("rank ", heap_.rank(), " arrives at barrier ", epoch_ + 1,
                                   " without having waited at barrier ", epoch_);
  }
  waiting_ = true;
  ++epoch_;
  for (int peer = 0; peer < heap_.size(); ++peer) Signal(Arrivals(peer)[heap_.rank()]);
  return OkStatus();
}

Status RankBarrier::Wait(const WaitContext& context) {
  if (!waiting_) {
    return FailedPreconditionError("rank ", heap_.rank(), " waits at barrier ", epoch_ + 1,
                                   " without having arrived");
  }
  const Counter* arrivals = Arrivals(heap_.rank());
  const Status waited = WaitAllAtLeast(arrivals, heap_.size(), epoch_, context);
  if (!waited.ok()) {
    std::string missing;
    for (int peer = 0; peer < heap_.size(); ++peer) {
      const uint64_t observed = Read(arrivals[peer]);
      if (observed >= epoch_) continue;
      missing +=
          StrCat(missing.empty() ? "" : ", ", "rank ", peer, " (observed epoch ", observed, ")");
    }
    if (!missing.empty()) {
      const char* why = waited.code() == StatusCode::kAborted ? "cancelled" : "timed out";
      return Status(waited.code(),
                    StrCat("rank ", context.rank, ", task ", context.task, " ", context.task_index,
                           ": ", why, " in the barrier of all ranks: expected epoch ", epoch_,
                           " of everyone, missing ", missing));
    }
  }
  waiting_ = false;
  return OkStatus();
}

Status RankBarrier::ArriveAndWait(const WaitContext& context) {
  MOK_RETURN_IF_ERROR(Arrive());
  return Wait(context);
}

RankMessage::RankMessage(const SymmetricHeap& heap, size_t offset, size_t record_bytes)
    : heap_(heap), offset_(offset), record_bytes_(record_bytes) {
  MOK_CHECK(offset % kCacheLineBytes == 0) << "message region at byte " << offset;
  MOK_CHECK(offset + RegionBytes(record_bytes) <= heap.bytes())
      << "message region at byte " << offset << " ends outside a heap of " << heap.bytes();
}

std::byte* RankMessage::Slot(int rank) const {
  return heap_.base(rank) + offset_ + (round_ % 2) * SlotBytes(record_bytes_);
}

void RankMessage::Publish(std::span<const std::byte> record) {
  MOK_CHECK(record.size() <= record_bytes_)
      << "record of " << record.size() << " bytes in a slot of " << record_bytes_;
  ++round_;
  std::byte* slot = Slot(heap_.rank());
  if (!record.empty()) std::memcpy(slot, record.data(), record.size());
  std::memset(slot + record.size(), 0, record_bytes_ - record.size());
}

std::span<const std::byte> RankMessage::Read(int peer) const { return {Slot(peer), record_bytes_}; }

}  // namespace mok
