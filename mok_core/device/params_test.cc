// The host side of device waits and tensor maps.
#include <gtest/gtest.h>

#include "mok_core/device/runtime.h"
#include "mok_core/device/wait_record.h"

namespace mok {
namespace {

TEST(WaitRecordTest, EmptyIsOk) { EXPECT_EQ(CheckDeviceWaitRecord({}), OkStatus()); }

TEST(WaitRecordTest, NamesEveryField) {
  const DeviceWaitRecord record{2, 3, 17, 64, 1, 5, 1234, 8, 6, 2'500'000'000};
  const Status status = CheckDeviceWaitRecord(record);
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(),
            "rank 3, block 17, thread 64, role 1: task 1234 of kind 5 expected 8, observed 6 after "
            "2500 ms");
}

TEST(WaitRecordTest, HalfWrittenRecordIsAnError) {
  DeviceWaitRecord record{};
  record.state = 1;
  EXPECT_EQ(CheckDeviceWaitRecord(record).code(), StatusCode::kDeadlineExceeded);
}

runtime::TensorMapSpec ValidSpec() {
  static uint16_t data[64 * 64] __attribute__((aligned(16)));
  runtime::TensorMapSpec spec{};
  spec.base = data;
  spec.element_bytes = 2;
  spec.rank = 2;
  spec.dimensions[0] = spec.dimensions[1] = 64;
  spec.strides[0] = 128;
  spec.box[0] = 64;
  spec.box[1] = 32;
  spec.swizzle = Swizzle::k128;
  return spec;
}

TEST(TensorMapSpecTest, AcceptsAValidSpec) {
  EXPECT_EQ(runtime::ValidateTensorMapSpec(ValidSpec()), OkStatus());
}

TEST(TensorMapSpecTest, NamesWhatIsWrong) {
  const struct {
    void (*breaks)(runtime::TensorMapSpec&);
    const char* text;
  } kCases[] = {
      {[](auto& s) { s.rank = 6; }, "rank 6"},
      {[](auto& s) { s.element_bytes = 3; }, "element_bytes 3"},
      {[](auto& s) { s.base = nullptr; }, "base is null"},
      {[](auto& s) { s.base = static_cast<char*>(s.base) + 8; }, "16-byte aligned"},
      {[](auto& s) { s.dimensions[1] = 0; }, "dimension 1 is 0"},
      {[](auto& s) { s.box[1] = 257; }, "box[1] = 257"},
      {[](auto& s) { s.strides[0] = 130; }, "130 bytes"},
      {[](auto& s) { s.box[0] = 4; }, "row of 8 bytes"},
      {[](auto& s) { s.swizzle = Swizzle::k64; }, "swizzle span of 64"},
  };
  for (const auto& test : kCases) {
    runtime::TensorMapSpec spec = ValidSpec();
    test.breaks(spec);
    const Status status = runtime::ValidateTensorMapSpec(spec);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(test.text), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace mok
