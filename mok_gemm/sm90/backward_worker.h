// The roles of the backward's GEMM tiles, in the same block, stages and pipeline as the forward's
// (gemm_worker.h): a kernel may mix both kinds of tasks.
//
// Stages hold: A K-major as in the forward, or MN-major as one box of 64 rows of K by 64 columns
// per consumer warpgroup; B MN-major, kTileN / 64 such boxes. DownGrad's K blocks are followed by
// one stage per 64 columns of the tile with g (in place of A) and u (of B).
#pragma once

#include "mok_core/bits.h"
#include "mok_core/device/device.h"
#include "mok_gemm/sm90/backward_epilogue.h"
#include "mok_gemm/sm90/backward_task.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_gemm/sm90/swiglu.h"

namespace mok {

namespace gemm_internal {

constexpr int kBoxColumns = 64;  // of an MN-major operand, and of g and u: one swizzle span

// Stages of g and u of a DownGrad tile.
MOK_DEVICE int ActivationStages(int columns) { return CeilDiv(columns, kBoxColumns); }

// The boxes of one K block.
template <class Config, bool kIsTransposedA>
MOK_DEVICE void LoadProductBlock(const ProductTile& tile, int range, int k, unsigned char* a,
                                 unsigned char* b, uint64_t* full) {
  constexpr bool kWrongRange = Config::kBackwardBug == BackwardBug::kSecondRangeFromFirst;
  const TensorMap* map_a = tile.a[range];
  const TensorMap* map_b = tile.b[kWrongRange ? 0 : range];
  const int warpgroups = WarpgroupsWithRows<Config>(tile.rows);
  for (int i = 0; i < warpgroups; ++i) {
    const int start = tile.a_start + i * Config::kWarpgroupM;
    TensorLoad2d(a + i * Config::kABoxBytes, map_a, full, kIsTransposedA ? start : k,
                 kIsTransposedA ? k : start);
  }
  const int boxes = tile.b_halves * Config::kHalfN / kBoxColumns;
  for (int i = 0; i < boxes; ++i) {
    unsigned char* box = b + i * kBoxColumns * Config::kTileK * 2;
    const int column = tile.b_column + i * kBoxColumns;
    if constexpr (kIsTransposedA) {
      TensorLoad2d(box, map_b, full, column, k);
    } else {
      TensorLoad3d(box, map_b, full, column, k, tile.b_expert);
    }
  }
}

template <class Config, bool kIsTransposedA, class Waiter>
MOK_DEVICE void LoadProduct(const ProductTile& tile, GemmStages<Config>& stages,
                            GemmPipeline<Config>& pipeline, const Waiter& wait) {
  const uint32_t bytes = WarpgroupsWithRows<Config>(tile.rows) * Config::kABoxBytes +
                         tile.b_halves * Config::kBBoxBytes;
  for (int range = 0; range < tile.num_ranges; ++range) {
    for (int block = 0; block < tile.k_blocks; ++block, pipeline.Advance()) {
      pipeline.Acquire(wait);
      uint64_t* full = pipeline.ExpectBytes(bytes);
      LoadProductBlock<Config, kIsTransposedA>(tile, range, tile.first_k + block * Config::kTileK,
                                               stages.a[pipeline.stage()],
                                               stages.b[pipeline.stage()], full);
    }
  }
}

template <class Config, class Waiter>
MOK_DEVICE void LoadActivations(const ProductTile& tile, const DownGradEpilogue& epilogue,
                                GemmStages<Config>& stages, GemmPipeline<Config>& pipeline,
                                const Waiter& wait) {
  constexpr BackwardBug kBug = Config::kBackwardBug;
  const int warpgroups = WarpgroupsWithRows<Config>(tile.rows);
  const int announced =
      kBug == BackwardBug::kActivationBytes ? Config::kConsumerWarpgroups : warpgroups;
  const int count = ActivationStages(tile.columns);
  for (int group = 0; group < count; ++group, pipeline.Advance()) {
    pipeline.Acquire(wait);
    uint64_t* full = pipeline.ExpectBytes(2 * announced * Config::kABoxBytes);
    const int column =
        tile.b_column + (kBug == BackwardBug::kActivationColumn ? 0 : group * kBoxColumns);
    for (int i = 0; i < warpgroups; ++i) {
      const int row = tile.a_start + i * Config::kWarpgroupM;
      const uint32_t offset = i * Config::kABoxBytes;
      TensorLoad2d(stages.a[pipeline.stage()] + offset, epilogue.gate, full, column, row);
      TensorLoad2d(stages.b[pipeline.stage()] + offset, epilogue.up, full, column, row);
    }
  }
}

// An accumulated output is read soon: brings it into L2.
template <class Config>
MOK_DEVICE void PrefetchOutput(const ProductTile& tile, const WeightGradEpilogue& epilogue) {
  if (!epilogue.accumulate || epilogue.carry_out || tile.k_blocks == 0) return;
  const int64_t element = ElementBytes(epilogue.out_dtype);
  const auto* row = static_cast<const unsigned char*>(epilogue.out);
  const auto bytes = static_cast<uint32_t>(tile.columns * element);
  for (int i = 0; i < tile.rows; ++i, row += epilogue.out_stride * element) {
    BulkPrefetch(row, bytes);
  }
}

}  // namespace gemm_internal

// Producer, one thread: loads what a tile needs. As for ProducerLoadTile, the caller has acquired
// the signals of the grid's writers of the operands and executed FenceProxyAsyncGlobal.
template <class Config, class Waiter>
MOK_DEVICE void ProducerLoadBackwardTile(const BackwardTask& task, GemmStages<Config>& stages,
                                         GemmPipeline<Config>& pipeline, const Waiter& wait) {
  using namespace gemm_internal;
  const ProductTile tile = task.product;
  if (task.kind == BackwardGemm::kWeightGrad) {
    LoadProduct<Config, true>(tile, stages, pipeline, wait);
    PrefetchOutput<Config>(tile, task.weight_grad);
    return;
  }
  LoadProduct<Config, false>(tile, stages, pipeline, wait);
  if (task.kind == BackwardGemm::kDownGrad) {
    LoadActivations(tile, task.down_grad, stages, pipeline, wait);
  }
}

// One consumer warpgroup's part of a tile of the backward: main loop and epilogue. As a
// GemmConsumer it also runs the forward's tiles (MainLoop).
template <class Config>
class BackwardConsumer : public GemmConsumer<Config> {
 public:
  using Accumulator = typename GemmConsumer<Config>::Accumulator;

