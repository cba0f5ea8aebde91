#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "mok_comm/file_descriptor.h"
#include "mok_comm/rendezvous.h"
#include "mok_comm/symmetric_heap.h"

namespace mok {
namespace {

constexpr const char* kSharedMemoryDirectory = "/dev/shm";
constexpr size_t kMaxNameLength = 64;

Status CheckOptions(const PosixSharedMemoryOptions& options) {
  MOK_RETURN_IF_ERROR(CheckSharedMemoryName("shared memory: name", options.name));
  if (options.size < 1) {
    return InvalidArgumentError("shared memory: size is ", options.size, ", expected >= 1");
  }
  if (options.rank < 0 || options.rank >= options.size) {
    return InvalidArgumentError("shared memory: rank is ", options.rank, ", expected 0 to ",
                                options.size - 1);
  }
  if (options.bytes == 0) {
    return InvalidArgumentError("shared memory: bytes is 0, expected >= 1");
  }
  return OkStatus();
}

// Free bytes of the shared-memory file system; 0 when it cannot be read.
uint64_t AvailableSharedMemory() {
  struct statvfs file_system = {};
  if (statvfs(kSharedMemoryDirectory, &file_system) != 0) return 0;
  return static_cast<uint64_t>(file_system.f_bavail) * file_system.f_frsize;
}

// Bytes the kernel can hand out without killing anyone: available memory and free swap. The largest
// integer when /proc does not tell.
uint64_t AvailableMemory() {
  std::ifstream file("/proc/meminfo");
  uint64_t total_kib = 0;
  bool found = false;
  std::string key;
  uint64_t kib = 0;
  for (std::string unit; file >> key >> kib && std::getline(file, unit);) {
    if (key != "MemAvailable:" && key != "SwapFree:") continue;
    found = found || key == "MemAvailable:";
    total_kib += kib;
  }
  return found ? total_kib * 1024 : ~uint64_t{0};
}

Status Exhausted(int rank, const char* what, size_t wanted, uint64_t available) {
  return ResourceExhaustedError("rank ", rank, ": ", what, " exhausted: wanted ", wanted,
                                " bytes, available ", available, " bytes");
}

// `bytes` of shared memory in a file without a name, all pages allocated: a page that does not fit
// fails here, and not as SIGBUS at the first touch. A tmpfs that is larger than the free memory
// would grant the pages and let the kernel kill a process for them; that is checked first, for this
// rank alone: how much the others have taken already, nobody knows.
StatusOr<FileDescriptor> AllocateSharedMemory(int rank, size_t bytes) {
  const uint64_t available_memory = AvailableMemory();
  if (bytes > available_memory && bytes <= AvailableSharedMemory()) {
    return Exhausted(rank, "memory for shared memory", bytes, available_memory);
  }
  FileDescriptor memory(
      open(kSharedMemoryDirectory, O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!memory.valid()) {
    const int error = errno;
    return UnavailableError("rank ", rank, ": cannot create an unnamed file on ",
                            kSharedMemoryDirectory, ": ", std::strerror(error));
  }
  if (bytes > static_cast<uint64_t>(INT64_MAX)) {
    return Exhausted(rank, "shared memory (/dev/shm)", bytes, AvailableSharedMemory());
  }
  int error;
  do {
    error = posix_fallocate(memory.get(), 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error == ENOSPC || error == ENOMEM || error == EFBIG) {
    return Exhausted(rank, "shared memory (/dev/shm)", bytes, AvailableSharedMemory());
  }
  if (error != 0) {
    return UnavailableError("rank ", rank, ": cannot allocate ", bytes, " bytes on ",
                            kSharedMemoryDirectory, ": ", std::strerror(error));
  }
  return memory;
}

// All ranks' memories in this process.
class Mappings {
 public:
  explicit Mappings(size_t bytes) : bytes_(bytes) {}
  ~Mappings() {
    for (std::byte* base : bases_) munmap(base, bytes_);
  }
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  // Maps the memory of rank bases().size().
  Status Add(int rank, const FileDescriptor& memory) {
    struct stat file = {};
    if (fstat(memory.get(), &file) != 0 || static_cast<uint64_t>(file.st_size) != bytes_) {
      return InternalError("rank ", rank, ": memory of rank ", bases_.size(), " has ", file.st_size,
                           " bytes, expected ", bytes_);
    }
    void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      return ResourceExhaustedError("rank ", rank, ": cannot map ", bytes_, " bytes of rank ",
                                    bases_.size(), ": ", std::strerror(error));
    }
    bases_.push_back(static_cast<std::byte*>(data));
    return OkStatus();
  }
  const std::vector<std::byte*>& bases() const { return bases_; }

 private:
  const size_t bytes_;
  std::vector<std::byte*> bases_;
};

class PosixSharedMemoryHeap : public SymmetricHeap {
 public:
  PosixSharedMemoryHeap(int rank, size_t bytes, std::unique_ptr<Mappings> mappings)
      : SymmetricHeap(rank, bytes, mappings->bases()), mappings_(std::move(mappings)) {}

 private:
  const std::unique_ptr<Mappings> mappings_;
};

// Meets the other ranks and maps their memories; whatever fails here, the peers hear of it when the
// rendezvous is concluded.
Status MeetAndMap(const PosixSharedMemoryOptions& options, Rendezvous::Deadline deadline,
                  Rendezvous& rendezvous, Mappings& mappings) {
  const StatusOr<FileDescriptor> memory = AllocateSharedMemory(options.rank, options.bytes);
  const FileDescriptor none;
  const RendezvousOffer offer{options.rank, options.size, options.bytes, memory.status()};
  const Status met = rendezvous.Meet(offer, memory.ok() ? *memory : none, deadline);
  // What the ranks that came say explains more than that others are missing.
  MOK_RETURN_IF_ERROR(CheckOffers(rendezvous.Offers()));
  MOK_RETURN_IF_ERROR(met);
  for (int peer = 0; peer < options.size; ++peer) {
    MOK_RETURN_IF_ERROR(
        mappings.Add(options.rank, peer == options.rank ? *memory : rendezvous.Memory(peer)));
  }
  return OkStatus();
}

}  // namespace

Status CheckSharedMemoryName(const char* argument, const std::string& name) {
  if (!name.empty() && name.size() <= kMaxNameLength && name.find('/') == std::string::npos) {
    return OkStatus();
  }
  return InvalidArgumentError(argument, ": expected 1 to ", kMaxNameLength,
                              " characters without '/', got ", name.size(), ": \"",
                              name.substr(0, kMaxNameLength), "\"");
}

StatusOr<std::unique_ptr<SymmetricHeap>> CreatePosixSharedMemoryHeap(
    const PosixSharedMemoryOptions& options) {
  MOK_RETURN_IF_ERROR(CheckOptions(options));
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  auto mappings = std::make_unique<Mappings>(options.bytes);
  MOK_ASSIGN_OR_RETURN(Rendezvous rendezvous, Rendezvous::Listen(options.name, options.rank));
  const Status mapped = MeetAndMap(options, deadline, rendezvous, *mappings);
  MOK_RETURN_IF_ERROR(rendezvous.Conclude(mapped, deadline));
  return std::make_unique<PosixSharedMemoryHeap>(options.rank, options.bytes, std::move(mappings));
}

}  // namespace mok
