// What the host has to know of a pass's kernel.
#pragma once

#include "mok_megakernel/sm90/pass_launch.h"
#include "mok_megakernel/sm90/pass_storage.h"

namespace mok {

// address: of a kernel with that Config.
template <class Config>
PassKernelInfo KernelInfoOf(const void* address) {
  using Storage = PassStorage<Config>;
  return {address,
          sizeof(Storage),
          Config::Gemm::kTileN,
          Config::kChunkBytes,
          Storage::kDedicatedChunkBytes,
          Config::kTraces};
}

}  // namespace mok
