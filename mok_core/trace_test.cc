#include "mok_core/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace mok {
namespace {

using ::testing::HasSubstr;

// Just enough of RFC 8259 to tell a valid document from an invalid one.
class JsonChecker {
 public:
  explicit JsonChecker(const std::string& text) : text_(text) {}
  bool Valid() { return Value() && (Space(), at_ == text_.size()); }

 private:
  void Space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool Take(char c) {
    Space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool String() {
    if (!Take('"')) return false;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) return false;
      if (text_[at_] == '\\') ++at_;
    }
    return Take('"');
  }
  bool Number() {
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isdigit(text_[at_]) || text_[at_] == '.')) ++at_;
    return at_ > begin && text_[at_ - 1] != '.';
  }
  template <class Element>
  bool Sequence(char end, Element element) {
    if (Take(end)) return true;
    do {
      if (!element()) return false;
    } while (Take(','));
    return Take(end);
  }
  bool Value() {
    if (Take('{')) return Sequence('}', [&] { return String() && Take(':') && Value(); });
    if (Take('[')) return Sequence(']', [&] { return Value(); });
    Space();
    return at_ < text_.size() && text_[at_] == '"' ? String() : Number();
  }

  const std::string& text_;
  size_t at_ = 0;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string TemporaryPath(const std::string& name) { return ::testing::TempDir() + "/" + name; }

std::string KindName(int32_t kind) { return kind == 0 ? "Gate\"Up\\\n" : StrCat("Kind", kind); }

TEST(TraceRecorderTest, KeepsEventsInOrderPerWorker) {
  TraceRecorder recorder(2, 10);
  EXPECT_EQ(recorder.num_workers(), 2);
  recorder.Record(1, 7, 100, 1000, 2500);
  recorder.Record(1, 8, 101, 2500, 2600);
  EXPECT_TRUE(recorder.Events(0).empty());
  const auto events = recorder.Events(1);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind, 7);
  EXPECT_EQ(events[0].worker, 1);
  EXPECT_EQ(events[0].task_index, 100);
  EXPECT_EQ(events[0].begin_ns, 1000);
  EXPECT_EQ(events[0].end_ns, 2500);
  EXPECT_EQ(events[1].task_index, 101);
  recorder.Clear();
  EXPECT_TRUE(recorder.Events(1).empty());
}

TEST(TraceRecorderTest, OverflowIsCounted) {
  TraceRecorder recorder(2, 3);
  for (int64_t i = 0; i < 10; ++i) recorder.Record(0, 1, i, i, i + 1);
  EXPECT_EQ(recorder.Events(0).size(), 3u);
  EXPECT_EQ(recorder.DroppedEvents(0), 7);
  EXPECT_EQ(recorder.DroppedEvents(1), 0);
  TraceRecorder none(1, 0);
  none.Record(0, 1, 0, 0, 0);
  EXPECT_TRUE(none.Events(0).empty());
  EXPECT_EQ(none.DroppedEvents(0), 1);
}

TEST(TraceRecorderTest, WorkersRecordAtOnceWhileSomeoneReads) {
  constexpr int kWorkers = 8;
  constexpr int64_t kEvents = 5000;
  constexpr int64_t kCapacity = 4000;
  TraceRecorder recorder(kWorkers, kCapacity);
  std::vector<std::thread> threads;
  for (int worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&, worker] {
      for (int64_t i = 0; i < kEvents; ++i) recorder.Record(worker, worker, i, 2 * i, 2 * i + 1);
    });
  }
  // Whatever a reader sees is complete.
  for (int look = 0; look < 100; ++look) {
    for (int worker = 0; worker < kWorkers; ++worker) {
      int64_t index = 0;
      for (const TraceEvent& event : recorder.Events(worker)) {
        ASSERT_EQ(event.task_index, index++);
        ASSERT_EQ(event.end_ns, 2 * event.task_index + 1);
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int worker = 0; worker < kWorkers; ++worker) {
    EXPECT_EQ(static_cast<int64_t>(recorder.Events(worker).size()), kCapacity);
    EXPECT_EQ(recorder.DroppedEvents(worker), kEvents - kCapacity);
  }
}

TEST(TraceRecorderTest, ScopedTraceRecordsItsLifetime) {
  TraceRecorder recorder(1, 4);
  const int64_t before = TraceClockNs();
  {
    const ScopedTrace trace(&recorder, 0, 5, 17);
  }
  const int64_t after = TraceClockNs();
  ASSERT_EQ(recorder.Events(0).size(), 1u);
  const TraceEvent event = recorder.Events(0)[0];
  EXPECT_EQ(event.kind, 5);
  EXPECT_EQ(event.task_index, 17);
  EXPECT_LE(before, event.begin_ns);
  EXPECT_LE(event.begin_ns, event.end_ns);
  EXPECT_LE(event.end_ns, after);
  const ScopedTrace nothing(nullptr, 99, 0, 0);
}

TEST(ChromeTraceTest, IsValidJsonWithAllEvents) {
  TraceRecorder recorder(2, 2);
  recorder.Record(0, 0, 3, 1'000'000'123, 1'000'001'623);
  recorder.Record(1, 2, 4, 1'000'002'123, 1'000'002'124);
  recorder.Record(1, 2, 5, 1'000'002'200, 1'000'002'201);
  recorder.Record(1, 2, 6, 0, 0);
  const std::string path = TemporaryPath("trace.json");
  ASSERT_TRUE(recorder.WriteChromeTrace(path, KindName, /*process_id=*/6).ok());
  const std::string json = ReadFile(path);
  EXPECT_TRUE(JsonChecker(json).Valid()) << json;
  EXPECT_THAT(json,
              HasSubstr("{\"ph\":\"X\",\"name\":\"Gate\\\"Up\\\\\\u000a\",\"pid\":6,\"tid\":0,"
                        "\"ts\":0.000,\"dur\":1.500,\"args\":{\"task\":3}}"));
  EXPECT_THAT(json, HasSubstr("\"name\":\"Kind2\",\"pid\":6,\"tid\":1,\"ts\":2.000,\"dur\":0.001"));
  EXPECT_THAT(json, HasSubstr("\"dropped_events\":1"));
}

TEST(ChromeTraceTest, EmptyTraceIsValidJson) {
  const std::string path = TemporaryPath("empty.json");
  ASSERT_TRUE(TraceRecorder(3, 5).WriteChromeTrace(path, KindName).ok());
  EXPECT_TRUE(JsonChecker(ReadFile(path)).Valid());
}

TEST(ChromeTraceTest, NamesThePathItCannotWrite) {
  TraceRecorder recorder(1, 1);
  const Status closed = recorder.WriteChromeTrace("/no/such/directory/trace.json", KindName);
  EXPECT_EQ(closed.code(), StatusCode::kUnavailable);
  EXPECT_THAT(closed.message(), HasSubstr("/no/such/directory/trace.json: No such file"));
  EXPECT_EQ(recorder.WriteChromeTrace("/dev/full", KindName).code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace mok
