// Where errors of the C APIs become codes and texts, and exceptions end.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

#include "mok_core/status.h"

namespace mok {

// Sets what mok_last_error returns in this thread, and returns the status as a MokStatusCode.
int32_t SetLastError(const Status& status);
const char* LastError();

// Runs a function that returns a Status; nothing is thrown across the C boundary.
template <class Function>
int32_t GuardApi(Function function) {
  Status status;
  try {
    status = function();
  } catch (const std::bad_alloc&) {
    status = ResourceExhaustedError("out of memory");
  } catch (const std::exception& error) {
    status = InternalError("unexpected exception: ", error.what());
  }
  return SetLastError(status);
}

// kInvalidArgument unless a struct of the C API has the size that this library knows.
Status CheckStructSize(const char* name, int64_t given, int64_t expected);
// kInvalidArgument unless the field `reserved` of the struct `name` is 0: it may mean something to
// another version of the library.
Status CheckReserved(const char* name, double given);

}  // namespace mok
