// The end of both passes on the consumers: the tiles that sum the routes in their epilogue, if the
// reduction is fused, and TokenReduce.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_megakernel/sm90/pass_compute.h"
#include "mok_megakernel/sm90/reduce_epilogue.h"
#include "mok_megakernel/sm90/token_reduce.h"

namespace mok {

// A task with a fused reduction: multiplies its tiles from left to right, sums the routes and
// stores. `tile`: the first one. products(tile, accumulator) multiplies a tile, or returns false if
// the warpgroup has no rows in it. The accumulators hold zeros whenever they are not in use: a
// multiply names them as inputs, too, and their registers would otherwise be kept from one tile to
// the next, also while the epilogue needs them.
template <class Config, ColumnOrder kOrder, class Tile, class Products>
MOK_DEVICE void MultiplyAndReduce(const TokenReduction& reduction,
                                  const typename Config::Work& work, Tile tile, LateWait& late,
                                  ConsumerTrace<Config>& trace, Products products) {
  using Gemm = typename Config::Gemm;
  ReduceTile reduced = work.reduced;
  const TileRoutes routes(reduction, reduced);
  MOK_NO_UNROLL
  for (; reduced.columns > 0; reduced.column += Gemm::kTileN, reduced.columns -= Gemm::kTileN) {
    typename GemmConsumer<Gemm>::Accumulator accumulator = {};
    const bool has_rows = products(tile, accumulator);
    trace.Record(work, TracePhase::kWork);
    if (late.Await(work.late_counter) && has_rows) {
      trace.Record(work, TracePhase::kWait);
      EpilogueReduce<Config, kOrder>(reduction, reduced, routes, accumulator);
    }
    pass_internal::MoveRight<Gemm>(reduced.columns - Gemm::kTileN, tile);
  }
}

// All tasks that are left. fused(work, late) does one with a fused reduction, scalars(tokens) sums
// what else belongs to the tokens of a TokenReduce. Behind the loop of the other tiles: one loop
// for both would keep the accumulators' registers alive in the reductions, since a tile's first
// multiply names them as inputs, too.
template <class Config, class Fused, class Scalars>
MOK_DEVICE void RunReductions(const TokenReduction& reduction, PassQueue<Config>& queue,
                              DeviceWait& wait, ConsumerTrace<Config>& trace, Fused fused,
                              Scalars scalars) {
  using Work = typename Config::Work;
  LateWait late(wait);
  for (;; queue.Pop()) {
    const Work& work = queue.Front(wait);
    if (work.kind != Work::Kind::kFusedReduce) break;
    wait.SetTask(work.task_kind, work.task);
    trace.Record(work, TracePhase::kWait);
    fused(work, late);
    trace.Record(work, TracePhase::kStore);
  }
  for (;;) {
    const Work& work = queue.Front(wait);
    if (work.kind == Work::Kind::kEnd) break;
    wait.SetTask(work.task_kind, work.task);
    trace.Record(work, TracePhase::kWait);
    if (Config::kBug == PassBug::kTaskReleasedBeforeRead) queue.Pop();
    const auto thread = static_cast<int>(ThreadIndexReadHere());
    ReduceTokens(reduction, work.tokens, thread, Config::Gemm::kConsumerThreads);
    scalars(work.tokens);
    trace.Record(work, TracePhase::kStore);
    if (Config::kBug != PassBug::kTaskReleasedBeforeRead) queue.Pop();
  }
}

}  // namespace mok
