// Symmetric heap: an allocation of one size on every rank, and the table of everybody's base
// address, so that any rank reads and writes any rank's memory with plain loads and stores.
//
// Providers here: in-process (virtual ranks of one process) and POSIX shared memory (one process
// per rank on one machine). All memory starts zeroed.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "mok_core/bits.h"
#include "mok_core/status.h"

namespace mok {

class SymmetricHeap {
 public:
  virtual ~SymmetricHeap() = default;
  SymmetricHeap(const SymmetricHeap&) = delete;
  SymmetricHeap& operator=(const SymmetricHeap&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(bases_.size()); }
  // Bytes of each rank's allocation, as asked for.
  size_t bytes() const { return bytes_; }
  // Where rank `peer`'s allocation is mapped in this process; page aligned.
  std::byte* base(int peer) const { return bases_[static_cast<size_t>(peer)]; }
  std::byte* local() const { return base(rank_); }
  // [size] base addresses, valid as long as the heap: the table transfers index by rank.
  std::byte* const* bases() const { return bases_.data(); }

 protected:
  SymmetricHeap(int rank, size_t bytes, std::vector<std::byte*> bases)
      : rank_(rank), bytes_(bytes), bases_(std::move(bases)) {}

 private:
  const int rank_;
  const size_t bytes_;
  const std::vector<std::byte*> bases_;
};

// Places regions one behind the other. Every rank runs the same reservations, so an offset means
// the same on all of them; the layout of a heap is declared in one function.
class HeapLayout {
 public:
  // Reserves `bytes` and returns the offset, a multiple of `alignment` (a power of two, at most a
  // page).
  size_t Reserve(size_t bytes, size_t alignment = 128) {
    const size_t offset = RoundUp(bytes_, alignment);
    bytes_ = offset + bytes;
    return offset;
  }
  // Bytes used so far: the size to create the heap with.
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// One heap per virtual rank, all in this process; entry r belongs to rank r. The memory lives until
// the last of the heaps is destroyed.
// Errors: kInvalidArgument for size < 1 or bytes == 0; kResourceExhausted naming the bytes.
StatusOr<std::vector<std::unique_ptr<SymmetricHeap>>> CreateInProcessHeaps(int size, size_t bytes);

// kInvalidArgument, with the name of the argument, unless `name` has 1 to 64 characters, none of
// them '/'.
Status CheckSharedMemoryName(const char* argument, const std::string& name);

struct PosixSharedMemoryOptions {
  std::string name;  // identifies the group on this machine: same on its ranks; checked as above
  int rank = 0;
  int size = 1;
  size_t bytes = 0;                           // per rank; must agree
  std::chrono::milliseconds timeout{60'000};  // for all ranks to appear and agree
};

// Collective over `size` processes of one user on one machine (one network namespace). Succeeds on
// every rank, or fails on every rank that is alive, for one stated cause.
//
// Nothing is ever left behind: a rank's memory is an unnamed file on /dev/shm, complete before
// anyone maps it (so running out is an error here, never a SIGBUS later), and its descriptor
// travels to the peers through an abstract Unix socket. The kernel frees both with the last
// process, however it dies and at whatever moment.
//
// Errors, each naming the rank at fault:
//   kInvalidArgument    bad option; ranks that disagree on size or bytes (both values, both ranks)
//   kFailedPrecondition another live process holds this name and rank
//   kResourceExhausted  /dev/shm too small, or the machine's free memory for one rank's part: bytes
//                       wanted and available
//   kUnavailable        a peer died while the heap was being set up; a system call failed
//   kDeadlineExceeded   peers that did not come within the timeout
StatusOr<std::unique_ptr<SymmetricHeap>> CreatePosixSharedMemoryHeap(
    const PosixSharedMemoryOptions& options);

}  // namespace mok
