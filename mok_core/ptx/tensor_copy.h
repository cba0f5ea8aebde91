// Tensor (TMA) copies (PTX ISA 8.8 section 9.7.9, cp.async.bulk.tensor). Coordinates are in
// elements, innermost dimension first; what lies outside the tensor is read as zeros and not
// written. The transaction count is that of the whole box, whatever part of it is outside.
#pragma once

#include "mok_core/ptx/compiler.h"
#include "mok_core/ptx/ids.h"

namespace mok {

// prefetch.tensormap: brings the descriptor into its cache.
MOK_DEVICE void PrefetchTensorMap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.2d load into this CTA.
MOK_DEVICE void TensorLoad2d(void* shared, const TensorMap* map, uint64_t* barrier, int c0,
                             int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1)
      : "memory");
}

// cp.async.bulk.tensor.3d load into this CTA.
MOK_DEVICE void TensorLoad3d(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                             int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// cp.async.bulk.tensor.4d load into this CTA.
MOK_DEVICE void TensorLoad4d(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                             int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// cp.async.bulk.tensor.5d load into this CTA.
MOK_DEVICE void TensorLoad5d(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                             int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// cp.async.bulk.tensor.2d load into the CTAs of `cta_mask`, at the same offset in each, completing
// on the barrier at the same offset in each.
MOK_DEVICE void TensorLoad2dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "h"(cta_mask), "r"(c0), "r"(c1)
      : "memory");
}

// cp.async.bulk.tensor.3d load into the CTAs of `cta_mask`, at the same offset in each, completing
// on the barrier at the same offset in each.
MOK_DEVICE void TensorLoad3dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// cp.async.bulk.tensor.4d load into the CTAs of `cta_mask`, at the same offset in each, completing
// on the barrier at the same offset in each.
MOK_DEVICE void TensorLoad4dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// cp.async.bulk.tensor.5d load into the CTAs of `cta_mask`, at the same offset in each, completing
// on the barrier at the same offset in each.
MOK_DEVICE void TensorLoad5dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(
          SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "r"(c4)
      : "memory");
}

// cp.async.bulk.tensor.2d store from this CTA; joins the thread's current bulk group.
MOK_DEVICE void TensorStore2d(const TensorMap* map, const void* shared, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(SharedAddress(shared)), "r"(c0), "r"(c1)
      : "memory");
}

// cp.async.bulk.tensor.3d store from this CTA; joins the thread's current bulk group.
MOK_DEVICE void TensorStore3d(const TensorMap* map, const void* shared, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(SharedAddress(shared)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.2d: brings the box into L2.
MOK_DEVICE void TensorPrefetch2d(const TensorMap* map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
               "r"(c0), "r"(c1)
               : "memory");
}

}  // namespace mok
