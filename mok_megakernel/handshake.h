// The handshake that opens every collective call: each rank shows its peers what it is about to do,
// and all of them reach the same verdict from the same records.
#pragma once

#include <cstdint>
#include <string>

#include "mok_comm/all_gather.h"
#include "mok_comm/rank_barrier.h"
#include "mok_comm/symmetric_heap.h"
#include "mok_core/counter.h"
#include "mok_core/status.h"
#include "mok_megakernel/workspace_layout.h"

namespace mok {

// The values are those of MokOperation; creation is internal.
enum class Operation : int32_t { kCreate = 0, kSchedule = 1, kForward = 2, kBackward = 3 };
const char* OperationName(Operation operation);

// What must be the same on all ranks. Fields that an operation does not know stay 0.
enum class AgreedField : int32_t {
  kMaxTokens,
  kHidden,
  kTopk,
  kDType,
  kSchedule,  // fingerprint of the schedule
  kIntermediate,
  kSharedIntermediate,
  kSwigluLimit,  // bits of the float
  kIsa,
  kNumExperts,      // 0: not stated
  kDifferentiated,  // 0 or 1
};
inline constexpr int kNumAgreedFields = 11;

// One rank's record. Plain bytes: it lies in memory shared between processes.
struct HandshakeRecord {
  static constexpr int kTextBytes = 600;

  Operation operation = Operation::kCreate;
  StatusCode error_code = StatusCode::kOk;  // an error that this rank has found in its own call
  int64_t agreed[kNumAgreedFields] = {};    // by AgreedField
  // Schedule only.
  int64_t num_local_experts = 0;
  int64_t lowest_id[3] = {-1, 0, 0};   // expert id, token, k of the lowest id; -1 without any
  int64_t highest_id[3] = {-1, 0, 0};  // and of the highest
  char error_text[kTextBytes] = {};

  int64_t& operator[](AgreedField field) { return agreed[static_cast<int>(field)]; }
  int64_t operator[](AgreedField field) const { return agreed[static_cast<int>(field)]; }
  // Truncates the text where it does not fit.
  void SetError(const Status& error);
};

// This rank's routes, for schedule builds.
struct PublishedRoutes {
  const int64_t* expert_ids = nullptr;  // [num_tokens, K], every id fits int32
  int64_t num_tokens = 0;
};

class Handshake {
 public:
  Handshake(const SymmetricHeap& heap, const HeapRegions& regions, const WorkspaceShape& shape);

  // Publishes this rank's record and routes, waits for all ranks, and compares. The verdict is the
  // same on every rank: the error of the lowest rank that has one ("rank 2: ..."), else
  // kInvalidArgument for the first field that differs, with both values and both ranks, else ok.
  // `verdict` is left alone when the returned status, that of the wait, is not ok.
  // Everything a rank wrote to any heap before is visible to all ranks afterwards.
  Status Run(const HandshakeRecord& mine, const PublishedRoutes& routes, const WaitContext& context,
             Status* verdict);

  // A barrier without records: the end of a pass.
  Status ExitBarrier(const WaitContext& context) { return barrier_.ArriveAndWait(context); }

  // After a Run and before the next one or the next exit barrier.
  HandshakeRecord RecordOf(int rank) const;
  StatusOr<GatheredRoutes> GatherRoutes() const { return routes_.Gather(); }

  // Handshakes so far; the same number on every rank, since every collective has exactly one.
  int64_t round() const { return round_; }

 private:
  Status Compare() const;

  const int ep_size_;
  RankBarrier barrier_;
  RankMessage records_;
  RouteAllGather routes_;
  int64_t round_ = 0;
};

}  // namespace mok
