// Where everything of a rank's CUDA workspace lies: the one declaration of its layouts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/device/wait_record.h"
#include "mok_megakernel/sm90/pass_launch.h"
#include "mok_schedule/device/schedule_params.h"

namespace mok {

// What a CUDA workspace is made for; checked.
struct CudaWorkspaceShape {
  int32_t rank = 0;
  int32_t ep_size = 1;     // R
  int64_t max_tokens = 0;  // of any rank
  int32_t hidden = 8;      // H
  int32_t topk = 1;        // K
  int device = 0;
  int32_t num_sms = 132;
  uint64_t timeout_ns = 0;
};

// The symmetric heap: the same offsets on every rank. What peers touch in a forward, and room for
// what they will touch in a backward.
class CudaHeapLayout {
 public:
  enum Part {
    // Zero before the first call.
    kFlags,     // RankMeeting of all passes
    kSchedule,  // ScheduleExchangeLayout
    // Need not be initialised.
    kRoutes,   // bf16 [max_tokens * K, H]: own Down, peers' Combine -> TokenReduce; also dx rows
    kDRouter,  // fp32 [max_tokens * K]: peers' ReverseDispatch -> TokenReduce
    // Staged by this rank for its peers; empty with one rank.
    kX,           // bf16 [max_tokens, H]: x -> Dispatch
    kDOut,        // bf16 [max_tokens, H]: d_out -> ReverseCombine
    kTopkWeight,  // fp32 [max_tokens * K]: router weights -> ReverseCombine
    kNumParts
  };

  explicit CudaHeapLayout(const CudaWorkspaceShape& shape);

  size_t bytes() const { return bytes_; }
  size_t zero_bytes() const { return begin_[kRoutes]; }
  size_t offset(Part part) const { return begin_[part]; }
  const ScheduleExchangeLayout& schedule() const { return schedule_; }

  template <class T>
  T* At(void* base, Part part) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(base) + begin_[part]);
  }

 private:
  ScheduleExchangeLayout schedule_;
  size_t begin_[kNumParts] = {};
  size_t bytes_ = 0;
};

// Device memory of one rank that lives on between calls; zero before the first.
class CudaStateLayout {
 public:
  enum Part {
    kScheduleRegions,  // std::byte* [R]: kSchedule of every rank's heap
    kScheduleState,    // ScheduleState
    kScheduleAbort,    // uint32_t
    kPasses,           // PassMemoryLayout of the layer with most counters
    kNumParts
  };

  explicit CudaStateLayout(const CudaWorkspaceShape& shape);

  size_t bytes() const { return bytes_; }
  size_t pass_bytes() const { return bytes_ - begin_[kPasses]; }

  template <class T>
  T* At(void* base, Part part) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(base) + begin_[part]);
  }

 private:
  size_t begin_[kNumParts] = {};
  size_t bytes_ = 0;
};

// In mapped host memory, zero before the first call: kernels -> host.
struct CudaRecords {
  alignas(64) ScheduleErrorRecord schedule_error;
  alignas(64) DeviceWaitRecord schedule_wait;
  alignas(64) DeviceWaitRecord pass_wait;
};

}  // namespace mok
