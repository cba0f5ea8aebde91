// What the host has to know of a pass's kernel.
#pragma once

#include <type_traits>

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

// info_of(std::integral_constant<ColumnOrder, order>()): both orders are instantiated.
template <class InfoOf>
PassKernelInfo KernelInfoOfOrder(ColumnOrder order, InfoOf info_of) {
  using Permuted = std::integral_constant<ColumnOrder, ColumnOrder::kPermuted>;
  using Natural = std::integral_constant<ColumnOrder, ColumnOrder::kNatural>;
  return order == ColumnOrder::kPermuted ? info_of(Permuted()) : info_of(Natural());
}

}  // namespace mok
