// The copies that precede a pass, in the emulator: every byte, the question of three ranks whether
// one of them needs the optional copy, every planted mistake.
#include "mok_megakernel/cuda/stage_rows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"
#include "mok_megakernel/cuda/stage_rows_test_kernels.h"

namespace mok::testing {
namespace {

constexpr int kRanks = 3;
constexpr int kLateRank = 1;
constexpr uint32_t kSpoilt = 0xFFFFFFFF;

// What all ranks ask each other in a row of passes: rank r wishes if wishes[pass][r].
struct Wishes {
  std::vector<std::vector<bool>> of_pass;
  bool refused = false;

  bool Any(size_t pass) const {
    for (const bool wish : of_pass[pass]) {
      if (wish) return true;
    }
    return false;
  }
};

class StageRun {
 public:
  // The optional copy has `words` words on rank 0, fewer on the others, none on the last.
  explicit StageRun(int64_t words = 9) {
    for (int rank = 0; rank < kRanks; ++rank) {
      Rank& to = ranks_[rank];
      to.stream = runtime::CreateStream(rank).value();
      to.params.asks = true;
      const int64_t optional_words = rank == kRanks - 1 ? 0 : words >> rank;
      for (const int64_t count : {words + 3, optional_words}) {
        if (count == 0) continue;
        std::vector<uint32_t> values;
        for (int64_t i = 0; i < count; ++i) {
          values.push_back(static_cast<uint32_t>(1000 * rank + 100 * to.params.num_copies + i));
        }
        to.params.copies[to.params.num_copies++] = {
            DeviceArray(values, "source", rank),
            UninitializedArray<uint32_t>(values.size(), "copy", rank), count * 4};
      }
      to.params.last_is_optional = optional_words > 0;
      to.params.kept_row_blocks = 4;
      to.state = DeviceArray(std::vector<PassState>(1), "state", rank);
      to.result = DeviceArray(std::vector<DeviceScheduleResult>(1), "result", rank);
      to.params.state = to.state;
      to.params.schedule = to.result;
      to.record = static_cast<DeviceWaitRecord*>(
          runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value());
      to.params.wait = {to.record, DeviceArray(std::vector<uint32_t>{0}, "abort", rank),
                        2'000'000'000, rank};
      to.params.meeting.rank = rank;
      to.params.meeting.num_ranks = kRanks;
      to.params.meeting.flags_of_rank[rank] =
          DeviceArray(std::vector<uint64_t>(kNumMeetings * kRanks, 0), "flags", rank);
    }
    for (Rank& rank : ranks_) {
      for (int peer = 0; peer < kRanks; ++peer) {
        MOK_CHECK(runtime::EnablePeerAccess(rank.params.meeting.rank, peer).ok());
        rank.params.meeting.flags_of_rank[peer] = ranks_[peer].params.meeting.flags_of_rank[peer];
      }
    }
  }

  // kept + 1 row blocks are a wish, kept are none.
  void StartPass(uint64_t epoch, const std::vector<bool>& wishes, bool refused) {
    for (int rank = 0; rank < kRanks; ++rank) {
      PassState state = {};
      state.epoch = epoch - 1;
      state.refusals.generation = 2;
      const DeviceScheduleResult result = {wishes[rank] ? 5 : 4, 0, refused ? 0u : 2u};
      MOK_CHECK(runtime::CopyToDevice(ranks_[rank].state, &state, sizeof state).ok());
      MOK_CHECK(runtime::CopyToDevice(ranks_[rank].result, &result, sizeof result).ok());
      const StageRowsParams& params = ranks_[rank].params;
      for (int i = 0; i < params.num_copies; ++i) {
        const auto bytes = static_cast<size_t>(params.copies[i].bytes);
        MOK_CHECK(runtime::Fill(params.copies[i].destination, 0xFF, bytes).ok());
      }
    }
  }

  // The late rank comes behind other work. A refused schedule: it does not come at all.
  void Launch(int bug, bool refused) {
    StageRowsParams before = ranks_[kLateRank].params;
    before.asks = before.last_is_optional = false;
    before.num_copies = 1;
    MOK_CHECK(Launch(kLateRank, 0, before).ok());
    for (int rank = 0; rank < kRanks; ++rank) {
      if (refused && rank == kLateRank) continue;
      MOK_CHECK(Launch(rank, bug, ranks_[rank].params).ok());
    }
  }

  // Every copy is what it has to be.
  bool Matches(bool has_optional, bool refused) const {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (refused && rank == kLateRank) continue;
      const StageRowsParams& params = ranks_[rank].params;
      if (params.wait.record->state != 0) return false;
      for (int i = 0; i < params.num_copies; ++i) {
        const auto words = static_cast<size_t>(params.copies[i].bytes) / 4;
        const auto source = HostCopy(static_cast<const uint32_t*>(params.copies[i].source), words);
        const auto copy =
            HostCopy(static_cast<const uint32_t*>(params.copies[i].destination), words);
        const bool is_made = has_optional || i < params.num_copies - 1 || !params.last_is_optional;
        if (copy != (is_made ? source : std::vector<uint32_t>(words, kSpoilt))) return false;
      }
    }
    return true;
  }

