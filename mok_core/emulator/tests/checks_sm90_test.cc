#include "mok_core/emulator/tests/checks_sm90.h"

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace ck = checks;

uint32_t* Words(const char* name) { return DeviceArray(std::vector<uint32_t>(64, 3), name); }

emulator::Report RunCase(int which, const Interleaving& interleaving, uint32_t* mapped_value) {
  StartCase(interleaving);
  ck::Params p{};
  p.data = Words("data");
  p.uninitialized = UninitializedArray<uint32_t>(64, "uninitialized");
  p.freed = Words("freed");
  MOK_CHECK(runtime::Free(p.freed).ok());
  std::vector<uint32_t> heap(1000, 1);
  p.host = heap.data();
  p.mapped = static_cast<uint32_t*>(runtime::AllocateMappedHost(4, "mapped").value());
  p.flag = DeviceArray(std::vector<uint32_t>{0}, "flag");
  p.output = Words("output");
  MOK_CHECK(Launch(ck::ChecksKernel(which), p, {}).ok());
  const emulator::Report report = emulator::Run();
  *mapped_value = *p.mapped;
  return report;
}

struct Expectation {
  int which;
  const char* kind;  // "" : fine
  const char* text;  // part of the report
};

const Expectation kExpectations[] = {
    {ck::kNothing, "", ""},
    {ck::kLoadOutOfBounds, "oob", "data+256"},
    {ck::kLoadFreed, "oob", "freed memory: freed+12"},
    {ck::kLoadUninitialized, "uninit", "uninitialized+12"},
    {ck::kLoadHostPointer, "oob", "host pointer"},
    {ck::kWriteParameters, "usage", "constant bank"},
    {ck::kMisalignedVector, "usage", "misaligned"},
    {ck::kNonCoherentInput, "", ""},
    {ck::kNonCoherentOutput, "usage", "ld.global.nc of output+0"},
    {ck::kMappedHostMemory, "", ""},
    {ck::kMappedHostFlag, "", ""},
    {ck::kMappedHostReduction, "usage", "atom on mapped host memory"},
    {ck::kMappedHostReductionGpu, "usage", "atom on mapped host memory"},
    {ck::kMappedHostAdd, "usage", "atom on mapped host memory"},
    {ck::kMappedHostCompareSwap, "usage", "atom on mapped host memory"},
    {ck::kUnorderedStores, "race", "data+0"},
    {ck::kStoreAfterUnorderedLoad, "race", "data+0"},
    {ck::kOrderedByBarrier, "", ""},
    {ck::kRelaxedFlag, "race", "data+0"},
    {ck::kRelaxedFlagWithFences, "", ""},
    {ck::kReleaseAcquireFlag, "", ""},
    {ck::kStoreEndsRelease, "race", "data+0"},
    {ck::kUnorderedAtomics, "", ""},
    {ck::kLoadUninitializedShared, "uninit", "shared 0x408"},
    {ck::kSharedOutOfBounds, "oob", "outside"},
    {ck::kBarrierNotInitialized, "usage", "not initialised"},
    {ck::kBarrierInitializedTwice, "usage", "twice"},
    {ck::kBarrierOverwritten, "oob", "overwritten"},
    {ck::kTooManyArrivals, "usage", "too many arrivals"},
    {ck::kInvalidatedBarrier, "usage", "not initialised"},
    {ck::kDivergentCollective, "usage", "warp divergence"},
    {ck::kUniformValue, "", ""},
    {ck::kUniformOfDifferentLanes, "usage", "expected: Shuffle(value, 0) == value"},
    {ck::kBulkSizeNotSixteen, "usage", "multiples of 16"},
    {ck::kBulkNotWaited, "usage", "may still read"},
    {ck::kBulkNotCommitted, "usage", "uncommitted"},
    {ck::kLoadStoredGlobal, "proxy-fence", "data+0"},
    {ck::kLoadStoredGlobalSharedFence, "proxy-fence", "data+0"},
    {ck::kLoadStoredGlobalFenced, "", ""},
    {ck::kExitWithTransferInFlight, "tx", "in flight"},
    {ck::kTrap, "trap", "trap"},
    {ck::kBrokenExpectation, "usage", "expected: kCase != kBrokenExpectation"},
};

TEST(ChecksSm90Test, EveryMistakeIsNamedAndNothingElseIs) {
  ASSERT_EQ(std::size(kExpectations), static_cast<size_t>(ck::kCaseCount));
  for (const Expectation& expected : kExpectations) {
    for (const Interleaving& interleaving : kInterleavings) {
      SCOPED_TRACE(::testing::Message()
                   << "case " << expected.which << " seed " << interleaving.seed);
      uint32_t mapped = 0;
      const emulator::Report report = RunCase(expected.which, interleaving, &mapped);
      EXPECT_EQ(report.kind, expected.kind) << report.text;
      EXPECT_NE(report.text.find(expected.text), std::string::npos) << report.text;
      const bool stores = expected.which == ck::kMappedHostMemory ||  //
                          expected.which == ck::kMappedHostFlag;
      EXPECT_EQ(mapped, stores ? 3u : 0u);
    }
  }
}

TEST(ChecksSm90Test, ASeedRepeatsItsRun) {
  uint32_t mapped;
  const Interleaving interleaving{42, 0.3};
  const auto first = RunCase(ck::kReleaseAcquireFlag, interleaving, &mapped);
  const auto second = RunCase(ck::kReleaseAcquireFlag, interleaving, &mapped);
  EXPECT_EQ(first.steps, second.steps);
  EXPECT_EQ(first.plain_accesses, second.plain_accesses);
}

TEST(ChecksSm90Test, ReportsNameSourceLines) {
  StartCase({0, 0.1});
  emulator::Options options = emulator::CurrentOptions();
  options.symbolize = true;
  emulator::Configure(options);
  ck::Params p{};
  p.data = Words("data");
  p.output = Words("output");
  MOK_CHECK(Launch(ck::ChecksKernel(ck::kLoadOutOfBounds), p, {}).ok());
  const emulator::Report report = emulator::Run();
  EXPECT_NE(report.text.find("checks_sm90.cu:"), std::string::npos) << report.text;
}

}  // namespace
}  // namespace mok::testing
