// Reductions and scans over the threads of a block. All threads of the block call them.
#pragma once

#include <cstdint>

#include "mok_core/device/device.h"

namespace mok {

// Scratch in shared memory, free again when an operation returns.
template <int kThreads>
struct BlockScratch {
  static constexpr int kWarps = kThreads / 32;
  int64_t first[kWarps];
  int64_t second[kWarps];
};

// A value and what decides which one is kept.
struct Candidate {
  int64_t order;
  int64_t value;
};

// The candidate of lowest order; candidates of one order have one value.
template <int kThreads>
MOK_DEVICE Candidate BlockMinimum(BlockScratch<kThreads>& scratch, Candidate candidate) {
  const int thread = static_cast<int>(ThreadIndex().x);
  for (int distance = 16; distance > 0; distance /= 2) {
    const Candidate other = {ShuffleXor(candidate.order, distance),
                             ShuffleXor(candidate.value, distance)};
    if (other.order < candidate.order) candidate = other;
  }
  if (thread % 32 == 0) {
    scratch.first[thread / 32] = candidate.order;
    scratch.second[thread / 32] = candidate.value;
  }
  SyncBlock();
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    const Candidate other = {scratch.first[warp], scratch.second[warp]};
    if (other.order < candidate.order) candidate = other;
  }
  SyncBlock();
  return candidate;
}

struct Sum {
  static constexpr int64_t kIdentity = 0;
  template <class T>
  MOK_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

// Of values >= -1.
struct Maximum {
  static constexpr int64_t kIdentity = -1;
  template <class T>
  MOK_DEVICE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// Replaces values[i] in shared memory by combine(values[0], ..., values[i - 1]) for i = 0 .. count:
// values[count] becomes the total. The block is synchronised before the call by whoever wrote the
// values, and has been synchronised when it returns.
template <int kThreads, class T, class Combine>
MOK_DEVICE void ExclusiveScan(BlockScratch<kThreads>& scratch, T* values, int count,
                              Combine combine) {
  constexpr T kIdentity = static_cast<T>(Combine::kIdentity);
  const int thread = static_cast<int>(ThreadIndex().x);
  const int lane = thread % 32;
  const int per_thread = (count + kThreads - 1) / kThreads;
  const int begin = thread * per_thread < count ? thread * per_thread : count;
  const int end = begin + per_thread < count ? begin + per_thread : count;
  T own = kIdentity;
  for (int i = begin; i < end; ++i) own = combine(own, values[i]);
  T inclusive = own;  // over the lanes up to this one
  for (int distance = 1; distance < 32; distance *= 2) {
    const T lower = ShuffleUp(inclusive, distance);
    if (lane >= distance) inclusive = combine(lower, inclusive);
  }
  if (lane == 31) scratch.first[thread / 32] = inclusive;
  SyncBlock();
  T before = kIdentity;
  for (int warp = 0; warp < thread / 32; ++warp) {
    before = combine(before, static_cast<T>(scratch.first[warp]));
  }
  const T lower_lanes = ShuffleUp(inclusive, 1);
  if (lane > 0) before = combine(before, lower_lanes);
  for (int i = begin; i < end; ++i) {
    const T value = values[i];
    values[i] = before;
    before = combine(before, value);
  }
  if (thread == kThreads - 1) values[count] = before;
  SyncBlock();
}

}  // namespace mok
