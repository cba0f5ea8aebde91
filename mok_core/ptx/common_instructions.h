// Calls of every wrapper that sm_90a, sm_100a and sm_103a share. Only compiled, never run.
#pragma once

#include "mok_core/device/device.h"

namespace mok {

struct InstructionParams {
  TensorMap map;
  uint32_t* words;
  uint64_t* doubles;
  const Word4* vectors;
  Word4* vectors_out;
  float* floats;
};

struct alignas(1024) InstructionStorage {
  unsigned char tile[16384];
  uint64_t barrier;
  Word4 response;
  uint32_t tensor_memory;
};

MOK_DEVICE void UseIdsAndSync(const InstructionParams& p, InstructionStorage& s) {
  const Index3 thread = ThreadIndex(), block = BlockIndex(), size = BlockDimensions();
  p.words[0] = thread.x + block.x + size.x + GridDimensions().x + StreamingMultiprocessorId();
  p.words[1] = ClusterRank() + ClusterSize() + SharedAddress(&s) + PairLeaderAddress(&s);
  p.words[2] = MapToClusterRank(SharedAddress(&s), 1) + ThreadIndexReadHere();
  *MapPointerToClusterRank(&s.tensor_memory, 1) = 3;
  SyncBlock();
  SyncWarp();
  NamedBarrierSync(1, 128);
  NamedBarrierArrive(2, 256);
  ClusterArriveRelease();
  ClusterWaitAcquire();
  ClusterArriveRelaxed();
  ClusterWaitAcquire();
  DecreaseRegisters<40>();
  IncreaseRegisters<232>();
}

MOK_DEVICE void UseWarp(const InstructionParams& p) {
  const float value = p.floats[0];
  p.floats[1] =
      Shuffle(value, 3) + ShuffleXor(value, 1) + ShuffleUp(value, 2) + ShuffleDown(value, 4);
  p.words[3] = Ballot(value > 0) + Uniform(p.words[5]);
  if (ElectOne()) p.words[4] = 1;
}

MOK_DEVICE void UseBarriersAndFences(InstructionStorage& s) {
  MbarrierInit(&s.barrier, 1);
  FenceMbarrierInit();
  MbarrierArrive(&s.barrier);
  MbarrierArriveRemote(MapToClusterRank(SharedAddress(&s.barrier), 1));
  MbarrierArriveReleaseCluster(MapToClusterRank(SharedAddress(&s.barrier), 1));
  MbarrierExpectTransaction(&s.barrier, 16);
  MbarrierArriveExpectTransaction(&s.barrier, 16);
  if (!MbarrierTryWait(&s.barrier, 0) && !MbarrierTryWaitCluster(&s.barrier, 0) &&
      !MbarrierTestWait(&s.barrier, 0)) {
    MbarrierInvalidate(&s.barrier);
  }
  FenceProxyAsync();
  FenceProxyAsyncGlobal();
  FenceProxyAsyncShared();
  FenceAcquireReleaseGpu();
  FenceAcquireReleaseSys();
}

MOK_DEVICE void UseCopies(const InstructionParams& p, InstructionStorage& s) {
  PrefetchTensorMap(&p.map);
  TensorPrefetch2d(&p.map, 0, 0);
  BulkLoad(s.tile, p.words, 1024, &s.barrier);
  BulkLoadHinted(s.tile, p.words, 1024, &s.barrier, CreatePolicyEvictFirst());
  BulkLoadHinted(s.tile, p.words, 1024, &s.barrier, CreatePolicyEvictLast());
  BulkPrefetch(p.words, 1024);
  BulkStore(p.words, s.tile, 1024);
  BulkCommitGroup();
  BulkWaitGroupRead<1>();
  BulkWaitGroup<0>();
  TensorLoad2d(s.tile, &p.map, &s.barrier, 0, 0);
  TensorLoad3d(s.tile, &p.map, &s.barrier, 0, 0, 0);
  TensorLoad4d(s.tile, &p.map, &s.barrier, 0, 0, 0, 0);
  TensorLoad5d(s.tile, &p.map, &s.barrier, 0, 0, 0, 0, 0);
  TensorLoad2dMulticast(s.tile, &p.map, &s.barrier, 3, 0, 0);
  TensorLoad3dMulticast(s.tile, &p.map, &s.barrier, 3, 0, 0, 0);
  TensorLoad4dMulticast(s.tile, &p.map, &s.barrier, 3, 0, 0, 0, 0);
  TensorLoad5dMulticast(s.tile, &p.map, &s.barrier, 3, 0, 0, 0, 0, 0);
  TensorStore2d(&p.map, s.tile, 0, 0);
  TensorStore3d(&p.map, s.tile, 0, 0, 0);
}

template <class T>
MOK_DEVICE T UseAtomics(T* global) {
  StoreReleaseGpu(global, T{1});
  StoreReleaseSys(global, T{1});
  StoreRelaxedGpu(global, T{1});
  StoreRelaxedSys(global, T{1});
  ReduceAddReleaseGpu(global, T{1});
  ReduceAddReleaseSys(global, T{1});
  ReduceAddRelaxedGpu(global, T{1});
  ReduceAddRelaxedSys(global, T{1});
  return LoadAcquireGpu(global) + LoadAcquireSys(global) + LoadRelaxedGpu(global) +
         LoadRelaxedSys(global) + AtomicAddRelaxedGpu(global, T{1}) +
         AtomicAddAcquireReleaseGpu(global, T{1}) + AtomicAddAcquireReleaseSys(global, T{1});
}

MOK_DEVICE void UseMemory(const InstructionParams& p) {
  p.words[5] = UseAtomics(p.words) + AtomicCompareSwapAcquireReleaseGpu(p.words, 0, 1) +
               AtomicCompareSwapAcquireReleaseSys(p.words, 0, 1);
  p.doubles[1] = UseAtomics(p.doubles);
  p.words[6] = LoadNonCoherent(p.words);
  p.words[7] = LoadNonCoherent(reinterpret_cast<const int32_t*>(p.words));
  p.floats[2] = LoadNonCoherent(p.floats);
  StoreVector(p.vectors_out, LoadNonCoherent(p.vectors));
  StoreVectorStreaming(p.vectors_out + 1, LoadVector(p.vectors));
  StoreVector(p.vectors_out + 2, LoadVectorStreaming(p.vectors));
  float values[4] = {};
  LoadVectorIf(p.floats[0] > 0, p.vectors, values);
  p.floats[1] = values[3];
  StoreVectorStreaming(reinterpret_cast<Word2*>(p.vectors_out + 3),
                       LoadVector(reinterpret_cast<const Word2*>(p.vectors)));
}

MOK_DEVICE void UseMathAndTime(const InstructionParams& p) {
  const float x = p.floats[0], y = p.floats[1];
  p.floats[6] = MinimumOrNan(x, y) + MaximumOrNan(y, x);
  p.floats[3] = ExponentialBase2(x) + Reciprocal(y) + MultiplyAdd(x, y, x) + Multiply(x, y);
  p.floats[4] = BitsToFloat(PackBFloat16(x, y) + FloatToBits(x) + PopulationCount(p.words[0]));
  const uint64_t begin = GlobalTimer();
  NanoSleep(64);
  p.doubles[2] = GlobalTimer() - begin + CycleCounter();
  if (begin == 0) Trap();
}

MOK_DEVICE void UseCommonInstructions(const InstructionParams& p, InstructionStorage& s) {
  UseIdsAndSync(p, s);
  UseWarp(p);
  UseBarriersAndFences(s);
  UseCopies(p, s);
  UseMemory(p);
  UseMathAndTime(p);
}

}  // namespace mok