  static_assert(Config::kHalfN % gemm_internal::kBoxColumns == 0,
                "half a tile of B is whole boxes");
  static_assert(Config::kBBytes >= 2 * Config::kABytes, "u and w * h fit into a stage of B");

  MOK_DEVICE BackwardConsumer(GemmStages<Config>& stages, GemmBarriers<Config>& barriers)
      : GemmConsumer<Config>(stages, barriers), stages_(&stages) {}

  // All threads of the warpgroup. On return this thread's stores have been issued. The accumulator
  // is undefined before and after, but a kernel has to use one object for all its tiles, forward
  // ones included: a multiply that overwrites registers counts as reading them, so that to the
  // compiler every accumulator is live from one tile to the next.
  //
  // routes: the table that own_rows.table_row of an InputGrad tile is a row of.
  template <class Waiter>
  MOK_DEVICE void Run(const BackwardTask& task, const RowOwners& routes, const Waiter& wait,
                      Accumulator& accumulator) {
    const TileHead head(task.product);
    const BackwardGemm kind = Uniform(task.kind);
    if (head.rows <= this->warpgroup_ * Config::kWarpgroupM) {
      this->SkipStages(NumStages(task), wait);
    } else if (kind == BackwardGemm::kWeightGrad) {
      if (head.b_halves == 1) {
        RunWeightGrad<Config::kHalfN>(task, head.stages, wait, this->FirstHalf(accumulator));
      } else {
        RunWeightGrad<Config::kTileN>(task, head.stages, wait, accumulator);
      }
    } else if (head.b_halves == 1) {
      RunColumns<Config::kHalfN>(task, kind, head.stages, routes, wait,
                                 this->FirstHalf(accumulator));
    } else {
      RunColumns<Config::kTileN>(task, kind, head.stages, routes, wait, accumulator);
    }
  }

