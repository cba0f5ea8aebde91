// What the schedule kernel found wrong with its inputs. Shared by device and host code.
#pragma once

#include <cstdint>

#include "mok_core/status.h"

namespace mok {

enum class ScheduleErrorKind : int32_t {
  kNone,
  kExpertId,            // an id outside [-1, E)
  kMaxTokens,           // ranks disagree on the most tokens of a rank
  kHidden,              // ranks disagree on H
  kIntermediate,        // ranks disagree on I
  kSharedIntermediate,  // ranks disagree on Is
  kTopk,                // ranks disagree on K
  kNumExperts,          // ranks disagree on E
  kExpertRanges,        // the ranks' experts are not consecutive ranges that end at E
  kRankFailed,          // a rank has announced that it cannot take part; it records nothing itself
  kLatePass,            // a rank has run a pass of a schedule that was lost, see RefusalState
};
inline constexpr int kNumScheduleErrorKinds = 11;

// In mapped host memory, one per rank, zero before first use. The batch was refused, and the table
// left empty, on every rank, and every rank records the same error. The first one is kept until the
// host sets `state` back to 0.
struct ScheduleErrorRecord {
  uint32_t state;  // 0: nothing, 1: being written, 2: complete
  ScheduleErrorKind kind;
  int32_t rank;      // that the error is about
  int32_t k;         // kExpertId: the route is number k of `token`
  int64_t token;     // kExpertId
  int64_t expected;  // kExpertId: E; kExpertRanges: the range's first expert; where ranks disagree:
                     // what rank 0 has announced
  int64_t observed;  // the id, or what the rank announced; kRankFailed: its StatusCode
};

// Ok when nothing was recorded (since `state` was set back to 0); kInternal for a record that is
// being written or has no kind; kOutOfRange for an id, kInvalidArgument for ranks that disagree,
// the announced code for a rank that cannot take part, kFailedPrecondition for a pass of a schedule
// that was lost. Call when the kernel has ended.
Status CheckScheduleErrorRecord(const ScheduleErrorRecord& record);

// What a block of the kernel waits for: DeviceWaitRecord::task_kind. The record's task is the rank
// waited for (kRank) or 0.
enum class ScheduleWait : int32_t { kRank, kCounts };

// For DeviceWaitNames::task_kind.
const char* ScheduleWaitName(int32_t wait);

}  // namespace mok
