// Workspace: what one rank keeps between calls. Symmetric heap, handshake, scratch memory, worker
// threads with their tile workers, and the error that has made it unusable, if any.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "mok_comm/symmetric_heap.h"
#include "mok_core/status.h"
#include "mok_gemm/host/tile_worker.h"
#include "mok_megakernel/handshake.h"
#include "mok_megakernel/scratch_memory.h"
#include "mok_megakernel/worker_pool.h"
#include "mok_megakernel/workspace_layout.h"

namespace mok {

// Calls that use a workspace hold its lock(); members say where they need it.
class Workspace {
 public:
  // The heap has LayOutHeap(shape).bytes and is zero.
  Workspace(const WorkspaceShape& shape, std::unique_ptr<SymmetricHeap> heap,
            std::chrono::nanoseconds timeout);

  const WorkspaceShape& shape() const { return shape_; }
  const SymmetricHeap& heap() const { return *heap_; }
  const HeapRegions& regions() const { return regions_; }
  std::chrono::nanoseconds timeout() const { return timeout_; }

  std::unique_lock<std::mutex> lock() const { return std::unique_lock<std::mutex>(mutex_); }

  // A record with the fields that every operation of this workspace has in common.
  HandshakeRecord NewRecord(Operation operation) const;

  // The handshake on the calling thread, under lock(): returns the verdict that all ranks reach. A
  // rank that does not come within the timeout breaks the workspace.
  Status Meet(const HandshakeRecord& record, const PublishedRoutes& routes);
  // Meets with an error that this rank has found; returns the verdict, never ok.
  Status MeetWithError(Operation operation, const Status& error);

  // The error that broke the workspace, or ok. Needs no lock().
  Status CheckUsable() const;
  // The first error stays.
  void Break(const Status& error);

  // Under lock().
  Handshake& handshake() { return handshake_; }
  ScratchMemory& scratch() { return scratch_; }
  WorkerPool& pool() { return pool_; }
  // Threads and tile workers for a pass of `num_workers`.
  Status ReserveWorkers(int num_workers, Isa isa);
  TileWorker& tile_worker(int worker) { return tile_workers_[static_cast<size_t>(worker)]; }
  // Fills scratch and the data of this rank's heap with NaN: bytes of 0xFF in either dtype.
  void Poison();

 private:
  const WorkspaceShape shape_;
  const HeapRegions regions_;
  const std::chrono::nanoseconds timeout_;
  const std::unique_ptr<SymmetricHeap> heap_;
  mutable std::mutex mutex_;
  Handshake handshake_;
  ScratchMemory scratch_;
  WorkerPool pool_;
  std::vector<TileWorker> tile_workers_;  // all of one ISA
  mutable std::mutex broken_mutex_;
  Status broken_;
};

}  // namespace mok