  // The products of an InputGrad tile alone, for an epilogue of the caller's; as MainLoop
  // otherwise.
  template <class Waiter>
  MOK_DEVICE bool Products(const ProductTile& tile, const Waiter& wait, Accumulator& accumulator) {
    const TileHead head(tile);
    if (head.rows <= this->warpgroup_ * Config::kWarpgroupM) {
      this->SkipStages(head.stages, wait);
      return false;
    }
    if (head.b_halves == 1) {
      this->template Accumulate<Config::kHalfN, RowOperands>(head.stages, wait,
                                                             this->FirstHalf(accumulator));
    } else {
      this->template Accumulate<Config::kTileN, RowOperands>(head.stages, wait, accumulator);
    }
    return true;
  }

 private:
  static constexpr BackwardBug kBug = Config::kBackwardBug;
  static constexpr auto kK = OperandMajor::kK, kMn = OperandMajor::kMn;

  template <OperandMajor kMajor>
  using Operand = typename GemmConsumer<Config>::template Operand<kMajor>;
  struct RowOperands {  // C = A B
    using A = Operand<kK>;
    using B = Operand<kMn>;
  };
  struct ColumnOperands {  // C = A^T B
    using A = Operand<kMn>;
    using B = Operand<kMn>;
  };

  // Start of a weight gradient's sum; clears the rows of K that are not valid.
  struct WeightGradStart {
    const BackwardConsumer& consumer;
    const ProductTile& tile;
    bool accumulate;

    MOK_DEVICE void Prepare(int block, int stage) const {
      if (tile.last_k == Config::kTileK || block + 1 < tile.k_blocks) return;
      consumer.ClearPadding(tile, stage);
    }
  };

  // What branches depend on, read at once, so that latencies overlap.
  struct TileHead {
    int rows, b_halves, stages;  // stages: of products
    explicit MOK_DEVICE TileHead(const ProductTile& tile)
        : rows(Uniform(tile.rows)),
          b_halves(Uniform(tile.b_halves)),
          stages(Uniform(tile.num_ranges * tile.k_blocks)) {}
  };

  static MOK_DEVICE int NumStages(const BackwardTask& task) {
    const ProductTile& tile = task.product;
    const bool has_activations =
        task.kind == BackwardGemm::kDownGrad && kBug != BackwardBug::kIdleSkipsProductsOnly;
    return tile.num_ranges * tile.k_blocks +
           (has_activations ? gemm_internal::ActivationStages(tile.columns) : 0);
  }

  template <int kN, class Waiter>
  MOK_DEVICE void RunColumns(const BackwardTask& task, BackwardGemm kind, int stages,
                             const RowOwners& routes, const Waiter& wait,
                             float (&accumulator)[kN / 2]) {
    const bool is_down_grad = kind == BackwardGemm::kDownGrad;
    // The main loop hides the loads of what epilogues need of rows.
    RowWeights rows = {};
    OwnersOfRows owners;
    if (is_down_grad) {
      rows = WeightsOfRows(task);
    } else {
      const int row = gemm_internal::StorePlace(ThreadIndexReadHere()).row;
      owners = OwnersOfRows(routes, task.input_grad.own_rows, row);
    }
    this->template Accumulate<kN, RowOperands>(stages, wait, accumulator);
    if (is_down_grad) {
      EpilogueDownGrad(task, rows, wait, accumulator);
    } else {
      EpilogueInputGrad<Config, kN>(task, routes, owners, accumulator);
    }
  }

  template <int kN, class Waiter>
  MOK_DEVICE void RunWeightGrad(const BackwardTask& task, int stages, const Waiter& wait,
                                float (&accumulator)[kN / 2]) {
    const ProductTile& tile = task.product;
    const WeightGradEpilogue& epilogue = task.weight_grad;
    if (stages == 0) {
      EpilogueNoRows<Config>(task);
      return;
    }
    const bool continues = Uniform(epilogue.carry_in) && kBug != BackwardBug::kCarryIgnored;
    gemm_internal::LoadCarryIf<Config>(continues, epilogue.carry, accumulator);
    this->template Accumulate<kN, ColumnOperands>(stages, wait, accumulator,
                                                  WeightGradStart{*this, tile, continues});
    EpilogueWeightGrad<Config, kN>(task, accumulator);
  }

