// MN-major operands of wgmma, and planted bugs.
#include "mok_core/emulator/tests/mn_major_sm90.h"

#include "mok_core/emulator/tests/mn_major_inputs.h"
#include "mok_core/emulator/tests/planted_bug.h"

namespace mok::testing {
namespace {

namespace mn = mn_major;

bool Matches(const MnMajorCase& test) {
  return HostCopy(test.params.c, mn::kRows * mn::kColumns) == test.expected;
}

TEST(MnMajorTest, EveryFormMultiplies) {
  for (int form = 0; form < mn::kNumForms; ++form) {
    for (const Interleaving& interleaving : kInterleavings) {
      SCOPED_TRACE(::testing::Message() << "form " << form << " seed " << interleaving.seed);
      StartCase(interleaving);
      const MnMajorCase test = MakeMnMajorCase(mn::kForms[form]);
      ASSERT_TRUE(Launch(mn::FormKernel(form), test.params, {}).ok());
      const Outcome outcome = RunAndCompare([&] { return Matches(test); });
      EXPECT_EQ(outcome.kind, "ok") << outcome.text;
    }
  }
}

TEST(MnMajorTest, EveryBugIsFlagged) {
  ExpectEveryBugFlagged(
      [](int bug, const Interleaving& interleaving) {
        StartCase(interleaving);
        const MnMajorCase test =
            MakeMnMajorCase({OperandMajor::kMn, OperandMajor::kMn, Swizzle::k128});
        MOK_CHECK(Launch(mn::BuggyKernel(bug), test.params, {}).ok());
        return RunAndCompare([&] { return Matches(test); });
      },
      mn::kBugCount);
}

}  // namespace
}  // namespace mok::testing
