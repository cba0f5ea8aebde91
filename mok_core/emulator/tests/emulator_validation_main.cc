// Runs every validation case on the GPU and compares it with the emulator's results:
// emulator_validation_main [FILE]. FILE is written by emulator_reference_main; without it,
// emulator_reference.bin is looked for beside this program.
#include <cstdio>
#include <map>
#include <string>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/tests/validation_cases.h"

namespace {

using mok::testing::ValidationResult;

std::string Beside(const std::string& program, const std::string& name) {
  const size_t slash = program.rfind('/');
  return (slash == std::string::npos ? "" : program.substr(0, slash + 1)) + name;
}

// Prints one line per result; returns how many disagree.
int CompareAll(const std::map<std::string, ValidationResult>& reference,
               const std::vector<ValidationResult>& results) {
  int failures = 0;
  for (const ValidationResult& got : results) {
    const auto want = reference.find(got.name);
    const mok::Status status = want == reference.end()
                                   ? mok::InternalError(got.name, ": no reference")
                                   : mok::testing::Compare(want->second, got);
    std::printf("%-6s %s\n", status.ok() ? "ok" : "FAILED",
                status.ok() ? got.name.c_str() : status.ToString().c_str());
    failures += status.ok() ? 0 : 1;
  }
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : Beside(argv[0], "emulator_reference.bin");
  const auto devices = mok::runtime::DeviceCount();
  if (!devices.ok() || *devices == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    return 1;
  }
  const auto reference = mok::testing::ReadResults(path);
  if (!reference.ok()) {
    std::fprintf(stderr, "%s\n", reference.status().ToString().c_str());
    return 1;
  }
  std::map<std::string, ValidationResult> by_name;
  for (const ValidationResult& result : *reference) by_name[result.name] = result;
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // results before a crash are not lost
  int failures = 0;
  size_t compared = 0;
  for (const auto& test : mok::testing::ValidationCases()) {
    std::vector<ValidationResult> results;
    if (const mok::Status status = test.run(results); !status.ok()) {
      std::printf("FAILED %s: %s\n", test.name, status.ToString().c_str());
      ++failures;
    }
    failures += CompareAll(by_name, results);
    compared += results.size();
  }
  if (compared < by_name.size()) {
    std::printf("FAILED %zu results of the emulator have no counterpart\n",
                by_name.size() - compared);
    ++failures;
  }
  std::printf(failures == 0 ? "all %zu results agree\n" : "of %zu results, %d failed\n", compared,
              failures);
  return failures == 0 ? 0 : 1;
}
