// Writes what the emulator computes in every validation case: emulator_reference_main FILE.
#include <cstdio>

#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/validation_cases.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FILE\n", argv[0]);
    return 2;
  }
  std::vector<mok::testing::ValidationResult> results;
  for (const auto& test : mok::testing::ValidationCases()) {
    mok::emulator::Options options;
    options.seed = 1;
    options.fast_forward = true;  // one case lets a wait expire
    mok::emulator::Configure(options);
    if (const mok::Status status = test.run(results); !status.ok()) {
      std::fprintf(stderr, "%s: %s\n", test.name, status.ToString().c_str());
      return 1;
    }
    mok::emulator::FreeAll();
  }
  const mok::Status status = mok::testing::WriteResults(argv[1], results);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
