#include "mok_schedule/ring_plan.h"

#include <algorithm>
#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/status.h"
#include "mok_schedule/routing_table.h"

namespace mok {

int64_t DefaultMinibatchRows(const MinibatchModel& model) {
  MOK_CHECK(model.intermediate > 0 && model.tile_rows > 0 && model.tile_columns > 0 &&
            model.workers_per_tile > 0 && model.num_workers > 0 && model.waves > 0)
      << "MinibatchModel fields must be positive";
  const int64_t tiles_at_once = std::max<int64_t>(1, model.num_workers / model.workers_per_tile);
  // Tiles are counted by area: a fraction of a row of tiles also counts.
  const int64_t area = model.waves * tiles_at_once * model.tile_rows * model.tile_columns;
  return RoundUp<int64_t>(CeilDiv(area, 2 * model.intermediate), kRowBlock);
}

int64_t DefaultMacrobatchRows(const MacrobatchModel& model) {
  MOK_CHECK(model.total_tokens >= 0 && model.topk > 0 && model.num_experts > 0 &&
            model.num_local_experts >= 0 && model.minibatch_rows > 0)
      << "MacrobatchModel fields out of range";
  // tokens * K < 2^31 per rank times some ranks, and experts < 2^20: no overflow of int64.
  const int64_t routes = model.total_tokens * model.topk;
  const int64_t balanced = CeilDiv<int64_t>(routes * model.num_local_experts, model.num_experts);
  const int64_t rows = CeilDiv<int64_t>(balanced * 5, 4) + model.num_local_experts * kRowBlock;
  const int64_t capacity =
      RoutingTableCapacityRows(model.total_tokens, model.topk, model.num_local_experts);
  const int64_t ring = std::min(RoundUp(rows, model.minibatch_rows), capacity);
  return std::max<int64_t>(ring, kRowBlock);  // a rank without rows still needs a valid plan
}

}  // namespace mok
