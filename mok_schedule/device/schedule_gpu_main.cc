// For a machine with GPUs: builds schedules there from random batches, compares them bit for bit
// with the host's, and times the kernel. With one GPU all ranks share it; with more, ranks also
// have GPUs of their own. Exit status 0: everything agreed.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/device/wait_record.h"
#include "mok_schedule/device/launch_schedule.h"
#include "mok_schedule/device/testing/schedule_ranks.h"

namespace mok::testing {
namespace {

constexpr int kMultiprocessors = 132;

int num_failures = 0;

void Report(const std::string& what, const Status& status) {
  if (status.ok()) return;
  ++num_failures;
  std::printf("FAILED %s: %s\n", what.c_str(), status.ToString().c_str());
}

Status Records(const ScheduleRanks& ranks, int ep_size) {
  for (int rank = 0; rank < ep_size; ++rank) {
    MOK_RETURN_IF_ERROR(
        CheckDeviceWaitRecord(ranks.wait_record(rank), {nullptr, &ScheduleWaitName}));
  }
  return OkStatus();
}

// Several batches in flight, random layers of many sizes.
Status RandomCase(uint64_t seed, int most_ranks, bool own_devices) {
  std::mt19937_64 random(seed);
  ScheduleRanksConfig config =
      RandomScheduleConfig(most_ranks, seed % 5 == 0 ? 20000 : 700, random);
  config.own_devices = own_devices;
  config.kernel = GetScheduleKernel();
  config.grid_blocks = seed % 3 == 0
                           ? static_cast<int>(2 + seed % 100)
                           : ScheduleGridBlocks(config.ep_size() * config.max_tokens * config.topk,
                                                kMultiprocessors, config.kernel.threads);
  constexpr int kSlots = 4;
  ScheduleRanks ranks(config, kSlots);
  for (int slot = 0; slot < kSlots; ++slot) {
    ranks.SetBatch(RandomScheduleBatch(config, seed % 4 == 1, random), slot);
  }
  for (int slot = 0; slot < kSlots; ++slot) ranks.Launch(slot);
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  MOK_RETURN_IF_ERROR(Records(ranks, config.ep_size()));
  for (int slot = 0; slot < kSlots; ++slot) MOK_RETURN_IF_ERROR(ranks.Compare(slot));
  return CompareDecoding(ranks, 0, kSlots - 1, random);
}

struct Shape {
  const char* name;
  int64_t tokens;  // of each rank
  int topk;
  int num_experts;
};

// Mean time of a build when builds follow each other; the kernel alone, since the queue is full.
void Time(const Shape& shape, int ep_size) {
  std::mt19937_64 random(1);
  ScheduleRanksConfig config;
  config.topk = shape.topk;
  config.max_tokens = shape.tokens;
  config.partition = EvenPartition(shape.num_experts, ep_size);
  config.macrobatch_blocks = std::max<int64_t>(1, shape.tokens * shape.topk / 128 * 5 / 4);
  config.kernel = GetScheduleKernel();
  config.grid_blocks = ScheduleGridBlocks(ep_size * shape.tokens * shape.topk, kMultiprocessors,
                                          config.kernel.threads);
  std::uniform_int_distribution<int64_t> expert(0, shape.num_experts - 1);
  ScheduleBatch batch(ep_size);
  for (std::vector<int64_t>& ids : batch) {
    ids.resize(shape.tokens * shape.topk);
    for (int64_t& id : ids) id = expert(random);
  }
  ScheduleRanks ranks(config, 1);
  ranks.SetBatch(batch, 0);
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto microseconds = [](auto duration, int count) {
    return std::chrono::duration<double, std::micro>(duration).count() / count;
  };
  constexpr int kRepeats = 300;
  double best = 1e9, launch = 0;
  for (int round = 0; round < 5; ++round) {
    const auto begin = now();
    for (int i = 0; i < kRepeats; ++i) ranks.Launch(0);
    launch = microseconds(now() - begin, kRepeats * ep_size);
    Report(shape.name, runtime::Synchronize());
    best = std::min(best, microseconds(now() - begin, kRepeats));
  }
  Report(shape.name, Records(ranks, ep_size));
  Report(shape.name, ranks.Compare(0));
  std::printf("%-44s %d ranks, grid %3d: %6.1f us a build, %4.1f us a launch call\n", shape.name,
              ep_size, config.grid_blocks, best, launch);
}

int Main() {
  const StatusOr<int> found = runtime::DeviceCount();
  if (!found.ok() || found.value() == 0) {
    std::printf("no CUDA device\n");
    return 1;
  }
  const int devices = found.value();
  constexpr int kCases = 150;
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    Report("one device, seed " + std::to_string(seed), RandomCase(seed, 8, false));
    if (devices < 2) continue;
    Report("own devices, seed " + std::to_string(seed), RandomCase(seed, devices, true));
  }
  std::printf("%d random cases%s: %d failed\n", kCases,
              devices < 2 ? " on one device" : ", each on one device and on several", num_failures);
  const Shape shapes[] = {
      {"kimi model: 2048 tokens, K 8, 12 experts", 2048, 8, 12},
      {"qwen model: 8192 tokens, K 10, 16 experts", 8192, 10, 16},
      {"kimi ep64-traffic: 16384 tokens, K 1", 16384, 1, 12},
      {"qwen ep64-traffic: 20480 tokens, K 1", 20480, 1, 16},
      {"2048 tokens, K 8, 1024 experts", 2048, 8, 1024},
  };
  for (const Shape& shape : shapes) {
    Time(shape, 1);
    for (int ep_size = 2; ep_size <= devices; ep_size *= 2) Time(shape, ep_size);
  }
  std::printf(num_failures == 0 ? "all agree\n" : "FAILED\n");
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace mok::testing

int main() { return mok::testing::Main(); }
