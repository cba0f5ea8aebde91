// The exchanges of the backward: RecomputeDispatch and ReverseCombine pull, ReverseDispatch pushes.
#pragma once

#include "mok_comm/sm90/row_mover.h"
#include "mok_comm/sm90/scalar_mover.h"
#include "mok_core/device/device.h"
#include "mok_megakernel/sm90/backward_params.h"
#include "mok_schedule/task.h"

namespace mok {

// The router weights of rows come with their output gradients; the gradients of the weights leave
// with the input gradients.
template <class Mover>
MOK_DEVICE void MoveRows(const BackwardParams& p, Direction direction, TaskKind kind,
                         const ExchangeTile& tile, Mover& mover, const DeviceWait& wait) {
  if (direction == Direction::kPull) {
    const bool recomputes = kind == TaskKind::kRecomputeDispatch;
    mover.Move(recomputes ? p.exchange.recompute_dispatch : p.exchange.reverse_combine, tile,
               PulledScalars(p.exchange.router_weights, !recomputes), wait);
  } else {
    mover.Move(p.exchange.reverse_dispatch, tile, PushedSums(p.exchange.d_router), wait);
  }
}

}  // namespace mok
