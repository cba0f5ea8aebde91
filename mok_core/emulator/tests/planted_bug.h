// Test kernels take a `kBug` template argument. 0 is the correct kernel; every other value plants
// one mistake that the emulator, or the comparison of results, has to notice under every seed.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing {

// A scheduler setting under which every variant runs.
struct Interleaving {
  uint64_t seed;
  double async_probability;
};

// Seed 0 is the orderly schedule; then late, rare and early asynchronous effects.
inline constexpr Interleaving kInterleavings[] = {{0, 0.1}, {1, 0.0}, {2, 0.02}, {3, 0.9}};

// What became of a run: "ok", "mismatch" (ran, wrong results), or the kind of the report.
struct Outcome {
  std::string kind, text;
};

// Forgets all memory and sets the scheduler. fast_forward: what waits in vain ends soon.
inline void StartCase(const Interleaving& interleaving, bool fast_forward = false) {
  emulator::FreeAll();
  emulator::Options options;
  options.seed = interleaving.seed;
  options.async_probability = interleaving.async_probability;
  options.symbolize = false;
  options.fast_forward = fast_forward;
  emulator::Configure(options);
}

// Runs what is queued; `matches` compares the results of a clean run.
inline Outcome RunAndCompare(const std::function<bool()>& matches) {
  const emulator::Report report = emulator::Run();
  if (!report.ok) return {report.kind, report.text};
  return matches() ? Outcome{"ok", ""} : Outcome{"mismatch", ""};
}

// Variant 0 comes out "ok" under every interleaving; every other variant below `count` does not,
// except those for which `equivalent` is true.
inline void ExpectEveryBugFlagged(
    const std::function<Outcome(int, const Interleaving&)>& run, int count,
    const std::function<bool(int)>& equivalent = [](int) { return false; }) {
  for (int bug = 0; bug < count; ++bug) {
    std::string kinds;
    for (const Interleaving& interleaving : kInterleavings) {
      SCOPED_TRACE(::testing::Message() << "bug " << bug << " seed " << interleaving.seed);
      const Outcome outcome = run(bug, interleaving);
      kinds += " " + outcome.kind;
      if (bug == 0 || equivalent(bug)) {
        EXPECT_EQ(outcome.kind, "ok") << outcome.text;
      } else {
        EXPECT_NE(outcome.kind, "ok");
      }
    }
    ::testing::Test::RecordProperty("bug_" + std::to_string(bug), kinds);
    printf("bug %2d:%s\n", bug, kinds.c_str());
  }
}

}  // namespace mok::testing