  // Zeros to the rows of K behind the valid ones, in all boxes of both operands: what they hold
  // may be NaN, and NaN times zero would reach the sum. The previous K block is still being
  // multiplied meanwhile. A row is one swizzle span: 128 bytes in their place.
  MOK_DEVICE void ClearPadding(const ProductTile& tile, int stage) const {
    if (kBug == BackwardBug::kPaddingKept) return;
    constexpr int kBoxBytes = gemm_internal::kBoxColumns * Config::kTileK * 2;
    constexpr int kRowWords = static_cast<int>(Swizzle::k128) / sizeof(Word4);
    const int warpgroups = gemm_internal::WarpgroupsWithRows<Config>(tile.rows);
    const int threads = 128 * warpgroups;
    const int first = (tile.last_k - (kBug == BackwardBug::kClearsValidRow ? 1 : 0)) * kRowWords;
    constexpr int kEnd = Config::kTileK * kRowWords;
    const int boxes_b = kBug == BackwardBug::kOnlyPaddingOfA
                            ? 0
                            : tile.b_halves * Config::kHalfN / gemm_internal::kBoxColumns;
    // The pipeline orders these stores behind what other consumers did to the stage before, but by
    // way of a lane that releases it for its warp, and compute-sanitizer's racecheck does not
    // follow an order that goes through bar.warp.sync and then an mbarrier. Once a tile it costs
    // nothing.
    SyncConsumers(warpgroups);
    for (int word = first + static_cast<int>(ThreadIndexReadHere()); word < kEnd; word += threads) {
      for (int i = 0; i < warpgroups; ++i) {
        reinterpret_cast<Word4*>(stages_->a[stage] + i * kBoxBytes)[word] = {0, 0, 0, 0};
      }
      for (int i = 0; i < boxes_b; ++i) {
        reinterpret_cast<Word4*>(stages_->b[stage] + i * kBoxBytes)[word] = {0, 0, 0, 0};
      }
    }
    if (kBug != BackwardBug::kNoFenceAfterClearing) FenceProxyAsyncShared();
    if (kBug != BackwardBug::kNoBarrierAfterClearing) SyncConsumers(warpgroups);
  }

  // All threads of the warpgroups that work on a tile.
  static MOK_DEVICE void SyncConsumers(int warpgroups) {
    if (warpgroups == 1 && kBug != BackwardBug::kOneBarrierForAllTiles) {
      NamedBarrierSync(kShortPaddingBarrier, 128);
    } else {
      NamedBarrierSync(kPaddingBarrier, Config::kConsumerThreads);
    }
  }

  // What a thread needs of its two rows of a DownGrad tile.
  struct RowWeights {
    float weight[2];
  };
  static MOK_DEVICE RowWeights WeightsOfRows(const BackwardTask& task) {
    const DownGradEpilogue& epilogue = task.down_grad;
    const gemm_internal::PairPlace place;
    RowWeights rows;
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      rows.weight[half] = row < task.product.rows
                              ? epilogue.router_weight[row * epilogue.router_weight_step]
                              : 0.0f;
    }
    return rows;
  }

  // The boxes of g and u of a stage, which become those of dg and du, and a third one for w * h: 64
  // rows of 128 bytes each, of this warpgroup. Bytes from the begin of all stages of A or B; boxes
  // begin at multiples of 1024, so that swizzles may be applied to these sums.
  struct ExchangeBoxes {
    unsigned char *a, *b;
    uint32_t gate, up;  // in a, in b

    // `place` selects inside the box, bits of `swizzle` are exchanged, `row_bytes` added.
    template <class Word>
    MOK_DEVICE Word& Gate(uint32_t place, uint32_t swizzle, uint32_t row_bytes) const {
      return *reinterpret_cast<Word*>(a + ((gate + place) ^ swizzle) + row_bytes);
    }
    template <class Word>
    MOK_DEVICE Word& Up(uint32_t place, uint32_t swizzle, uint32_t row_bytes) const {
      return *reinterpret_cast<Word*>(b + ((up + place) ^ swizzle) + row_bytes);
    }
    template <class Word>
    MOK_DEVICE Word& Hidden(uint32_t place, uint32_t swizzle, uint32_t row_bytes) const {
      return Up<Word>(place, swizzle, row_bytes + Config::kABytes);
    }
  };
  static constexpr uint32_t kLine = static_cast<uint32_t>(Swizzle::k128), kChunk = sizeof(Word4);

