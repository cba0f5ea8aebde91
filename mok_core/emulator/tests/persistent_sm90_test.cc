#include "mok_core/emulator/tests/persistent_sm90.h"

#include <cstring>
#include <numeric>

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace ps = persistent;

constexpr int kBlocks = 3, kTasks = 20, kWords = kTasks * ps::kRowWords;
constexpr uint32_t kTraceCapacity = 16;
constexpr int32_t kRank = 5;

std::vector<float> Rows() {
  std::vector<float> rows(kWords);
  std::iota(rows.begin(), rows.end(), 0.0f);
  return rows;
}

struct Case {
  static constexpr int kAll = kTasks;
  ps::Params params{};
  DeviceWaitRecord* record;

  // `blocked`: a task whose counter never arrives, kAll, or -1.
  explicit Case(int blocked) {
    std::vector<uint64_t> ready(kTasks, blocked == kAll ? 0 : 1);
    if (blocked >= 0 && blocked < kTasks) ready[blocked] = 0;
    params.rows = DeviceArray(Rows(), "rows");
    params.doubled = UninitializedArray<float>(kWords, "doubled");
    params.ready = DeviceArray(ready, "ready");
    params.executions = DeviceArray(std::vector<int32_t>(kTasks, 0), "executions");
    params.ticket = DeviceArray(std::vector<TicketCounter>{{0, 0}}, "ticket");
    params.num_tasks = kTasks;
    record = static_cast<DeviceWaitRecord*>(
        runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value());
    params.wait = {record, DeviceArray(std::vector<uint32_t>{0}, "abort"), 2'000'000'000, kRank};
    params.trace.events = UninitializedArray<DeviceTraceEvent>(
        kBlocks * ps::kNumRoles * kTraceCapacity, "trace_events");
    params.trace.counts =
        DeviceArray(std::vector<uint32_t>(kBlocks * ps::kNumRoles, 0), "trace_counts");
    params.trace.capacity = kTraceCapacity;
    params.trace.num_roles = ps::kNumRoles;
  }

  void Start(int bug) const {
    MOK_CHECK(Launch(ps::PersistentKernel(bug), params, {.blocks = kBlocks}).ok());
  }
  bool Matches(int launches) const {
    const auto doubled = HostCopy(params.doubled, kWords);
    for (int i = 0; i < kWords; ++i) {
      if (doubled[i] != 2.0f * static_cast<float>(i)) return false;
    }
    const TicketCounter ticket = HostCopy(params.ticket, 1)[0];
    return HostCopy(params.executions, kTasks) == std::vector<int32_t>(kTasks, launches) &&
           ticket.next == 0 && ticket.finished_blocks == 0;
  }
};

void FastForward() {
  emulator::Options options = emulator::CurrentOptions();
  options.fast_forward = true;
  emulator::Configure(options);
}

Outcome RunVariant(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  // Draining matters only when a wait runs out.
  const bool aborts = bug == ps::kNoEndOfWorkOnAbort;
  if (aborts) FastForward();
  const Case test(aborts ? 7 : -1);
  test.Start(bug);
  return RunAndCompare([&] { return test.Matches(1); });
}

TEST(PersistentSm90Test, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunVariant, ps::kBugCount);
}

TEST(PersistentSm90Test, LaunchesOfOneStreamFollowEachOther) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    const Case test(-1);
    test.Start(ps::kCorrect);
    test.Start(ps::kCorrect);
    EXPECT_EQ(RunAndCompare([&] { return test.Matches(2); }).kind, "ok");
    EXPECT_EQ(CheckDeviceWaitRecord(*test.record), OkStatus());
  }
}

TEST(PersistentSm90Test, TimeoutIsRecordedAndTheGridDrains) {
  constexpr int kBlocked = 7;
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    FastForward();
    const Case test(kBlocked);
    test.Start(ps::kCorrect);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    const DeviceWaitRecord& record = *test.record;
    EXPECT_EQ(record.state, 2u);
    EXPECT_EQ(record.rank, kRank);
    EXPECT_LT(record.block, kBlocks);
    EXPECT_EQ(record.role, ps::kProducer);
    EXPECT_EQ(record.task, kBlocked);
    EXPECT_EQ(record.expected, 1u);
    EXPECT_EQ(record.observed, 0u);
    EXPECT_GE(record.waited_ns, test.params.wait.timeout_ns);
    const Status status = CheckDeviceWaitRecord(
        record, {[](int32_t) { return "producer"; }, [](int32_t) { return "double"; }});
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
    EXPECT_NE(status.message().find("role producer: task 7 of kind double expected 1, observed 0"),
              std::string::npos)
        << status;
    EXPECT_EQ(HostCopy(test.params.ticket, 1)[0].next, 0u);  // ready for the next launch
  }
}

// Every block's wait runs out; one of them writes the record, and no later launch does.
TEST(PersistentSm90Test, OneOfManyTimeoutsIsRecorded) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    FastForward();
    const Case test(Case::kAll);
    test.Start(ps::kCorrect);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    const DeviceWaitRecord first = *test.record;
    EXPECT_EQ(first.state, 2u);
    EXPECT_LT(first.task, kBlocks);
    EXPECT_EQ(HostCopy(test.params.wait.abort_flag, 1)[0], 1u);
    test.Start(ps::kCorrect);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    EXPECT_EQ(std::memcmp(&first, test.record, sizeof first), 0);
  }
}

TEST(PersistentSm90Test, TraceHoldsEveryTaskOnce) {
  StartCase({1, 0.1});
  const Case test(-1);
  test.Start(ps::kCorrect);
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  const auto counts = HostCopy(test.params.trace.counts, kBlocks * ps::kNumRoles);
  std::vector<int> seen(kTasks, 0);
  for (int block = 0; block < kBlocks; ++block) {
    const int slot = block * ps::kNumRoles + ps::kProducer;
    ASSERT_LE(counts[slot], kTraceCapacity);
    const auto events = HostCopy(test.params.trace.events + slot * kTraceCapacity, kTraceCapacity);
    for (uint32_t i = 0; i < counts[slot]; ++i) {
      ++seen[events[i].task];
      EXPECT_LE(events[i].begin_ns, events[i].end_ns);
      if (i > 0) {
        EXPECT_LE(events[i - 1].end_ns, events[i].begin_ns);
        EXPECT_LE(events[i - 1].end_cycles, events[i].end_cycles);
      }
    }
  }
  EXPECT_EQ(seen, std::vector<int>(kTasks, 1));
}

}  // namespace
}  // namespace mok::testing
