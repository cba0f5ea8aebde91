#include "mok_core/argument_checks.h"

namespace mok {

Status CheckRange(const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (value >= lowest && value <= highest) return OkStatus();
  return InvalidArgumentError(name, ": expected ", lowest, " to ", highest, ", got ", value);
}

Status CheckMultiple(const char* name, int64_t value, int64_t lowest, int64_t factor) {
  if (value >= lowest && value <= INT32_MAX && value % factor == 0) return OkStatus();
  return InvalidArgumentError(name, ": expected a multiple of ", factor, " from ", lowest,
                              " to 2^31 - 1, got ", value);
}

Status NullPointer(const char* name) {
  return InvalidArgumentError(name, ": expected a pointer, got null");
}

Status CheckPointer(const char* name, const void* pointer) {
  return pointer != nullptr ? OkStatus() : NullPointer(name);
}

Status CheckAligned(const char* name, const void* pointer, int64_t bytes) {
  MOK_RETURN_IF_ERROR(CheckPointer(name, pointer));
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0) return OkStatus();
  return InvalidArgumentError(name, ": expected an address aligned to ", bytes, " bytes, got ",
                              pointer);
}

}  // namespace mok
