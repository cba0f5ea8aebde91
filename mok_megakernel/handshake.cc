#include "mok_megakernel/handshake.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>

#include "mok_core/bits.h"
#include "mok_core/dtype.h"
#include "mok_gemm/host/isa.h"

namespace mok {
namespace {

static_assert(std::is_trivially_copyable_v<HandshakeRecord>);

const char* FieldName(AgreedField field) {
  switch (field) {
    case AgreedField::kMaxTokens:
      return "max_tokens";
    case AgreedField::kHidden:
      return "hidden";
    case AgreedField::kTopk:
      return "topk";
    case AgreedField::kDType:
      return "dtype";
    case AgreedField::kSchedule:
      return "schedule (fingerprint of all ranks' routes)";
    case AgreedField::kIntermediate:
      return "intermediate size of the routed experts";
    case AgreedField::kSharedIntermediate:
      return "intermediate size of the shared expert";
    case AgreedField::kSwigluLimit:
      return "swiglu_limit";
    case AgreedField::kIsa:
      return "isa";
    case AgreedField::kNumExperts:
      return "num_experts";
    case AgreedField::kDifferentiated:
      return "differentiation (grad mode, and an input that requires a gradient)";
  }
  return "unknown field";
}

std::string FieldText(AgreedField field, int64_t value) {
  switch (field) {
    case AgreedField::kDType:
      return DTypeName(static_cast<DType>(value));
    case AgreedField::kSwigluLimit:
      return StrCat(BitCast<float>(static_cast<uint32_t>(value)));
    case AgreedField::kIsa:
      return IsaName(static_cast<Isa>(value));
    case AgreedField::kDifferentiated:
      return value != 0 ? "yes" : "no";
    default:
      return StrCat(value);
  }
}

}  // namespace

const char* OperationName(Operation operation) {
  switch (operation) {
    case Operation::kCreate:
      return "workspace_create";
    case Operation::kSchedule:
      return "schedule_build";
    case Operation::kForward:
      return "forward";
    case Operation::kBackward:
      return "backward";
  }
  return "unknown operation";
}

void HandshakeRecord::SetError(const Status& error) {
  error_code = error.code();
  const size_t length = std::min(error.message().size(), size_t{kTextBytes - 1});
  std::memcpy(error_text, error.message().data(), length);
  error_text[length] = '\0';
}

Handshake::Handshake(const SymmetricHeap& heap, const HeapRegions& regions,
                     const WorkspaceShape& shape)
    : ep_size_(shape.ep_size),
      barrier_(heap, regions.barrier),
      records_(heap, regions.handshake, sizeof(HandshakeRecord)),
      routes_(heap, regions.routes, shape.max_tokens, shape.topk) {}

Status Handshake::Run(const HandshakeRecord& mine, const PublishedRoutes& routes,
                      const WaitContext& context, Status* verdict) {
  ++round_;
  records_.Publish(std::as_bytes(std::span(&mine, 1)));
  // Routes are published in every round, so that the slots of all ranks alternate in step even when
  // ranks disagree on the operation.
  MOK_RETURN_IF_ERROR(routes_.Publish(routes.expert_ids, routes.num_tokens));
  MOK_RETURN_IF_ERROR(barrier_.ArriveAndWait(context));
  *verdict = Compare();
  return OkStatus();
}

HandshakeRecord Handshake::RecordOf(int rank) const {
  HandshakeRecord record;
  std::memcpy(&record, records_.Read(rank).data(), sizeof(record));
  return record;
}

Status Handshake::Compare() const {
  for (int rank = 0; rank < ep_size_; ++rank) {
    const HandshakeRecord record = RecordOf(rank);
    if (record.error_code == StatusCode::kOk) continue;
    const char* text = record.error_text;
    return Status(record.error_code, ep_size_ == 1 ? text : StrCat("rank ", rank, ": ", text));
  }
  const HandshakeRecord first = RecordOf(0);
  for (int rank = 1; rank < ep_size_; ++rank) {
    const HandshakeRecord record = RecordOf(rank);
    if (record.operation != first.operation) {
      return InvalidArgumentError("ranks disagree on the collective call: rank 0 called ",
                                  OperationName(first.operation), ", rank ", rank, " called ",
                                  OperationName(record.operation));
    }
    for (int i = 0; i < kNumAgreedFields; ++i) {
      const auto field = static_cast<AgreedField>(i);
      if (record[field] == first[field]) continue;
      return InvalidArgumentError(OperationName(first.operation), ": ranks disagree on ",
                                  FieldName(field), ": rank 0 has ", FieldText(field, first[field]),
                                  ", rank ", rank, " has ", FieldText(field, record[field]));
    }
  }
  return OkStatus();
}

}  // namespace mok
