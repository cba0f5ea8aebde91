// The ranks of a test that build schedules on devices: their memory, their launches, and the
// comparison of what they built with the host. Through the host seam: serves emulator and GPU.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "mok_core/status.h"
#include "mok_schedule/device/launch_schedule.h"
#include "mok_schedule/routing_table.h"

namespace mok::testing {

// What all ranks have in common.
struct ScheduleRanksConfig {
  int topk = 1;
  int id_bytes = 8;
  int64_t max_tokens = 0;  // of a rank
  ExpertPartition partition;
  int64_t macrobatch_blocks = 1;
  int grid_blocks = 2;
  // Every rank on a device of its own; else all on device 0, one launch after the other.
  bool own_devices = true;
  uint64_t timeout_ns = 10'000'000'000;
  ScheduleKernelInfo kernel;

  int ep_size() const { return partition.num_ranks(); }
  std::string Description() const;
};

// Expert ids of every rank, [tokens, topk] each.
using ScheduleBatch = std::vector<std::vector<int64_t>>;

class ScheduleRanks {
 public:
  // Room for `num_slots` schedules per rank that live at the same time.
  ScheduleRanks(const ScheduleRanksConfig& config, int num_slots);
  ~ScheduleRanks();
  ScheduleRanks(const ScheduleRanks&) = delete;
  ScheduleRanks& operator=(const ScheduleRanks&) = delete;

  // Puts the batch into the input buffers of a slot and spoils the slot's tables. Blocking.
  void SetBatch(const ScheduleBatch& batch, int slot);
  // Queues the kernels of all ranks, or of the given ones.
  void Launch(int slot);
  void LaunchRanks(int slot, const std::vector<int>& ranks);
  // Queues what a rank's host does when it has raised an error.
  void Resume(int rank);

  // After synchronisation: Ok if every rank's tables are, bit for bit, those of the host; empty and
  // refused if the batch has an id outside [-1, E) or follows such a one before a rank resumes.
  Status Compare(int slot) const;
  Status CompareRefused(int slot, int rank) const;

  const DeviceSchedule& schedule(int rank, int slot) const {
    return ranks_[rank].slots[slot].schedule;
  }
  // The parameters of a rank's launches, for tests that tamper with them.
  ScheduleParams& params(int rank) { return ranks_[rank].params; }
  ScheduleErrorRecord& error(int rank) const { return *ranks_[rank].params.error; }
  RefusalState refusals(int rank) const;
  void SetRefusals(int rank, const RefusalState& state);
  DeviceWaitRecord& wait_record(int rank) const { return *ranks_[rank].params.wait.record; }

 private:
  struct Slot {
    void* ids = nullptr;
    int64_t num_tokens = 0;
    void* memory = nullptr;
    DeviceSchedule schedule = {};
  };
  struct Rank {
    int device = 0;
    void* region = nullptr;
    ScheduleParams params = {};
    std::vector<Slot> slots;
  };

  DeviceScheduleLayout TableLayout(int rank) const;
  void* Allocate(int device, int64_t bytes, const char* name);
  void AllocateRank(int rank, int num_slots);
  void LaunchSteps(int slot, int rank, ScheduleSteps steps);
  bool HasInvalidIds(int slot) const;
  // Routes of every rank; none if the batch is refused.
  StatusOr<RoutingTable> ExpectedTable(int slot, int rank, bool is_refused) const;
  Status CompareTo(int slot, int rank, bool is_refused) const;
  Status CompareRank(int rank, int slot, const RoutingTable& expected, bool is_refused) const;
  Status CompareFirstRows(int rank, int slot, const RoutingTable& expected) const;
  Status ComparePieces(int rank, int slot, const RoutingTable& expected) const;

  ScheduleRanksConfig config_;
  std::vector<Rank> ranks_;
  std::vector<ScheduleBatch> batches_;  // [slot]
  std::vector<bool> invalid_;           // [slot] the batch has an invalid id
  std::vector<bool> refused_;           // [slot]
  bool is_unheard_ = false;             // a batch has been refused and no rank has resumed
  std::vector<void*> allocations_;
};

// A batch of random size and style for the config; a share of them with invalid ids.
ScheduleBatch RandomScheduleBatch(const ScheduleRanksConfig& config, bool with_invalid_ids,
                                  std::mt19937_64& random);

// A random layer: EP size up to `most_ranks`, uneven partitions, K and id type.
ScheduleRanksConfig RandomScheduleConfig(int most_ranks, int64_t most_tokens,
                                         std::mt19937_64& random);

// On one device, of a schedule in `slot`: decodes random programs on the device and compares tasks
// and dependencies with the host's. Blocking.
Status CompareDecoding(const ScheduleRanks& ranks, int rank, int slot, std::mt19937_64& random);

}  // namespace mok::testing
