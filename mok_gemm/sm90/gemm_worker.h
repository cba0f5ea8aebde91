// The Hopper GEMM worker: what producer and consumer roles do for one tile. A kernel composes it:
// the test and benchmark kernel in grouped_gemm_kernel.h, and the megakernel.
//
// Block layout: warps 0 .. Config::kConsumerWarps - 1 are consumers; one thread of another warp is
// the producer. Stages are a Pipeline: `full` has one arrival (the producer's, with the bytes of
// the tile), `empty` one per consumer warp.
#pragma once

#include "mok_core/bits.h"
#include "mok_core/device/descriptor.h"
#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_gemm/sm90/gemm_config.h"
#include "mok_gemm/sm90/gemm_task.h"

namespace mok {

// Operand stages; member of the kernel's shared storage, which starts 1024-byte aligned.
template <class Config>
struct alignas(1024) GemmStages {
  // Row r of a tile is 128 bytes, its 16-byte chunks swizzled by r % 8, as tensor loads leave them.
  unsigned char a[Config::kStages][Config::kABytes];  // [kTileM, kTileK] bf16
  unsigned char b[Config::kStages][Config::kBBytes];  // [kTileN, kTileK] bf16, two halves
};

template <class Config>
using GemmBarriers = PipelineBarriers<Config::kStages>;
template <class Config>
using GemmPipeline = Pipeline<Config::kStages>;

// By one thread; FenceMbarrierInit and SyncBlock have to follow.
template <class Config>
MOK_DEVICE void InitializeGemm(GemmStages<Config>& stages, GemmBarriers<Config>& barriers) {
  for (int i = 0; i < Config::kStages; ++i) {
    MOK_NAME(stages.a[i], "a", i);
    MOK_NAME(stages.b[i], "b", i);
  }
  constexpr int kExtra = Config::kBug == GemmBug::kEmptyCountTooHigh ? 1 : 0;
  GemmPipeline<Config>::Initialize(barriers, 1, Config::kConsumerWarps + kExtra);
}

namespace gemm_internal {

// How many warpgroups have any of a tile's valid rows.
template <class Config>
MOK_DEVICE int WarpgroupsWithRows(int rows) {
  return CeilDiv(rows, Config::kWarpgroupM);
}

template <class Config>
MOK_DEVICE void LoadHalfB(unsigned char* shared, const TensorMap* map, uint64_t* barrier, int k,
                          WeightCoordinate at) {
  if constexpr (Config::kOrder == ColumnOrder::kPermuted) {
    TensorLoad5d(shared, map, barrier, k, 0, 0, 0, at.row);
  } else {
    TensorLoad3d(shared, map, barrier, k, at.row, at.expert);
  }
}

}  // namespace gemm_internal

// Producer, one thread: loads all K blocks of the tile. If other threads of the grid wrote A (or
// B), the caller has acquired their signal and executed FenceProxyAsyncGlobal.
//
// before_block(k): what the thread has to do before it loads K block k.
template <class Config, class Waiter, class BeforeBlock>
MOK_DEVICE void ProducerLoadTile(const GemmTask& task_in_shared, GemmStages<Config>& stages,
                                 GemmPipeline<Config>& pipeline, const Waiter& wait,
                                 BeforeBlock before_block) {
  const GemmTask task = task_in_shared;
  const int warpgroups = gemm_internal::WarpgroupsWithRows<Config>(task.rows);
  const uint32_t bytes_of_a =
      Config::kBug == GemmBug::kShortTileBytes ? Config::kABytes : warpgroups * Config::kABoxBytes;
  const uint32_t bytes_of_b = Config::kBug == GemmBug::kNarrowTileBytes
                                  ? Config::kBBytes
                                  : task.b_halves * Config::kBBoxBytes;
  constexpr int kSecond = Config::kBug == GemmBug::kSecondHalfFromFirst ? 0 : 1;
  for (int block = 0; block < task.k_blocks; ++block, pipeline.Advance()) {
    before_block(block);
    if (Config::kBug != GemmBug::kSkipEmptyWait) pipeline.Acquire(wait);
    uint64_t* full = pipeline.ExpectBytes(bytes_of_a + bytes_of_b);
    const int k = block * Config::kTileK;
    unsigned char* a = stages.a[pipeline.stage()];
    unsigned char* b = stages.b[pipeline.stage()];
    TensorLoad2d(a, task.a, full, k, task.a_row);
    gemm_internal::LoadHalfB<Config>(b, task.b[0], full, k, {task.b_expert, task.b_row[0]});
    if (task.b_halves > 1) {
      gemm_internal::LoadHalfB<Config>(b + Config::kBBoxBytes, task.b[kSecond], full, k,
                                       {task.b_expert, task.b_row[kSecond]});
    }
    if (warpgroups > 1) {
      TensorLoad2d(a + Config::kABoxBytes, task.a, full, k, task.a_row + Config::kWarpgroupM);
    }
  }
}

template <class Config, class Waiter>
MOK_DEVICE void ProducerLoadTile(const GemmTask& task, GemmStages<Config>& stages,
                                 GemmPipeline<Config>& pipeline, const Waiter& wait) {
  ProducerLoadTile<Config>(task, stages, pipeline, wait, [](int) {});
}

// One consumer warpgroup's part of a tile: 64 rows by kTileN columns. The accumulator fragment is
// that of wgmma m64nNk16 (mok_core/ptx/wgmma.h).
template <class Config>
class GemmConsumer {
 public:
  using Accumulator = float[Config::kAccumulators];

