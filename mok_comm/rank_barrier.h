// Barrier over all ranks of a symmetric heap, and records that ranks show each other around one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "mok_comm/symmetric_heap.h"
#include "mok_core/counter.h"
#include "mok_core/status.h"

namespace mok {

// Split barrier. Each rank holds one arrival counter per peer in its own region; arriving adds 1 to
// this rank's counter on every rank, waiting polls local memory only. Counters are monotonic: after
// n barriers each stands at n (the epoch), and nothing is ever reset.
//
// Whatever a rank wrote, to any rank's heap, before Arrive is visible to every rank after Wait.
// One object per rank; calls of one object must not overlap.
class RankBarrier {
 public:
  // Bytes of the region, for `size` ranks.
  static size_t RegionBytes(int size) { return static_cast<size_t>(size) * sizeof(Counter); }

  // The region starts at `offset` (a multiple of 64) on every rank and is zero at first. The heap
  // outlives the barrier.
  RankBarrier(const SymmetricHeap& heap, size_t offset);

  // Tells all ranks that this one has come. Never blocks. kFailedPrecondition when this rank has
  // arrived already and not waited.
  Status Arrive();

  // Blocks until every rank has arrived as often as this one. On kDeadlineExceeded or kAborted
  // (context.cancelled) the text names every missing rank with the epoch expected and observed; the
  // wait may then be repeated. kFailedPrecondition without an Arrive before.
  Status Wait(const WaitContext& context);

  Status ArriveAndWait(const WaitContext& context);

  // How many barriers this rank has arrived at.
  uint64_t epoch() const { return epoch_; }

 private:
  Counter* Arrivals(int rank) const;  // [size] counters on `rank`

  const SymmetricHeap& heap_;
  const size_t offset_;
  uint64_t epoch_ = 0;
  bool waiting_ = false;  // between Arrive and a successful Wait
};

// One fixed-size record per rank: each rank publishes its record before it arrives at a barrier and
// reads all records after it. Two slots per rank alternate, so that exactly one barrier per round
// is enough: a rank overwrites round n in round n + 2, which it reaches only after everybody has
// read n and arrived at the barrier of n + 1.
//   message.Publish(bytes); barrier.ArriveAndWait(...); message.Read(peer) ...
class RankMessage {
 public:
  // Bytes of the region, for records of `record_bytes`.
  static size_t RegionBytes(size_t record_bytes) { return 2 * SlotBytes(record_bytes); }

  // The region starts at `offset` (a multiple of 64) on every rank. The heap outlives the object.
  RankMessage(const SymmetricHeap& heap, size_t offset, size_t record_bytes);

  // Starts a round: copies the record (at most record_bytes; the rest is zeroed) into this rank's
  // slot.
  void Publish(std::span<const std::byte> record);

  // The record of rank `peer` in this round, record_bytes long. Valid after the barrier and until
  // this rank arrives at the next one.
  std::span<const std::byte> Read(int peer) const;

 private:
  static size_t SlotBytes(size_t record_bytes) { return RoundUp(record_bytes, kCacheLineBytes); }
  std::byte* Slot(int rank) const;

  const SymmetricHeap& heap_;
  const size_t offset_;
  const size_t record_bytes_;
  uint64_t round_ = 0;
};

}  // namespace mok
