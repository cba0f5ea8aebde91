// Time to build a routing table, and to decode a task with its dependencies.
//
// The table is that of one rank of a 64-rank domain (all routes of all ranks are read); the program
// is the backward over it. Both are to stay far below a pass: the table under 3 % of a forward, a
// task under a thousandth of a tile's GEMM.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "mok_core/status.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"
#include "mok_schedule/task_program.h"

namespace mok {
namespace {

constexpr int kRepeats = 11;

// Median of the run times of `function`, in nanoseconds.
template <class Function>
double MedianNanoseconds(const Function& function) {
  std::vector<double> times;
  for (int i = 0; i < kRepeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    function();
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    times.push_back(time.count());
  }
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

void Measure(const char* name, int ep_size, int64_t tokens_per_rank, int topk, int num_experts) {
  std::mt19937_64 random(1);
  std::uniform_int_distribution<int32_t> expert(0, num_experts - 1);
  std::vector<int32_t> ids(ep_size * tokens_per_rank * topk);
  for (int32_t& id : ids) id = expert(random);
  std::vector<RankRoutes> routes;
  for (int rank = 0; rank < ep_size; ++rank) {
    routes.push_back({ids.data() + rank * tokens_per_rank * topk, tokens_per_rank});
  }
  const ExpertPartition partition = EvenPartition(num_experts, ep_size);
  const double build =
      MedianNanoseconds([&] { MOK_CHECK(BuildRoutingTable(routes, partition, 0, topk).ok()); });
  const StatusOr<RoutingTable> table = BuildRoutingTable(routes, partition, 0, topk);
  MOK_CHECK(table.ok()) << table.status();

  ProgramShape shape;
  shape.pass = Pass::kBackward;
  shape.ring = {table->num_row_blocks(), 19, std::max<int64_t>(1, table->num_row_blocks() / 3)};
  shape.intermediate_tiles = 16;
  shape.down_grad_tiles = 8;
  shape.hidden_tiles = 28;
  shape.weight_grad_down_tiles = 16 * 28;
  shape.weight_grad_gate_up_tiles = 16 * 28;
  const StatusOr<TaskProgram> program = TaskProgram::Create(shape, table->view());
  MOK_CHECK(program.ok()) << program.status();
  const int64_t num_tasks = program->NumTasks(Queue::kMerged);
  int64_t sum = 0;
  const double decode = MedianNanoseconds([&] {
    for (int64_t i = 0; i < num_tasks; ++i) sum += program->Decode(Queue::kMerged, i).tile;
  });
  const double both = MedianNanoseconds([&] {
    for (int64_t i = 0; i < num_tasks; ++i) {
      sum += program->DependenciesOf(program->Decode(Queue::kMerged, i)).num_waits;
    }
  });
  MOK_CHECK(sum > 0);
  std::printf(
      "%-28s table %8.0f us (%4.2f ns a route)   %7lld tasks: decode %5.1f ns, "
      "with dependencies %5.1f ns\n",
      name, build / 1e3, build / static_cast<double>(ids.size()), static_cast<long long>(num_tasks),
      decode / static_cast<double>(num_tasks), both / static_cast<double>(num_tasks));
}

}  // namespace
}  // namespace mok

int main() {
  mok::Measure("2 ranks, 2048 tokens, 8/12", 2, 2048, 8, 12);
  mok::Measure("64 ranks, 2048 tokens, 8/384", 64, 2048, 8, 384);
  return 0;
}
