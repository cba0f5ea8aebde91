// The exchanges of the forward: Dispatch pulls, Combine pushes.
#pragma once

#include "mok_comm/sm90/row_mover.h"
#include "mok_comm/sm90/scalar_mover.h"
#include "mok_core/device/device.h"
#include "mok_megakernel/sm90/forward_params.h"
#include "mok_schedule/task.h"

namespace mok {

template <class Mover>
MOK_DEVICE void MoveRows(const ForwardParams& p, Direction direction, TaskKind,
                         const ExchangeTile& tile, Mover& mover, const DeviceWait& wait) {
  const bool is_pull = direction == Direction::kPull;
  mover.Move(is_pull ? p.exchange.dispatch : p.exchange.combine, tile, NoScalars(), wait);
}

}  // namespace mok
