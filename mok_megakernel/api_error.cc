#include "mok_megakernel/api_error.h"

#include <string>

#include "mok_megakernel/mok.h"

namespace mok {
namespace {

thread_local std::string last_error;

}  // namespace

static_assert(MOK_INTERNAL == static_cast<int>(StatusCode::kInternal));
static_assert(MOK_OUT_OF_RANGE == static_cast<int>(StatusCode::kOutOfRange));

const char* LastError() { return last_error.c_str(); }

int32_t SetLastError(const Status& status) {
  last_error = status.message();
  return static_cast<int32_t>(status.code());
}

Status CheckStructSize(const char* name, int64_t given, int64_t expected) {
  if (given == expected) return OkStatus();
  return InvalidArgumentError(name, ".struct_size: expected ", expected, ", got ", given,
                              " (compiled against another version of mok.h?)");
}

Status CheckReserved(const char* name, double given) {
  if (given == 0) return OkStatus();
  return InvalidArgumentError(name, ".reserved: expected 0, got ", given);
}

}  // namespace mok

extern "C" const char* mok_last_error(void) { return mok::LastError(); }