  MOK_DEVICE ExchangeBoxes BoxesOfStage(int stage) const {
    const uint32_t warpgroup = this->warpgroup_ * Config::kABoxBytes;
    return {reinterpret_cast<unsigned char*>(stages_->a),
            reinterpret_cast<unsigned char*>(stages_->b), stage * Config::kABytes + warpgroup,
            stage * Config::kBBytes + warpgroup};
  }

  // The SwiGLU backward of the first 64 columns of the accumulators, in place of g and u.
  template <int kRegisters>
  static MOK_DEVICE void SwiGluGroup(const ExchangeBoxes& boxes,
                                     const float (&accumulator)[kRegisters], const RowWeights& rows,
                                     float limit, float (&partial)[2]) {
    // Word (row, 4 j + lane % 4) of a fragment: no bank conflicts, since the lines of the 8 rows
    // that a warp accesses at once are swizzled differently.
    const uint32_t thread = ThreadIndexReadHere() % 128, lane = thread % 32;
    const uint32_t place =
        (thread / 32 * 16 + lane / 4) * kLine + lane / 4 * kChunk + lane % 4 * sizeof(uint32_t);
    constexpr int kWords = gemm_internal::kBoxColumns / 8;  // of a row
    MOK_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t down = half * 8 * kLine;
      const float weight = rows.weight[half];
      const float factor = kBug == BackwardBug::kUnweightedHidden ? 1.0f : weight;
      // All loads, then all arithmetic, then all stores: eight independent chains hide the latency
      // of one (the compiler cannot know that stores do not change what is loaded later).
      uint32_t gate[kWords], up[kWords], hidden[kWords];
      MOK_UNROLL
      for (int j = 0; j < kWords; ++j) {
        gate[j] = boxes.template Gate<uint32_t>(place, j * kChunk, down);
        up[j] = boxes.template Up<uint32_t>(place, j * kChunk, down);
      }
      MOK_UNROLL
      for (int j = 0; j < kWords; ++j) {
        const float low = accumulator[4 * j + 2 * half];
        const float high = accumulator[4 * j + 2 * half + 1];
        const SwiGluGradient even =
            SwiGluBackward(LowBFloat16(gate[j]), LowBFloat16(up[j]), Multiply(weight, low), limit);
        const SwiGluGradient odd = SwiGluBackward(HighBFloat16(gate[j]), HighBFloat16(up[j]),
                                                  Multiply(weight, high), limit);
        const uint32_t rounded = PackBFloat16(even.hidden, odd.hidden);
        partial[half] = MultiplyAdd(low, LowBFloat16(rounded), partial[half]);
        partial[half] = MultiplyAdd(high, HighBFloat16(rounded), partial[half]);
        gate[j] = PackBFloat16(even.d_gate, odd.d_gate);
        up[j] = PackBFloat16(even.d_up, odd.d_up);
        hidden[j] = PackBFloat16(Multiply(factor, LowBFloat16(rounded)),
                                 Multiply(factor, HighBFloat16(rounded)));
      }
      MOK_UNROLL
      for (int j = 0; j < kWords; ++j) {
        boxes.template Gate<uint32_t>(place, j * kChunk, down) = gate[j];
        boxes.template Up<uint32_t>(place, j * kChunk, down) = up[j];
        boxes.template Hidden<uint32_t>(place, j * kChunk, down) = hidden[j];
      }
    }
  }

  // A thread's part of its warp's 16 rows of the boxes, in whole lines of 64 columns.
  struct BoxLines {
    static constexpr int kRows = 4;
    Word4 gate[kRows], up[kRows], hidden[kRows];
  };
  static MOK_DEVICE uint32_t LineRow(uint32_t thread) { return thread / 32 * 16 + thread % 32 / 8; }

  static MOK_DEVICE BoxLines LoadLines(const ExchangeBoxes& boxes) {
    const uint32_t thread = ThreadIndexReadHere(), lane = thread % 32;
    const uint32_t place = LineRow(thread % 128) * kLine + (lane % 8 ^ lane / 8) * kChunk;
    BoxLines lines;
    MOK_UNROLL
    for (int i = 0; i < BoxLines::kRows; ++i) {
      const uint32_t swizzle = i % 2 * 4 * kChunk, down = i * 4 * kLine;
      lines.gate[i] = boxes.template Gate<Word4>(place, swizzle, down);
      lines.up[i] = boxes.template Up<Word4>(place, swizzle, down);
      lines.hidden[i] = boxes.template Hidden<Word4>(place, swizzle, down);
    }
    return lines;
  }

  static MOK_DEVICE void StoreLines(const BackwardTask& task, const BoxLines& lines, int group) {
    using namespace gemm_internal;
    const DownGradEpilogue epilogue = task.down_grad;
    const ValidProduct<Config> valid(task.product);
    const uint32_t thread = ThreadIndexReadHere();
    const auto first_row = static_cast<int>(LineRow(thread));
    const int column = group * kBoxColumns + static_cast<int>(thread % 8) * 8;
    const int rows = column < valid.columns ? valid.rows - first_row : 0;
    const int64_t step = 4 * epilogue.stride, from = first_row * epilogue.stride + column;
    BFloat16* gate = epilogue.d_gate + from;
    BFloat16* up = epilogue.d_up + from;
    BFloat16* hidden = epilogue.weighted_h + from;
    MOK_UNROLL
    for (int i = 0; i < BoxLines::kRows; ++i, gate += step, up += step, hidden += step) {
      if (4 * i < rows) Store8(gate, 0, lines.gate[i]);
      if (4 * i < rows) Store8(up, 0, lines.up[i]);
      if (4 * i < rows) Store8(hidden, 0, lines.hidden[i]);
    }
  }

  // dg, du, w * h and the tile's share of the router gradient. A row's share is summed per thread
  // over its columns ascending, then over the lanes of the quad as a tree. Changes the accumulator:
  // columns move down to the first registers, so that one loop body serves all of them. Unrolled,
  // it would be 76 KB of instructions that run once a tile, from L2.
  template <class Waiter, int kRegisters>
  MOK_DEVICE void EpilogueDownGrad(const BackwardTask& task, const RowWeights& rows,
                                   const Waiter& wait, float (&accumulator)[kRegisters]) {
    const float limit = task.down_grad.swiglu_limit;
    const int groups = gemm_internal::ActivationStages(Uniform(task.product.columns));
    float partial[2] = {0, 0};
    MOK_NO_UNROLL
    for (int group = 0; group < groups; ++group, this->pipeline_.Advance()) {
      if (kBug != BackwardBug::kReadsActivationsTooEarly) this->pipeline_.Wait(wait);
      const int stage = this->pipeline_.stage();
      const ExchangeBoxes boxes = BoxesOfStage(stage);
      SwiGluGroup(boxes, accumulator, rows, limit, partial);
      if (kBug == BackwardBug::kReleasesBeforeCopy) this->Release(stage);
      if (kBug != BackwardBug::kNoSyncBeforeCopy) SyncWarp();
      const BoxLines lines = LoadLines(boxes);
      // The next tensor load into the stage comes after these reads and stores. The lines are
      // stored last: the fence contains a MEMBAR.CTA, which covers stores to global memory, too.
      if (kBug != BackwardBug::kNoFenceBeforeRelease) FenceProxyAsyncShared();
      SyncWarp();
      if (kBug != BackwardBug::kReleasesBeforeCopy) this->Release(stage);
      StoreLines(task, lines, group);
      gemm_internal::NextColumns(accumulator);
    }
    StorePartials(task, partial);
  }

  static MOK_DEVICE void StorePartials(const BackwardTask& task, const float (&partial)[2]) {
    const DownGradEpilogue& epilogue = task.down_grad;
    const gemm_internal::PairPlace place;
    for (int half = 0; half < 2; ++half) {
      float sum = partial[half];
      if (kBug != BackwardBug::kPartialOfOneLane) {
        sum += ShuffleXor(sum, 1);
        sum += ShuffleXor(sum, 2);
      }
      const int row = place.row + 8 * half;
      if (place.column == 0 && row < task.product.rows) {
        epilogue.router_partial[row * epilogue.router_partial_stride] = sum;
      }
    }
  }

  GemmStages<Config>* stages_;
};

}  // namespace mok
