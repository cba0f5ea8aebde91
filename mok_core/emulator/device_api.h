// What the twins call: one external function per emulated instruction, so that nothing of the
// emulator itself is compiled with the instrumentation of kernel code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/device/types.h"

namespace mok::emulator {

// Coordinates of the running thread; lives on its fiber's stack.
struct ThreadContext {
  Index3 thread, block, block_dimensions, grid_dimensions;
  uint32_t cluster_rank, cluster_size, processor;
};

enum class Order { kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Scope { kGpu, kSystem };
enum class AtomicOperation { kLoad, kStore, kAdd, kCompareSwap };
// What an arrival on another CTA's barrier publishes.
enum class ArriveScope { kBlock, kRemoteRelaxed, kRemoteRelease };
enum class ShuffleKind { kIndex, kXor, kUp, kDown };
enum class ProxyFenceSpace { kAll, kGlobal, kShared };

ThreadContext* CurrentThread();
void* SharedStorage();
void NameSharedMemory(const void* pointer, const char* name, int index);
[[noreturn]] void FailExpectation(const char* condition);

// ids.h
uint32_t SharedAddress(const void* pointer);
uint32_t MapToClusterRank(uint32_t address, uint32_t rank);
void* SharedPointer(uint32_t address);

// sync.h
void NamedBarrier(int id, int threads, bool wait);
void SyncBlock();
void SyncWarp(uint32_t mask);
void ClusterArrive(bool release);
void ClusterWait();
void SetRegisters(int registers, bool increase);

// warp.h
uint64_t Shuffle(uint32_t mask, uint64_t value, ShuffleKind kind, int argument);
uint32_t Ballot(uint32_t mask, bool predicate);
bool ElectOne();

// mbarrier.h
void MbarrierInit(uint32_t address, uint32_t arrivals);
void MbarrierInvalidate(uint32_t address);
void MbarrierArrive(uint32_t address, ArriveScope scope);
void MbarrierExpectTransaction(uint32_t address, uint32_t bytes, bool arrive);
bool MbarrierTryWait(uint32_t address, uint32_t parity, bool cluster_scope);
bool MbarrierTestWait(uint32_t address, uint32_t parity);

// fence.h
void FenceProxyAsync(ProxyFenceSpace space);
void FenceMbarrierInit();
void Fence(Scope scope);

// bulk_copy.h
void BulkLoad(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier);
void BulkStore(void* global, uint32_t shared, uint32_t bytes);
void BulkPrefetch(const void* global, uint32_t bytes);
void BulkCommitGroup();
void BulkWaitGroup(int pending, bool read_only);

// tensor_copy.h; cta_mask 0: no multicast.
void TensorLoad(uint32_t shared, const void* map, uint32_t barrier, const int* coordinates,
                int rank, uint16_t cta_mask);
void TensorStore(const void* map, uint32_t shared, const int* coordinates, int rank);
void PrefetchTensorMap(const void* map);

// wgmma.h
void WgmmaFence();
void WgmmaCommitGroup();
void WgmmaWaitGroup(int pending);
struct WgmmaOperands {
  uint64_t descriptor_a, descriptor_b;
  int columns;
  bool accumulate, transpose_a, transpose_b;
  bool operator==(const WgmmaOperands&) const = default;
};
void WgmmaBf16(float* accumulator, const WgmmaOperands& operands);

// memory.h
uint64_t AtomicAccess(void* global, int bytes, AtomicOperation operation, uint64_t value,
                      uint64_t expected, Order order, Scope scope);
// Plain vector or non-coherent access: checks only, the twin moves the data.
void CheckGlobalAccess(const void* global, size_t bytes, bool write, bool non_coherent);

// time.h
uint64_t GlobalTimer();
uint64_t CycleCounter();
void NanoSleep(uint32_t nanoseconds);
[[noreturn]] void Trap();

// tcgen05.h
void TensorMemoryAllocate(uint32_t shared_result, uint32_t columns);
void TensorMemoryFree(uint32_t address, uint32_t columns);
void TensorMemoryRelinquish();
struct Tcgen05Operands {
  uint32_t d;
  uint64_t descriptor_a, descriptor_b;
  uint32_t instruction;
  bool accumulate;
  uint32_t scales_a, scales_b;
};
void Tcgen05MmaF16(const Tcgen05Operands& operands, bool pair);
void Tcgen05MmaMxf8(const Tcgen05Operands& operands);
void Tcgen05CopyScales(uint32_t destination, uint64_t descriptor);
void Tcgen05Commit(uint32_t barrier);
void Tcgen05CommitPair(uint32_t barrier, uint16_t cta_mask);
void Tcgen05Load(uint32_t address, uint32_t* registers, int columns);
void Tcgen05WaitLoad();
void Tcgen05Fence(bool after);

// cluster_launch_control.h
void ClusterLaunchTryCancel(uint32_t shared_response, uint32_t barrier);
bool ClusterLaunchQuery(const void* shared_response, Index3* block_index);

}  // namespace mok::emulator
