#include "mok_core/emulator/tests/validation_cases.h"

#include <cstring>

#include "mok_core/device/wait_record.h"
#include "mok_core/emulator/tests/cluster_sm90.h"
#include "mok_core/emulator/tests/exchange_sm90.h"
#include "mok_core/emulator/tests/grouped_gemm_sm90.h"
#include "mok_core/emulator/tests/mn_major_inputs.h"
#include "mok_core/emulator/tests/persistent_sm90.h"
#include "mok_core/emulator/tests/primitive_inputs.h"
#include "mok_core/emulator/tests/primitives_sm90.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

using Results = std::vector<ValidationResult>;

constexpr uint64_t kTimeoutNs = 5'000'000'000;

template <class T>
void Append(Results& results, const std::string& name, Agreement agreement, const T* device,
            size_t count) {
  ValidationResult result{name, agreement, std::vector<unsigned char>(count * sizeof(T))};
  MOK_CHECK(runtime::CopyToHost(result.bytes.data(), device, result.bytes.size()).ok());
  results.push_back(std::move(result));
}

// Values in [0.5, 1.5): sums do not cancel, so that one bf16 ulp bounds the rounding of any order.
std::vector<uint16_t> PositiveBFloat16(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    value = RoundToBFloat16(0.5f + static_cast<float>(random() % 4096) / 4096).bits;
  }
  return values;
}

Status RunGroupedGemm(const char* name, bool exact, Results& results) {
  namespace gg = grouped_gemm;
  constexpr int kRows = 400, kColumns = 512, kDepth = 448;
  const std::vector<int32_t> offsets{0, 100, 100, 357, kRows};
  const int groups = static_cast<int>(offsets.size()) - 1;
  auto values = [&](size_t count, uint32_t seed) {
    return exact ? ExactBFloat16(count, seed) : PositiveBFloat16(count, seed);
  };
  const uint16_t* a = DeviceArray(values(kRows * kDepth, 1), "A");
  const uint16_t* b = DeviceArray(values(groups * kColumns * kDepth, 2), "B");
  gg::Params p{};
  p.a = MatrixMap(a, kRows, kDepth, 2, gg::kTileM, gg::kTileK);
  p.b = MatrixMap(b, groups * kColumns, kDepth, 2, gg::kTileN, gg::kTileK);
  p.offsets = DeviceArray(offsets, "offsets");
  p.groups = groups;
  p.n = kColumns;
  p.k = kDepth;
  p.c = UninitializedArray<uint16_t>(kRows * kColumns, "C");
  p.done = DeviceArray(std::vector<uint32_t>(groups, 0), "done");
  p.sums = UninitializedArray<float>(groups, "sums");
  MOK_RETURN_IF_ERROR(Launch(gg::GroupedGemmKernel(0), p, {.blocks = 3, .name = name}));
  MOK_ASSIGN_OR_RETURN(void* stream, runtime::CreateStream(0));
  MOK_RETURN_IF_ERROR(
      Launch(gg::SumGroupsKernel(0), p,
             {.blocks = static_cast<unsigned>(groups), .registers = 64, .stream = stream}));
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  Append(results, StrCat(name, ".c"), exact ? Agreement::kBits : Agreement::kOneBFloat16Ulp, p.c,
         kRows * kColumns);
  if (exact) Append(results, StrCat(name, ".sums"), Agreement::kBits, p.sums, groups);
  return OkStatus();
}

Status RunMnMajor(Results& results) {
  namespace mn = mn_major;
  for (int form = 0; form < mn::kNumForms; ++form) {
    const MnMajorCase test = MakeMnMajorCase(mn::kForms[form]);
    MOK_RETURN_IF_ERROR(Launch(mn::FormKernel(form), test.params, {.name = "mn_major"}));
    MOK_RETURN_IF_ERROR(runtime::Synchronize());
    Append(results, StrCat("mn_major.form", form), Agreement::kBits, test.params.c,
           mn::kRows * mn::kColumns);
  }
  return OkStatus();
}

