// Files of results and their comparison.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "mok_core/emulator/tests/validation_cases.h"

namespace mok::testing {
namespace {

constexpr uint32_t kFileMark = 0x4D4F4B31;  // "MOK1"

void WriteWord(std::ofstream& file, uint32_t value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof value);
}

uint32_t ReadWord(std::ifstream& file) {
  uint32_t value = 0;
  file.read(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

// Position on the number line of floats, so that neighbours differ by 1 across zero as well.
template <class Bits>
int64_t LinePosition(Bits bits) {
  constexpr Bits kSign = Bits{1} << (sizeof(Bits) * 8 - 1);
  const auto magnitude = static_cast<int64_t>(bits & static_cast<Bits>(~kSign));
  return (bits & kSign) != 0 ? -magnitude : magnitude;
}

template <class Bits>
bool IsNan(Bits bits) {
  constexpr int64_t kInfinity = sizeof(Bits) == 2 ? 0x7F80 : 0x7F800000;
  return LinePosition(bits) > kInfinity || -LinePosition(bits) > kInfinity;
}

// Names the first element whose distance exceeds `ulps`.
template <class Bits>
Status CompareUlps(const ValidationResult& want, const ValidationResult& got, int64_t ulps) {
  for (size_t i = 0; i + sizeof(Bits) <= want.bytes.size(); i += sizeof(Bits)) {
    Bits a, b;
    std::memcpy(&a, &want.bytes[i], sizeof a);
    std::memcpy(&b, &got.bytes[i], sizeof b);
    if (IsNan(a) && IsNan(b)) continue;
    const int64_t distance = std::llabs(LinePosition(a) - LinePosition(b));
    if (distance <= ulps) continue;
    return InternalError(want.name, "[", i / sizeof(Bits), "]: emulator ", a, ", GPU ", b,
                         " (bits), ", distance, " ulps apart, allowed ", ulps);
  }
  return OkStatus();
}

}  // namespace

Status WriteResults(const std::string& path, const std::vector<ValidationResult>& results) {
  std::ofstream file(path, std::ios::binary);
  WriteWord(file, kFileMark);
  WriteWord(file, static_cast<uint32_t>(results.size()));
  for (const ValidationResult& result : results) {
    WriteWord(file, static_cast<uint32_t>(result.name.size()));
    WriteWord(file, static_cast<uint32_t>(result.agreement));
    WriteWord(file, static_cast<uint32_t>(result.bytes.size()));
    file.write(result.name.data(), static_cast<std::streamsize>(result.name.size()));
    file.write(reinterpret_cast<const char*>(result.bytes.data()),
               static_cast<std::streamsize>(result.bytes.size()));
  }
  if (!file.flush()) return UnavailableError("cannot write ", path);
  return OkStatus();
}

StatusOr<std::vector<ValidationResult>> ReadResults(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return UnavailableError("cannot open ", path);
  if (ReadWord(file) != kFileMark) return InvalidArgumentError(path, " holds no results");
  std::vector<ValidationResult> results(ReadWord(file));
  for (ValidationResult& result : results) {
    result.name.resize(ReadWord(file));
    result.agreement = static_cast<Agreement>(ReadWord(file));
    result.bytes.resize(ReadWord(file));
    file.read(result.name.data(), static_cast<std::streamsize>(result.name.size()));
    file.read(reinterpret_cast<char*>(result.bytes.data()),
              static_cast<std::streamsize>(result.bytes.size()));
  }
  if (!file) return InvalidArgumentError(path, " is truncated");
  return results;
}

Status Compare(const ValidationResult& want, const ValidationResult& got) {
  if (want.bytes.size() != got.bytes.size()) {
    return InternalError(want.name, ": emulator has ", want.bytes.size(), " bytes, GPU ",
                         got.bytes.size());
  }
  switch (want.agreement) {
    case Agreement::kBits: {
      const auto [a, b] = std::mismatch(want.bytes.begin(), want.bytes.end(), got.bytes.begin());
      if (a == want.bytes.end()) return OkStatus();
      return InternalError(want.name, ": byte ", a - want.bytes.begin(), ": emulator ", int{*a},
                           ", GPU ", int{*b});
    }
    case Agreement::kOneBFloat16Ulp:
      return CompareUlps<uint16_t>(want, got, 1);
    case Agreement::kTwoFloatUlps:
      return CompareUlps<uint32_t>(want, got, 2);
  }
  return InternalError(want.name, ": unknown agreement");
}

}  // namespace mok::testing
