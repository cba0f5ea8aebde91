// Runs of the sm90 test kernels whose results emulator and GPU have to agree on. The code is the
// same for both: only the linked backend and kernels differ.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mok_core/status.h"

namespace mok::testing {

// How far results may differ. The tensor core's rounding of inexact sums and the approximate
// functions are not modelled; everything else is bit for bit.
enum class Agreement : uint32_t { kBits, kOneBFloat16Ulp, kTwoFloatUlps };

struct ValidationResult {
  std::string name;
  Agreement agreement;
  std::vector<unsigned char> bytes;
};

// One case: launches kernels through the host seam, appends named results.
struct ValidationCase {
  const char* name;
  std::function<Status(std::vector<ValidationResult>&)> run;
};

std::vector<ValidationCase> ValidationCases();

// A file of results, written by the emulator's run and read by the GPU's.
Status WriteResults(const std::string& path, const std::vector<ValidationResult>& results);
StatusOr<std::vector<ValidationResult>> ReadResults(const std::string& path);

// Ok if `got` agrees with `want`; else the first place where it does not.
Status Compare(const ValidationResult& want, const ValidationResult& got);

}  // namespace mok::testing