  explicit MOK_DEVICE GemmConsumer(GemmStages<Config>& stages, GemmBarriers<Config>& barriers)
      : pipeline_(barriers),
        warpgroup_(Uniform(static_cast<int>(ThreadIndex().x) / 128)),
        descriptor_a_(kDescriptor |
                      DescriptorAddress(SharedAddress(stages.a[0]) + RowOffset(warpgroup_))),
        descriptor_b_(kDescriptor | DescriptorAddress(SharedAddress(stages.b[0]))) {}

  // All threads of the warpgroup. False: the warpgroup has no valid rows in this tile; it has
  // freed the stages without multiplying, and the accumulator is undefined. kKeepsLast: true leaves
  // the last stage to the caller, who has to release it.
  template <bool kKeepsLast = false, class Waiter>
  MOK_DEVICE bool MainLoop(const GemmTask& task, const Waiter& wait, Accumulator& accumulator) {
    // What branches depend on is read at once, so that latencies overlap.
    const int rows = Uniform(task.rows), halves = Uniform(task.b_halves);
    const int k_blocks = Uniform(task.k_blocks);
    if (rows <= warpgroup_ * Config::kWarpgroupM) {
      if (Config::kBug != GemmBug::kIdleWarpgroupSkips) SkipStages(k_blocks, wait);
      return false;
    }
    if (halves == 1 && Config::kBug != GemmBug::kNarrowTileMultipliesAll) {
      Accumulate<Config::kHalfN, KMajorOperands, kKeepsLast>(k_blocks, wait,
                                                             FirstHalf(accumulator));
    } else {
      Accumulate<Config::kTileN, KMajorOperands, kKeepsLast>(k_blocks, wait, accumulator);
    }
    return true;
  }

 protected:
  static constexpr int kInstructionK = 16;

  // Descriptor fields of an operand and the bytes from one step of K to the next: inside the
  // swizzle span, or 16 rows of a box on.
  template <OperandMajor kMajor>
  struct Operand {
    static constexpr bool kIsMn = kMajor == OperandMajor::kMn;
    static constexpr uint64_t kDescriptor = OperandDescriptorSm90(
        kIsMn ? MnMajorLayout(Swizzle::k128, Config::kTileK) : KMajorLayout(Swizzle::k128));
    static constexpr bool kStepsByRows =
        kIsMn && Config::kBackwardBug != BackwardBug::kMnStepOfKMajor;
    static constexpr uint32_t kStepBytes =
        kInstructionK * (kStepsByRows ? static_cast<uint32_t>(Swizzle::k128) : 2);
  };
  struct KMajorOperands {
    using A = Operand<OperandMajor::kK>;
    using B = Operand<OperandMajor::kK>;
  };
  static constexpr uint64_t kDescriptor = KMajorOperands::A::kDescriptor;

