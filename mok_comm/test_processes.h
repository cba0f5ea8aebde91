// Test helper: ranks as processes, or as threads. For tests only.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "mok_comm/symmetric_heap.h"

namespace mok {

// A forked process that runs `body` with googletest assertions. Fork before starting threads.
class TestProcess {
 public:
  explicit TestProcess(const std::function<void()>& body);
  // Kills the process if nobody has waited for it.
  ~TestProcess();
  TestProcess(TestProcess&& other) noexcept;
  TestProcess& operator=(TestProcess&&) = delete;

  // True when the process ended by itself and no assertion failed in it.
  bool Succeeded();
  // SIGKILL, and waits until the process is gone.
  void Kill();

 private:
  int Wait();

  pid_t pid_;
};

// body(rank) for ranks 0 to size - 1, one process each, at once; true when all succeeded.
bool RunRanks(int size, const std::function<void(int rank)>& body);

// body(heap) of every rank of a symmetric heap of `bytes`, at once: ranks that are processes (true
// when all succeeded), or threads.
using HeapBody = std::function<void(const SymmetricHeap& heap)>;
bool RunProcessesOnHeap(const std::string& test, int size, size_t bytes, const HeapBody& body);
void RunThreadsOnHeap(int size, size_t bytes, const HeapBody& body);

// A group name that no other process uses.
std::string UniqueGroupName(const std::string& test);

}  // namespace mok