Status RunCluster(Results& results) {
  namespace cp = cluster_pair;
  constexpr int kBlocks = 6;
  const uint16_t* tiles =
      DeviceArray(ExactBFloat16(kBlocks * cp::kRows * cp::kColumns, 3), "tiles");
  cp::Params p{};
  p.tiles = MatrixMap(tiles, kBlocks * cp::kRows, cp::kColumns, 2, cp::kRows, cp::kColumns);
  p.sums = UninitializedArray<float>(kBlocks * cp::kRows, "sums");
  MOK_RETURN_IF_ERROR(Launch(cp::ClusterPairKernel(0), p, {.blocks = kBlocks, .cluster = 2}));
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  Append(results, "cluster.sums", Agreement::kBits, p.sums, kBlocks * cp::kRows);
  return OkStatus();
}

StatusOr<DeviceWaitParams> MakeWait(int device, int rank) {
  MOK_ASSIGN_OR_RETURN(void* record,
                       runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record"));
  uint32_t* abort_flag = DeviceArray(std::vector<uint32_t>{0}, "abort", device);
  return DeviceWaitParams{static_cast<DeviceWaitRecord*>(record), abort_flag, kTimeoutNs, rank};
}

// On two devices where there are two; else both ranks share device 0.
Status RunExchange(Results& results) {
  namespace ex = exchange;
  constexpr int kWords = ex::kRows * ex::kRowWords;
  MOK_ASSIGN_OR_RETURN(const int devices, runtime::DeviceCount());
  const int device_of_rank[2] = {0, devices > 1 ? 1 : 0};
  ex::RankMemory memory[2];
  for (int r = 0; r < 2; ++r) {
    const int device = device_of_rank[r];
    memory[r].x = UninitializedArray<float>(kWords, "x", device);
    memory[r].returned = UninitializedArray<float>(kWords, "returned", device);
    memory[r].entry = DeviceArray(std::vector<uint64_t>{0}, "entry", device);
    memory[r].exit = DeviceArray(std::vector<uint64_t>{0}, "exit", device);
    MOK_RETURN_IF_ERROR(runtime::EnablePeerAccess(device, device_of_rank[1 - r]));
  }
  ex::Params params[2];
  for (int r = 0; r < 2; ++r) {
    const int device = device_of_rank[r];
    MOK_ASSIGN_OR_RETURN(const DeviceWaitParams wait, MakeWait(device, r));
    params[r] = {memory[r],
                 memory[1 - r],
                 UninitializedArray<float>(kWords, "ring", device),
                 DeviceArray(std::vector<uint64_t>{0}, "ring_filled", device),
                 UninitializedArray<float>(ex::kRowWords, "sums", device),
                 wait};
  }
  for (int r = 0; r < 2; ++r) {
    MOK_ASSIGN_OR_RETURN(void* stream, runtime::CreateStream(device_of_rank[r]));
    MOK_RETURN_IF_ERROR(
        Launch(ex::ExchangeKernel(0), params[r],
               {.blocks = ex::kBlocks, .device = device_of_rank[r], .stream = stream}));
  }
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  for (int r = 0; r < 2; ++r) {
    MOK_RETURN_IF_ERROR(CheckDeviceWaitRecord(*params[r].wait.record));
    Append(results, StrCat("exchange.rank", r), Agreement::kBits, params[r].sums, ex::kRowWords);
  }
  return OkStatus();
}

// `blocked`: a task whose counter never arrives; its wait must expire and the grid must drain.
Status RunPersistent(const char* name, int blocked, Results& results) {
  namespace ps = persistent;
  constexpr int kBlocks = 8, kTasks = 200, kWords = kTasks * ps::kRowWords;
  std::vector<float> rows(kWords);
  for (int i = 0; i < kWords; ++i) rows[i] = static_cast<float>(i);
  std::vector<uint64_t> ready(kTasks, 1);
  if (blocked >= 0) ready[blocked] = 0;
  ps::Params p{};
  p.rows = DeviceArray(rows, "rows");
  p.doubled = UninitializedArray<float>(kWords, "doubled");
  p.ready = DeviceArray(ready, "ready");
  p.executions = DeviceArray(std::vector<int32_t>(kTasks, 0), "executions");
  p.ticket = DeviceArray(std::vector<TicketCounter>{{0, 0}}, "ticket");
  p.num_tasks = kTasks;
  MOK_ASSIGN_OR_RETURN(p.wait, MakeWait(0, 3));
  p.wait.timeout_ns = 200'000'000;
  MOK_RETURN_IF_ERROR(Launch(ps::PersistentKernel(0), p, {.blocks = kBlocks, .name = name}));
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  Append(results, StrCat(name, ".ticket"), Agreement::kBits, p.ticket, 1);
  const DeviceWaitRecord& record = *p.wait.record;
  if (blocked < 0) {
    MOK_RETURN_IF_ERROR(CheckDeviceWaitRecord(record));
    Append(results, StrCat(name, ".doubled"), Agreement::kBits, p.doubled, kWords);
    Append(results, StrCat(name, ".executions"), Agreement::kBits, p.executions, kTasks);
    return OkStatus();
  }
  const int64_t observed[] = {record.state,
                              record.rank,
                              record.role,
                              record.task,
                              static_cast<int64_t>(record.expected),
                              static_cast<int64_t>(record.observed)};
  ValidationResult result{StrCat(name, ".record"), Agreement::kBits, {}};
  const auto* bytes = reinterpret_cast<const unsigned char*>(observed);
  result.bytes.assign(bytes, bytes + sizeof observed);
  results.push_back(std::move(result));
  return OkStatus();
}

Status RunCopies(Results& results) {
  const CopyCase test = MakeCopyCase();
  MOK_RETURN_IF_ERROR(Launch(primitives::CopyKernel(), test.params, {}));
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  Append(results, "copies.images", Agreement::kBits, test.params.images,
         primitives::kLoads * primitives::kBoxBytes);
  Append(results, "copies.stored_2d", Agreement::kBits, test.stored_2d, kStoredElements);
  Append(results, "copies.stored_3d", Agreement::kBits, test.stored_3d, kStoredElements);
  return OkStatus();
}

// The host seam's fills and copies of memory of a device that is not the current one, if there is
// one.
Status RunMemory(Results& results) {
  constexpr size_t kBytes = 4096, kHalf = kBytes / 2;
  MOK_ASSIGN_OR_RETURN(const int devices, runtime::DeviceCount());
  MOK_ASSIGN_OR_RETURN(void* memory,
                       runtime::AllocateDevice(devices > 1 ? 1 : 0, kBytes, "memory"));
  auto* const bytes = static_cast<unsigned char*>(memory);
  MOK_RETURN_IF_ERROR(runtime::Fill(bytes, 0x5A, kBytes));
  const std::vector<unsigned char> upper(kHalf, 0xC3);
  MOK_RETURN_IF_ERROR(runtime::CopyToDevice(bytes + kHalf, upper.data(), kHalf));
  Append(results, "memory.bytes", Agreement::kBits, bytes, kBytes);
  return runtime::Free(memory);
}

Status RunMath(Results& results) {
  const primitives::MathParams p = MakeMathCase();
  MOK_RETURN_IF_ERROR(Launch(primitives::MathKernel(), p, {}));
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  const size_t count = p.count;
  Append(results, "math.exponential", Agreement::kTwoFloatUlps, p.exponential, count);
  Append(results, "math.reciprocal", Agreement::kTwoFloatUlps, p.reciprocal, count);
  Append(results, "math.multiply_add", Agreement::kBits, p.multiply_add, count);
  Append(results, "math.product", Agreement::kBits, p.product, count);
  Append(results, "math.packed", Agreement::kBits, p.packed, count);
  Append(results, "math.warp", Agreement::kBits, p.warp, primitives::kThreads * 6);
  return OkStatus();
}

}  // namespace

std::vector<ValidationCase> ValidationCases() {
  return {
      {"memory", RunMemory},
      {"copies", RunCopies},
      {"math", RunMath},
      {"gemm_exact", [](Results& r) { return RunGroupedGemm("gemm_exact", true, r); }},
      {"gemm_inexact", [](Results& r) { return RunGroupedGemm("gemm_inexact", false, r); }},
      {"mn_major", RunMnMajor},
      {"cluster", RunCluster},
      {"exchange", RunExchange},
      {"persistent", [](Results& r) { return RunPersistent("persistent", -1, r); }},
      {"timeout", [](Results& r) { return RunPersistent("timeout", 77, r); }},
  };
}

}  // namespace mok::testing