  // How a sum of products begins, and what happens to each K block between its arrival and its
  // multiply.
  struct FromZero {
    static constexpr bool accumulate = false;
    MOK_DEVICE void Prepare(int /*block*/, int /*stage*/) const {}
  };

  static MOK_DEVICE uint32_t RowOffset(int warpgroup) {
    return Config::kBug == GemmBug::kWrongWarpgroupRows ? 0 : warpgroup * Config::kABoxBytes;
  }

  // The registers of the first kHalfN columns.
  static MOK_DEVICE float (&FirstHalf(Accumulator& accumulator)) [Config::kAccumulators / 2] {
    return reinterpret_cast<float (&)[Config::kAccumulators / 2]>(accumulator);
  }

  // The products of all K blocks (at least one), for the first kN columns of the tile.
  template <int kN, class Operands, bool kKeepsLast = false, class Waiter, class Start = FromZero>
  MOK_DEVICE void Accumulate(int k_blocks, const Waiter& wait, float (&accumulator)[kN / 2],
                             const Start& start = {}) {
    int previous = 0;
    for (int block = 0; block < k_blocks; ++block, pipeline_.Advance()) {
      if (Config::kBug != GemmBug::kSkipFullWait) pipeline_.Wait(wait);
      const int stage = pipeline_.stage();
      start.Prepare(block, stage);
      if (Config::kBug != GemmBug::kNoWgmmaFence) WgmmaFence();
      Multiply<kN, Operands>(stage, block > 0 || start.accumulate, accumulator);
      WgmmaCommitGroup();
      if (Config::kBug == GemmBug::kReleaseTooEarly) Release(stage);
      // One group stays in flight, so that the tensor core never waits for the next barrier.
      WgmmaWaitGroup<1>(accumulator);
      if (Config::kBug != GemmBug::kReleaseTooEarly && block > 0) Release(previous);
      previous = stage;
    }
    if (Config::kBug != GemmBug::kEpilogueBeforeWait) WgmmaWaitGroup<0>(accumulator);
    if (!kKeepsLast && Config::kBug != GemmBug::kReleaseTooEarly &&
        Config::kBug != GemmBug::kNoReleaseOfLastStage) {
      Release(previous);
    }
  }

  // Issues the multiplies of one K block.
  template <int kN, class Operands>
  MOK_DEVICE void Multiply(int stage, bool accumulate, float (&accumulator)[kN / 2]) const {
    using A = typename Operands::A;
    using B = typename Operands::B;
    const int from = Config::kBug == GemmBug::kWrongStageDescriptor ? 0 : stage;
    const uint64_t a =
        AdvanceDescriptor(descriptor_a_ - kDescriptor + A::kDescriptor, from * Config::kABytes);
    const uint64_t b =
        AdvanceDescriptor(descriptor_b_ - kDescriptor + B::kDescriptor, stage * Config::kBBytes);
    MOK_UNROLL
    for (int step = 0; step < Config::kTileK / kInstructionK; ++step) {
      WgmmaBf16<kN, A::kIsMn, B::kIsMn>(accumulator, AdvanceDescriptor(a, step * A::kStepBytes),
                                        AdvanceDescriptor(b, step * B::kStepBytes),
                                        accumulate || step > 0);
    }
  }

  template <class Waiter>
  MOK_DEVICE void SkipStages(int k_blocks, const Waiter& wait) {
    for (int block = 0; block < k_blocks; ++block, pipeline_.Advance()) {
      pipeline_.Wait(wait);
      SyncWarp();  // no lane still waits for a phase that the release lets pass
      Release(pipeline_.stage());
    }
  }

  // Each warp arrives once: its wait covers the reads of its own quarter of the multiply.
  MOK_DEVICE void Release(int stage) {
    if (ThreadIndex().x % 32 == 0) pipeline_.ReleaseStage(stage);
  }

  GemmPipeline<Config> pipeline_;
  int warpgroup_;
  uint64_t descriptor_a_, descriptor_b_;  // of stage 0
};

}  // namespace mok
