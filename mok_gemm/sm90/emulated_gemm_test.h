// Test only: what the tests of both kinds of tiles share to run kernels in the emulator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/status.h"

namespace mok::testing {

inline constexpr float kNoLimit = std::numeric_limits<float>::infinity();

// Of one launch. Freed with everything else by StartCase.
inline DeviceWaitParams EmulatedWaitParams() {
  constexpr uint64_t kTimeoutNs = 1'000'000'000;
  void* const record = runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value();
  void* const abort_flag = runtime::AllocateDevice(0, sizeof(uint32_t), "abort_flag").value();
  MOK_CHECK(runtime::Fill(abort_flag, 0, sizeof(uint32_t)).ok());
  return {static_cast<DeviceWaitRecord*>(record), static_cast<uint32_t*>(abort_flag), kTimeoutNs,
          0};
}

// Runs what is queued. find_error: what is wrong with the results of a clean run, or "".
inline Outcome RunAndExplain(const std::function<std::string()>& find_error) {
  std::string error;
  Outcome outcome = RunAndCompare([&] {
    error = find_error();
    return error.empty();
  });
  if (!error.empty()) outcome.text = error;
  return outcome;
}

// Sizes of a random problem.
class RandomSizes {
 public:
  explicit RandomSizes(uint32_t seed) : random_(seed) {}

  int Between(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<uint32_t>(high - low + 1));
  }
  bool Coin() { return Between(0, 1) == 0; }
  // Rows of three experts: one without, one of at most 64 (one warpgroup works), one of any size.
  std::vector<int32_t> Counts(int most) {
    std::vector<int32_t> counts = {Between(1, 64), 0, Between(1, most)};
    std::shuffle(counts.begin(), counts.end(), random_);
    return counts;
  }

 private:
  std::mt19937 random_;
};

// Interleaving number `seed` of a series of random problems.
inline Interleaving InterleavingOf(uint32_t seed) { return {seed % 4, 0.02 + 0.2 * (seed % 5)}; }

}  // namespace mok::testing
