#include <gtest/gtest.h>

#include <cstring>

#include "mok_core/emulator/tests/validation_cases.h"

namespace mok::testing {
namespace {

template <class T>
ValidationResult Result(Agreement agreement, const std::vector<T>& values) {
  ValidationResult result{"r", agreement, std::vector<unsigned char>(values.size() * sizeof(T))};
  std::memcpy(result.bytes.data(), values.data(), result.bytes.size());
  return result;
}

TEST(ValidationResultsTest, FilesKeepResults) {
  const std::string path = ::testing::TempDir() + "/results.bin";
  const std::vector<ValidationResult> results{{"a", Agreement::kBits, {1, 2, 3}},
                                              {"long name", Agreement::kTwoFloatUlps, {}}};
  ASSERT_EQ(WriteResults(path, results), OkStatus());
  const auto read = ReadResults(path);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ((*read)[i].name, results[i].name);
    EXPECT_EQ((*read)[i].agreement, results[i].agreement);
    EXPECT_EQ((*read)[i].bytes, results[i].bytes);
  }
}

TEST(ValidationResultsTest, MissingAndForeignFilesAreErrors) {
  EXPECT_EQ(ReadResults("/nonexistent").status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(ReadResults("/proc/self/exe").status().code(), StatusCode::kInvalidArgument);
}

TEST(ValidationResultsTest, AgreementIsAsStrictAsItSays) {
  const std::vector<uint32_t> one{0x3F800000, 0x80000000}, near{0x3F800002, 0x00000001},
      far{0x3F800003, 0};
  EXPECT_TRUE(Compare(Result(Agreement::kBits, one), Result(Agreement::kBits, one)).ok());
  EXPECT_FALSE(Compare(Result(Agreement::kBits, one), Result(Agreement::kBits, near)).ok());
  const auto want = Result(Agreement::kTwoFloatUlps, one);
  EXPECT_TRUE(Compare(want, Result(Agreement::kTwoFloatUlps, near)).ok());
  EXPECT_FALSE(Compare(want, Result(Agreement::kTwoFloatUlps, far)).ok());
  const std::vector<uint16_t> a{0x3F80}, b{0x3F81}, c{0x3F82}, nan{0x7FC0}, other_nan{0xFFFF};
  const auto half = Result(Agreement::kOneBFloat16Ulp, a);
  EXPECT_TRUE(Compare(half, Result(Agreement::kOneBFloat16Ulp, b)).ok());
  EXPECT_FALSE(Compare(half, Result(Agreement::kOneBFloat16Ulp, c)).ok());
  EXPECT_FALSE(Compare(half, Result(Agreement::kOneBFloat16Ulp, nan)).ok());
  EXPECT_TRUE(Compare(Result(Agreement::kOneBFloat16Ulp, nan),
                      Result(Agreement::kOneBFloat16Ulp, other_nan))
                  .ok());
}

TEST(ValidationResultsTest, DifferentSizesAreErrors) {
  EXPECT_FALSE(Compare({"r", Agreement::kBits, {1}}, {"r", Agreement::kBits, {1, 2}}).ok());
}

}  // namespace
}  // namespace mok::testing
