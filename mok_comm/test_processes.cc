#include "mok_comm/test_processes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "mok_core/status.h"

namespace mok {

TestProcess::TestProcess(const std::function<void()>& body) {
  std::fflush(stdout);
  pid_ = fork();
  MOK_CHECK(pid_ >= 0) << "fork failed";
  if (pid_ != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // no child outlives the test
  body();
  std::fflush(stdout);
  _exit(::testing::Test::HasFailure() ? 1 : 0);
}

TestProcess::~TestProcess() {
  if (pid_ > 0) Kill();
}

TestProcess::TestProcess(TestProcess&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}

int TestProcess::Wait() {
  int status = -1;
  MOK_CHECK(waitpid(std::exchange(pid_, -1), &status, 0) > 0);
  return status;
}

bool TestProcess::Succeeded() {
  const int status = Wait();
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void TestProcess::Kill() {
  kill(pid_, SIGKILL);
  Wait();
}

bool RunRanks(int size, const std::function<void(int rank)>& body) {
  std::vector<TestProcess> processes;
  for (int rank = 0; rank < size; ++rank) processes.emplace_back([&, rank] { body(rank); });
  bool succeeded = true;
  for (TestProcess& process : processes) succeeded = process.Succeeded() && succeeded;
  return succeeded;
}

bool RunProcessesOnHeap(const std::string& test, int size, size_t bytes, const HeapBody& body) {
  const std::string name = UniqueGroupName(test);
  return RunRanks(size, [&](int rank) {
    const auto heap =
        CreatePosixSharedMemoryHeap({name, rank, size, bytes, std::chrono::seconds(60)});
    ASSERT_TRUE(heap.ok()) << heap.status();
    body(**heap);
  });
}

void RunThreadsOnHeap(int size, size_t bytes, const HeapBody& body) {
  const auto heaps = std::move(CreateInProcessHeaps(size, bytes)).value();
  std::vector<std::thread> threads;
  for (const auto& heap : heaps) threads.emplace_back([&] { body(*heap); });
  for (std::thread& thread : threads) thread.join();
}

std::string UniqueGroupName(const std::string& test) { return StrCat(test, ".", getpid()); }

}  // namespace mok
