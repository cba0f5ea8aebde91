// The exchanges of the backward: RecomputeDispatch and ReverseCombine pull, ReverseDispatch pushes.
#pragma once

#include "mok_comm/sm90/row_mover.h"
#include "mok_comm/sm90/scalar_mover.h"
#include "mok_core/device/device.h"
#include "mok_megakernel/sm90/backward_params.h"
#include "mok_schedule/task.h"

namespace mok {

// The router weights of rows come with their output gradients; the gradients of the weights leave
// with the input gradients, which lie in a window and not, as everything else, in the ring.
template <class Mover>
MOK_DEVICE void MoveRows(const BackwardParams& p, Direction direction, TaskKind kind,
                         const ExchangeTile& tile, Mover& mover, const DeviceWait& wait) {
  if (direction == Direction::kPull) {
    const bool recomputes = kind == TaskKind::kRecomputeDispatch;
    mover.Move(recomputes ? p.exchange.recompute_dispatch : p.exchange.reverse_combine, tile,
               PulledScalars(p.exchange.router_weights, !recomputes), wait);
  } else {
    ExchangeTile sent = tile;
    sent.local_row = static_cast<int32_t>(static_cast<uint32_t>(tile.table_row) %
                                          static_cast<uint32_t>(p.exchange.d_x_rows));
    mover.Move(p.exchange.reverse_dispatch, sent,
               PushedSums(p.exchange.d_router, tile.local_row - sent.local_row), wait);
  }
}

}  // namespace mok
