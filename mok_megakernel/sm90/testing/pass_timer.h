// Times passes that run on several GPUs at once, as DESIGN section 11 asks: behind a device sleep,
// the ranks aligned, between events of each rank's stream. For GPUs only.
#pragma once

#include <functional>
#include <vector>

#include "mok_core/status.h"

namespace mok::testing {

class PassTimer {
 public:
  struct Lane {
    int device;
    void* stream;
  };
  // One lane per device that takes part.
  explicit PassTimer(std::vector<Lane> lanes);
  ~PassTimer();
  PassTimer(const PassTimer&) = delete;
  PassTimer& operator=(const PassTimer&) = delete;

  // Milliseconds from the moment when all devices start on what `launch` queues until the last of
  // them has finished it.
  StatusOr<double> Run(const std::function<Status()>& launch);

 private:
  std::vector<Lane> lanes_;
  std::vector<void*> begin_, end_;  // events of each lane
  uint32_t* gate_;                  // mapped host memory: the pass that may start
  uint32_t pass_ = 0;
};

}  // namespace mok::testing
