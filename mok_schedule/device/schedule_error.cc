#include "mok_schedule/device/schedule_error.h"

namespace mok {
namespace {

Status Disagreement(const char* name, const ScheduleErrorRecord& record) {
  return InvalidArgumentError(name, " of rank ", record.rank, ": expected ", record.expected,
                              ", that of rank 0, got ", record.observed);
}

}  // namespace

Status CheckScheduleErrorRecord(const ScheduleErrorRecord& record) {
  if (record.state == 0) return OkStatus();
  if (record.state != 2) return InternalError("schedule error record: read while it was written");
  switch (record.kind) {
    case ScheduleErrorKind::kNone:
      break;
    case ScheduleErrorKind::kExpertId:
      return OutOfRangeError("expert id of rank ", record.rank, ", token ", record.token, ", k ",
                             record.k, ": expected -1 to ", record.expected - 1, ", got ",
                             record.observed);
    case ScheduleErrorKind::kMaxTokens:
      return Disagreement("max_tokens", record);
    case ScheduleErrorKind::kHidden:
      return Disagreement("hidden", record);
    case ScheduleErrorKind::kIntermediate:
      return Disagreement("intermediate", record);
    case ScheduleErrorKind::kSharedIntermediate:
      return Disagreement("shared_intermediate", record);
    case ScheduleErrorKind::kTopk:
      return Disagreement("topk", record);
    case ScheduleErrorKind::kNumExperts:
      return Disagreement("number of experts", record);
    case ScheduleErrorKind::kExpertRanges:
      return InvalidArgumentError("experts of rank ", record.rank, ": expected to ",
                                  "start where the ranks below end, at ", record.expected,
                                  ", and to end at the number of experts; got ", record.observed);
    case ScheduleErrorKind::kRankFailed:
      return Status(
          static_cast<StatusCode>(record.observed),
          StrCat("rank ", record.rank, " could not take part in the call: see its error"));
    case ScheduleErrorKind::kLatePass:
      return FailedPreconditionError(
          "rank ", record.rank,
          " ran a forward or backward of a schedule that an earlier error had made unusable: what "
          "it computed is not for use (after an error, build schedules again)");
  }
  return InternalError("schedule error record of kind ", static_cast<int>(record.kind));
}

const char* ScheduleWaitName(int32_t wait) {
  return static_cast<ScheduleWait>(wait) == ScheduleWait::kRank ? "expert ids of the rank"
                                                                : "counts of all blocks";
}

}  // namespace mok
