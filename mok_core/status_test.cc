#include "mok_core/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace mok {
namespace {

constexpr int kNumCodes = 11;

TEST(StatusTest, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.ToString(), "Ok");
  EXPECT_EQ(status, OkStatus());
}

TEST(StatusTest, OkDropsItsMessage) { EXPECT_EQ(Status(StatusCode::kOk, "text"), OkStatus()); }

TEST(StatusTest, HelpersSetCodeAndConcatenate) {
  const std::vector<std::pair<Status, StatusCode>> cases = {
      {InvalidArgumentError("hidden is ", 7, ", expected ", 8), StatusCode::kInvalidArgument},
      {TypeMismatchError("hidden is ", 7, ", expected ", 8), StatusCode::kTypeMismatch},
      {OutOfRangeError("hidden is ", 7, ", expected ", 8), StatusCode::kOutOfRange},
      {FailedPreconditionError("hidden is ", 7, ", expected ", 8), StatusCode::kFailedPrecondition},
      {DeadlineExceededError("hidden is ", 7, ", expected ", 8), StatusCode::kDeadlineExceeded},
      {AbortedError("hidden is ", 7, ", expected ", 8), StatusCode::kAborted},
      {ResourceExhaustedError("hidden is ", 7, ", expected ", 8), StatusCode::kResourceExhausted},
      {UnavailableError("hidden is ", 7, ", expected ", 8), StatusCode::kUnavailable},
      {UnimplementedError("hidden is ", 7, ", expected ", 8), StatusCode::kUnimplemented},
      {InternalError("hidden is ", 7, ", expected ", 8), StatusCode::kInternal},
  };
  for (const auto& [status, code] : cases) {
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.code(), code);
    EXPECT_EQ(status.message(), "hidden is 7, expected 8");
    EXPECT_EQ(status.ToString(), std::string(StatusCodeName(code)) + ": hidden is 7, expected 8");
  }
  EXPECT_EQ(cases.size(), kNumCodes - 1u);
}

TEST(StatusTest, EveryCodeHasItsOwnName) {
  std::set<std::string> names;
  for (int code = 0; code < kNumCodes; ++code) {
    names.insert(StatusCodeName(static_cast<StatusCode>(code)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kNumCodes));
  EXPECT_EQ(names.count("Unknown"), 0u);
  EXPECT_STREQ(StatusCodeName(static_cast<StatusCode>(kNumCodes)), "Unknown");
}

TEST(StatusTest, StrCatWritesEachPiece) {
  EXPECT_EQ(StrCat(), "");
  EXPECT_EQ(StrCat("a", 1, 'c', 2.5, std::string("d"), std::string_view("e")), "a1c2.5de");
}

StatusOr<std::unique_ptr<int>> MakeBox(int value) {
  if (value < 0) return OutOfRangeError("value is ", value, ", expected >= 0");
  return std::make_unique<int>(value);
}

StatusOr<int> Increment(int value) {
  MOK_ASSIGN_OR_RETURN(const std::unique_ptr<int> box, MakeBox(value));
  return *box + 1;
}

Status Check(int value) {
  MOK_RETURN_IF_ERROR(Increment(value));
  MOK_RETURN_IF_ERROR(value > 10 ? InvalidArgumentError("large") : OkStatus());
  return OkStatus();
}

TEST(StatusOrTest, HoldsAValueOrAnError) {
  StatusOr<std::unique_ptr<int>> box = MakeBox(3);
  ASSERT_TRUE(box.ok());
  EXPECT_TRUE(box.status().ok());
  EXPECT_EQ(**box, 3);
  const std::unique_ptr<int> moved = std::move(box).value();
  EXPECT_EQ(*moved, 3);

  const StatusOr<std::unique_ptr<int>> error = MakeBox(-2);
  ASSERT_FALSE(error.ok());
  EXPECT_EQ(error.status(), OutOfRangeError("value is -2, expected >= 0"));
}

TEST(StatusOrTest, MacrosPassErrorsOn) {
  EXPECT_EQ(Increment(4).value(), 5);
  EXPECT_EQ(Increment(-1).status().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(Check(1), OkStatus());
  EXPECT_EQ(Check(-1).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(Check(11), InvalidArgumentError("large"));
}

TEST(StatusOrTest, ConvertsOnTheWayIn) {
  const StatusOr<std::string> text = "literal";
  EXPECT_EQ(*text, "literal");
  EXPECT_EQ(text->size(), 7u);
  struct Base {
    virtual ~Base() = default;
  };
  struct Derived : Base {};
  const StatusOr<std::unique_ptr<Base>> base = std::make_unique<Derived>();
  EXPECT_TRUE(base.ok());
}

TEST(StatusDeathTest, ChecksAbortWithPlaceAndText) {
  EXPECT_DEATH(MOK_CHECK(1 + 1 == 3) << "sum " << 2,
               "status_test.cc:[0-9]+: check failed: 1 \\+ 1 == 3 sum 2");
  EXPECT_DEATH((void)MakeBox(-5).value(), "OutOfRange: value is -5");
  EXPECT_DEATH((void)StatusOr<int>(OkStatus()), "needs a value or an error");
}

TEST(StatusTest, CheckEvaluatesItsTextOnlyOnFailure) {
  int evaluations = 0;
  MOK_CHECK(true) << ++evaluations;
  EXPECT_EQ(evaluations, 0);
  // Usable as the only statement of an if with an else.
  if (evaluations == 0)
    MOK_CHECK(true);
  else
    FAIL();
}

}  // namespace
}  // namespace mok
