#include "mok_core/trace.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

namespace mok {
namespace {

// A JSON string, quoted and escaped.
std::string JsonString(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (byte < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", byte);
      json += escaped;
    } else {
      json += c;
    }
  }
  return json + "\"";
}

// Nanoseconds as microseconds with all digits; a double would lose them.
std::string Microseconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%lld.%03d", static_cast<long long>(nanoseconds / 1000),
                static_cast<int>(nanoseconds % 1000));
  return text;
}

std::string EventJson(const TraceEvent& event, const std::string& name, int64_t origin_ns,
                      int process_id) {
  const int64_t duration_ns = std::max<int64_t>(event.end_ns - event.begin_ns, 0);
  return StrCat("{\"ph\":\"X\",\"name\":", JsonString(name), ",\"pid\":", process_id,
                ",\"tid\":", event.worker, ",\"ts\":", Microseconds(event.begin_ns - origin_ns),
                ",\"dur\":", Microseconds(duration_ns), ",\"args\":{\"task\":", event.task_index,
                "}}");
}

}  // namespace

int64_t TraceClockNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Aligned, so that recording workers do not share a line.
struct alignas(kCacheLineBytes) TraceRecorder::Worker {
  std::unique_ptr<TraceEvent[]> events;
  std::atomic<int64_t> num_events{0};  // release: the events below it are complete
  std::atomic<int64_t> num_dropped{0};
};

TraceRecorder::TraceRecorder(int num_workers, int64_t capacity_per_worker)
    : num_workers_(num_workers),
      capacity_per_worker_(capacity_per_worker),
      workers_(std::make_unique<Worker[]>(static_cast<size_t>(num_workers))) {
  for (int worker = 0; worker < num_workers; ++worker) {
    workers_[static_cast<size_t>(worker)].events =
        std::make_unique<TraceEvent[]>(static_cast<size_t>(capacity_per_worker));
  }
}

TraceRecorder::~TraceRecorder() = default;

void TraceRecorder::Record(int worker, int32_t kind, int64_t task_index, int64_t begin_ns,
                           int64_t end_ns) {
  Worker& own = workers_[static_cast<size_t>(worker)];
  const int64_t index = own.num_events.load(std::memory_order_relaxed);
  if (index >= capacity_per_worker_) {
    own.num_dropped.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  own.events[static_cast<size_t>(index)] = {kind, worker, task_index, begin_ns, end_ns};
  own.num_events.store(index + 1, std::memory_order_release);
}

std::span<const TraceEvent> TraceRecorder::Events(int worker) const {
  const Worker& own = workers_[static_cast<size_t>(worker)];
  const int64_t num_events = own.num_events.load(std::memory_order_acquire);
  return {own.events.get(), static_cast<size_t>(num_events)};
}

int64_t TraceRecorder::DroppedEvents(int worker) const {
  return workers_[static_cast<size_t>(worker)].num_dropped.load(std::memory_order_relaxed);
}

void TraceRecorder::Clear() {
  for (int worker = 0; worker < num_workers_; ++worker) {
    workers_[static_cast<size_t>(worker)].num_events.store(0, std::memory_order_relaxed);
    workers_[static_cast<size_t>(worker)].num_dropped.store(0, std::memory_order_relaxed);
  }
}

Status TraceRecorder::WriteChromeTrace(const std::string& path,
                                       const std::function<std::string(int32_t kind)>& kind_name,
                                       int process_id) const {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "w"), std::fclose);
  if (file == nullptr) {
    return UnavailableError("cannot open trace file ", path, ": ", std::strerror(errno));
  }
  // Looked at once: workers may record meanwhile, and times count from the earliest event.
  std::vector<std::span<const TraceEvent>> events;
  int64_t origin_ns = std::numeric_limits<int64_t>::max();
  for (int worker = 0; worker < num_workers_; ++worker) {
    events.push_back(Events(worker));
    for (const TraceEvent& event : events.back()) origin_ns = std::min(origin_ns, event.begin_ns);
  }
  int64_t num_dropped = 0;
  const char* separator = "\n";
  std::fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", file.get());
  for (int worker = 0; worker < num_workers_; ++worker) {
    num_dropped += DroppedEvents(worker);
    for (const TraceEvent& event : events[static_cast<size_t>(worker)]) {
      std::fputs(separator, file.get());
      std::fputs(EventJson(event, kind_name(event.kind), origin_ns, process_id).c_str(),
                 file.get());
      separator = ",\n";
    }
  }
  std::fprintf(file.get(), "\n],\"otherData\":{\"dropped_events\":%lld}}\n",
               static_cast<long long>(num_dropped));
  const bool failed = std::ferror(file.get()) != 0;
  if (std::fclose(file.release()) != 0 || failed) {
    return UnavailableError("cannot write trace file ", path, ": ", std::strerror(errno));
  }
  return OkStatus();
}

}  // namespace mok
