// Scalars that travel with rows: one fp32 per route. Each lane of the warp that moves the rows of a
// tile moves the scalar of one of them, with plain loads and stores; RowMover calls Begin before it
// issues the rows and End after it, so that a load from a peer overlaps with them.
#pragma once

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/device.h"

namespace mok {

// A row of a tile, as one lane sees it.
struct ScalarRow {
  int32_t local_row, rank, route;
};

// Rows that bring no scalar.
struct NoScalars {
  MOK_DEVICE void Begin(const ScalarRow&) {}
  MOK_DEVICE void End(const ScalarRow&) {}
};

// local[row] = the scalar of the row's route on its source rank.
class PulledScalars {
 public:
  // active: false stands for NoScalars.
  MOK_DEVICE PulledScalars(const ScalarPull& pull, bool active) : pull_(&pull), active_(active) {}

  MOK_DEVICE void Begin(const ScalarRow& row) {
    if (active_) value_ = pull_->peers.of_rank[row.rank][row.route];
  }
  MOK_DEVICE void End(const ScalarRow& row) {
    if (active_) pull_->local[row.local_row] = value_;
  }

 private:
  const ScalarPull* pull_;
  bool active_;
  float value_ = 0;
};

// The scalar of the row's route on its source rank = the sum of the row's parts, ascending.
class PushedSums {
 public:
  // The parts of local row r are row r + offset of ScalarPush::parts.
  explicit MOK_DEVICE PushedSums(const ScalarPush& push, int32_t offset = 0)
      : push_(&push), offset_(offset) {}

  MOK_DEVICE void Begin(const ScalarRow& row) {
    const float* parts = push_->parts + int64_t{row.local_row + offset_} * push_->num_parts;
    float sum = 0;
    for (int32_t i = 0; i < push_->num_parts; ++i) sum += parts[i];
    push_->peers.of_rank[row.rank][row.route] = sum;
  }
  MOK_DEVICE void End(const ScalarRow&) {}

 private:
  const ScalarPush* push_;
  int32_t offset_;
};

}  // namespace mok