 private:
  struct Rank {
    StageRowsParams params = {};
    PassState* state = nullptr;
    DeviceScheduleResult* result = nullptr;
    DeviceWaitRecord* record = nullptr;
    void* stream = nullptr;
  };

  Status Launch(int rank, int bug, const StageRowsParams& params) const {
    return LaunchStageRows(StageRowsKernelWithBug(bug), params, 1, rank, ranks_[rank].stream);
  }

  Rank ranks_[kRanks];
};

Outcome RunPasses(int bug, const Wishes& wishes, const Interleaving& interleaving) {
  StartCase(interleaving, true);
  StageRun run;
  for (size_t pass = 0; pass < wishes.of_pass.size(); ++pass) {
    run.StartPass(pass + 1, wishes.of_pass[pass], wishes.refused);
    run.Launch(bug, wishes.refused);
    const bool has_optional = wishes.Any(pass) && !wishes.refused;
    const Outcome outcome =
        RunAndCompare([&] { return run.Matches(has_optional, wishes.refused); });
    if (outcome.kind != "ok") return outcome;
  }
  return {"ok", ""};
}

const Wishes kAskedAndRefused[] = {
    {{{false, false, false}, {false, true, false}, {false, false, false}, {true, true, true}}},
    {{{false, false, true}}},
    {{{true, true, true}}, true}};

Outcome RunBug(int bug, const Interleaving& interleaving) {
  for (const Wishes& wishes : kAskedAndRefused) {
    const Outcome outcome = RunPasses(bug, wishes, interleaving);
    if (outcome.kind != "ok") return outcome;
  }
  return {"ok", ""};
}

TEST(StageRowsTest, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunBug, static_cast<int>(StageRowsBug::kCount));
}

TEST(StageRowsTest, EveryByteOfAnySize) {
  for (const int64_t words : {1, 4, 513, 8192, 30000}) {
    StartCase({1, 0.1});
    StageRun run(words);
    run.StartPass(1, {true, false, false}, false);
    run.Launch(0, false);
    const Outcome outcome = RunAndCompare([&] { return run.Matches(true, false); });
    EXPECT_EQ(outcome.kind, "ok") << words << " words " << outcome.text;
  }
}

TEST(StageRowsTest, SourcesDoNotOverlapTheirCopies) {
  alignas(16) unsigned char rows[96] = {};
  StageRowsParams params = {};
  params.num_copies = 1;
  for (const int source : {16, 48}) {
    params.copies[0] = {rows + source, rows + 32, 32};
    const Status status = LaunchStageRows(StageRowsKernelWithBug(0), params, 1, 0, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << source;
    EXPECT_NE(status.message().find("overlaps the part of the symmetric heap"), std::string::npos);
  }
}

}  // namespace
}  // namespace mok::testing
