// Ranks that are processes: POSIX shared memory, and ranks that die.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "mok_core/status.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

constexpr int kRanks = 3;

LayerSpec SpecOfTest() {
  LayerSpec spec;
  spec.tokens = {33, 0, 47};
  spec.experts = {2, 1, 2};
  spec.topk = 2;
  spec.hidden = 40;
  spec.intermediate = 136;
  spec.shared_intermediate = 24;
  return spec;
}

// What a child reports, in memory shared with its parent.
struct Report {
  int32_t code;
  int32_t code_afterwards;  // of a second call
  double seconds;           // of the first one
  bool same_bits;
  char text[1000];

  void Note(int32_t returned) {
    code = returned;
    std::strncpy(text, mok_last_error(), sizeof(text) - 1);
  }
};

// Runs body(rank, report) in one forked process per rank. The parent starts no threads before.
class Processes {
 public:
  explicit Processes(const std::function<void(int rank, Report* report)>& body) {
    reports_ = static_cast<Report*>(mmap(nullptr, kRanks * sizeof(Report), PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    for (int rank = 0; rank < kRanks; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        body(rank, &reports_[rank]);
        _exit(0);
      }
      children_.push_back(child);
    }
    for (const pid_t child : children_) {
      int status = 0;
      waitpid(child, &status, 0);
      statuses_.push_back(status);
    }
  }
  ~Processes() { munmap(reports_, kRanks * sizeof(Report)); }

  const Report& report(int rank) const { return reports_[rank]; }
  bool ExitedWell(int rank) const {
    const int status = statuses_[static_cast<size_t>(rank)];
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  Report* reports_;
  std::vector<pid_t> children_;
  std::vector<int> statuses_;
};

std::string HeapName(const char* test) { return StrCat("mok_process_test_", test, "_", getpid()); }

MokWorkspace* CreateWorkspace(int rank, const std::string& name, double timeout_seconds,
                              Report* report) {
  const MokWorkspaceOptions options =
      WorkspaceOptionsOf(SpecOfTest(), rank, nullptr, name.c_str(), timeout_seconds);
  MokWorkspace* workspace = nullptr;
  report->Note(mok_workspace_create(&options, &workspace));
  return workspace;
}

// Outputs of one rank, as bytes.
std::vector<uint8_t> OutputsOf(const RankLayer& layer) {
  std::vector<uint8_t> bytes;
  for (const Tensor* tensor : {&layer.out, &layer.d_x, &layer.d_topk_weight, &layer.d_gate,
                               &layer.d_up, &layer.d_down, &layer.d_shared_gate}) {
    bytes.insert(bytes.end(), tensor->bytes.begin(), tensor->bytes.end());
  }
  return bytes;
}

// What the rank computes when all ranks live in this process.
std::vector<uint8_t> ExpectedOutputs(const LayerData& data, int rank) {
  const RankWorkspaces workspaces(data.spec);
  std::vector<uint8_t> outputs;
  RunRanks(kRanks, [&](int other) {
    RankLayer layer(data, other, {});
    EXPECT_EQ(layer.BuildSchedule(workspaces[other]), MOK_OK);
    EXPECT_EQ(layer.Forward(workspaces[other]), MOK_OK);
    EXPECT_EQ(layer.Backward(workspaces[other]), MOK_OK);
    if (other == rank) outputs = OutputsOf(layer);
  });
  return outputs;
}

TEST(ProcessTest, SameBitsAsInOneProcess) {
  const std::string name = HeapName("bits");
  const LayerData data(SpecOfTest());
  const Processes processes([&](int rank, Report* report) {
    MokWorkspace* workspace = CreateWorkspace(rank, name, 60, report);
    if (workspace == nullptr) return;
    report->same_bits = true;
    RunOptions options;
    options.threads = 1 + rank % 2;
    options.comm_threads = rank == 2 ? 1 : 0;
    RankLayer layer(data, rank, options);
    for (int repeat = 0; repeat < 20; ++repeat) {
      for (const int32_t code :
           {layer.BuildSchedule(workspace), layer.Forward(workspace), layer.Backward(workspace)}) {
        if (code != MOK_OK) report->Note(code);
      }
      report->same_bits &= OutputsOf(layer) == ExpectedOutputs(data, rank);
    }
    mok_workspace_destroy(workspace);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(processes.ExitedWell(rank)) << rank;
    EXPECT_EQ(processes.report(rank).code, MOK_OK) << processes.report(rank).text;
    EXPECT_TRUE(processes.report(rank).same_bits) << rank;
  }
}

TEST(ProcessTest, RejectedCallAndThenAGoodOne) {
  const std::string name = HeapName("rejected");
  const LayerData data(SpecOfTest());
  const Processes processes([&](int rank, Report* report) {
    MokWorkspace* workspace = CreateWorkspace(rank, name, 60, report);
    if (workspace == nullptr) return;
    RankLayer layer(data, rank, {});
    const int32_t experts = layer.schedule_args.num_local_experts;
    if (rank == 0) layer.schedule_args.num_local_experts = -1;
    report->Note(layer.BuildSchedule(workspace));
    layer.schedule_args.num_local_experts = experts;
    report->code_afterwards = layer.BuildSchedule(workspace) | layer.Forward(workspace);
    mok_workspace_destroy(workspace);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(processes.report(rank).code, MOK_INVALID_ARGUMENT);
    EXPECT_STREQ(processes.report(rank).text,
                 "rank 0: num_local_experts: expected 0 to 1048576, got -1");
    EXPECT_EQ(processes.report(rank).code_afterwards, MOK_OK);
  }
}

TEST(ProcessTest, ShapesThatDiffer) {
  const std::string name = HeapName("shapes");
  const Processes processes([&](int rank, Report* report) {
    MokWorkspaceOptions options = WorkspaceOptionsOf(SpecOfTest(), rank, nullptr, name.c_str());
    if (rank == 2) options.hidden = 4096;
    MokWorkspace* workspace = nullptr;
    report->Note(mok_workspace_create(&options, &workspace));
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(processes.report(rank).code, MOK_INVALID_ARGUMENT);
    EXPECT_NE(
        std::string(processes.report(rank).text)
            .find(StrCat("[rank ", rank, " has max_tokens 47, hidden ", rank == 2 ? 4096 : 40)),
        std::string::npos)
        << processes.report(rank).text;
  }
}

// Rank 1 is gone; the others must find out, name it, and not take much longer than the timeout.
void ExpectRankOneMissed(const Processes& processes) {
  EXPECT_FALSE(processes.ExitedWell(1));
  for (const int rank : {0, 2}) {
    const Report& report = processes.report(rank);
    EXPECT_TRUE(processes.ExitedWell(rank));
    EXPECT_EQ(report.code, MOK_DEADLINE_EXCEEDED);
    EXPECT_NE(std::string(report.text).find("missing rank 1 "), std::string::npos) << report.text;
    EXPECT_EQ(std::string(report.text).find("), rank"), std::string::npos) << report.text;
    EXPECT_EQ(report.code_afterwards, MOK_DEADLINE_EXCEEDED);
    EXPECT_LT(report.seconds, 20);
  }
}

void RunUntilRankOneIsMissed(MokWorkspace* workspace, RankLayer* layer, Report* report) {
  const auto begin = std::chrono::steady_clock::now();
  report->Note(layer->Forward(workspace));
  report->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  report->code_afterwards = layer->Forward(workspace);
  mok_workspace_destroy(workspace);
}

// Processes that build a schedule and go on to the forward, rank 1 after end(its layer).
Processes WithoutRankOne(const char* test, const LayerData& data,
                         const std::function<void(RankLayer& layer)>& end) {
  const std::string name = HeapName(test);
  return Processes([&](int rank, Report* report) {
    MokWorkspace* workspace = CreateWorkspace(rank, name, 1, report);
    if (workspace == nullptr) return;
    RankLayer layer(data, rank, {});
    report->Note(layer.BuildSchedule(workspace));
    if (rank == 1) end(layer);
    RunUntilRankOneIsMissed(workspace, &layer, report);
  });
}

TEST(ProcessTest, RankKilledBetweenCalls) {
  const LayerData data(SpecOfTest());
  ExpectRankOneMissed(WithoutRankOne("killed", data, [](RankLayer&) { raise(SIGKILL); }));
}

// Weights behind a page that nobody may read: the rank dies in its first GEMM, after the entry
// barrier and before the exit barrier.
TEST(ProcessTest, RankDiesInTheMiddleOfAPass) {
  const LayerData data(SpecOfTest());
  const Processes processes = WithoutRankOne("dies", data, [](RankLayer& layer) {
    std::signal(SIGSEGV, [](int) { _exit(7); });
    layer.forward_args.layer.routed.gate =
        mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  });
  ExpectRankOneMissed(processes);
  for (const int rank : {0, 2}) {
    EXPECT_NE(std::string(processes.report(rank).text).find("ExitBarrier"), std::string::npos)
        << processes.report(rank).text;
  }
}

}  // namespace
}  // namespace mok::testing
