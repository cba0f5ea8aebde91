// Checks of arguments. Each error names the argument, what was expected and what was given.
#pragma once

#include <cstdint>

#include "mok_core/status.h"

namespace mok {

// "name: expected lowest to highest, got value".
Status CheckRange(const char* name, int64_t value, int64_t lowest, int64_t highest);

// A multiple of `factor` in [lowest, 2^31).
Status CheckMultiple(const char* name, int64_t value, int64_t lowest, int64_t factor);

// The error of a pointer that is null and may not be.
Status NullPointer(const char* name);
// Not null.
Status CheckPointer(const char* name, const void* pointer);
// Not null, and a multiple of `bytes`.
Status CheckAligned(const char* name, const void* pointer, int64_t bytes);

}  // namespace mok
