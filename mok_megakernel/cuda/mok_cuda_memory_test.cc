// Memory that callers hand to the CUDA C API: overlaps, and layers whose sizes overflow. Nothing is
// queued then.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/argument_pointers.h"
#include "mok_megakernel/cuda/cuda_ranks_test_support.h"
#include "mok_megakernel/cuda/cuda_test_cases.h"

namespace mok::testing {
namespace {

CudaRanksOptions XInHeap() {
  CudaRanksOptions options;
  options.x_in_heap = true;
  return options;
}

class MokCudaMemoryTest : public ::testing::Test {
 protected:
  explicit MokCudaMemoryTest(const CudaRanksOptions& options = {})
      : data_(SharedLayer()), ranks_((StartCase({1, 0.1}), data_), options) {}

  CudaRanks::Rank& rank() { return ranks_.rank(0); }
  const Call forward_ = [this] { return ranks_.Forward(0, MOK_CUDA_STAGE); };
  const Call backward_ = [this] { return ranks_.Backward(0, MOK_CUDA_STAGE); };
  const Call schedule_ = [this] { return ranks_.BuildSchedule(0, MOK_CUDA_STAGE); };

  // What both passes only read, the workspace's own memory included.
  template <class Args>
  std::vector<Pointer> ReadBy(Args& args) {
    std::vector<Pointer> read = InputsOf(args);
    read.emplace_back("shared_scale", args.layer.shared_scale);
    read.emplace_back("topk_idx", args.topk_idx);
    read.emplace_back("schedule", args.schedule);
    read.emplace_back("the heap", rank().heap);
    read.emplace_back("the state", rank().state);
    return read;
  }

  std::byte* InHeap(int64_t offset) { return static_cast<std::byte*>(rank().heap) + offset; }

  LayerData data_;
  CudaRanks ranks_;
};

TEST_F(MokCudaMemoryTest, ForwardWritesToMemoryOfItsOwn) {
  MokCudaForwardArgs& args = rank().forward;
  std::vector<Pointer> written = ContextOf(args);
  written.emplace_back("out", args.out);
  written.emplace_back("scratch", args.scratch);
  ExpectApart(forward_, written, ReadBy(args));
  EXPECT_EQ(forward_(), MOK_OK) << mok_last_error();
  RunQueued();
}

TEST_F(MokCudaMemoryTest, BackwardWritesToMemoryOfItsOwn) {
  MokCudaBackwardArgs& args = rank().backward;
  std::vector<Pointer> written = ContextOf(args);
  for (const Pointer& gradient : GradientsOf(args)) written.push_back(gradient);
  written.emplace_back("scratch", args.scratch);
  std::vector<Pointer> read = ReadBy(args);
  read.emplace_back("d_out", args.d_out);
  ExpectApart(backward_, written, read);
}

TEST_F(MokCudaMemoryTest, ScheduleIsWrittenToMemoryOfItsOwn) {
  MokCudaScheduleArgs& args = rank().schedule;
  ExpectApart(
      schedule_, {{"schedule", args.schedule}, {"scratch", args.scratch}},
      {{"topk_idx", args.topk_idx}, {"the heap", rank().heap}, {"the state", rank().state}});
}

TEST_F(MokCudaMemoryTest, InputsMayOverlapEachOther) {
  MokCudaForwardArgs& args = rank().forward;
  args.layer.routed.up = args.layer.routed.gate;
  EXPECT_EQ(forward_(), MOK_OK) << mok_last_error();
  RunQueued();
}

// The heap is written by every call: of the inputs only x may lie in it, where it is staged.
TEST_F(MokCudaMemoryTest, InputsLieOutsideTheHeap) {
  const std::string text = "the workspace's heap: expected memory that does not overlap ";
  const int64_t x = rank().memory.x_offset;
  for (const Pointer& pointer : InputsOf(rank().forward)) {
    ExpectRefused(forward_, pointer, InHeap(x + 256), text + pointer.name);
  }
  ExpectRefused(backward_, {"d_out", rank().backward.d_out}, InHeap(x), text + "d_out");
}

class MokCudaHeapTest : public MokCudaMemoryTest {
 protected:
  MokCudaHeapTest() : MokCudaMemoryTest(XInHeap()) {}
};

TEST_F(MokCudaHeapTest, OutIsNotXInTheHeap) {
  EXPECT_EQ(forward_(), MOK_OK) << mok_last_error();
  ExpectRefused(forward_, {"out", rank().forward.out}, InHeap(rank().memory.x_offset),
                "out: expected memory that does not overlap the workspace's heap");
  RunQueued();
}

TEST_F(MokCudaMemoryTest, HeapsAndStateLieApart) {
  void* heaps[] = {rank().heap, ranks_.rank(1).heap};
  MokCudaAddresses addresses{sizeof(addresses), heaps, rank().state, rank().records};
  MokCudaWorkspace* workspace = nullptr;
  const Call create = [&] {
    return mok_cuda_workspace_create(&rank().options, &addresses, &workspace);
  };
  ExpectRefused(
      create, {"state", addresses.state}, heaps[0],
      "the workspace's state: expected memory that does not overlap the workspace's heap");
  ExpectRefused(create, {"heap_of_rank[1]", heaps[1]}, heaps[0],
                "heap_of_rank[1]: expected memory that does not overlap the workspace's heap");
  ExpectRefused(create, {"heap_of_rank[1]", heaps[1]}, rank().state,
                "heap_of_rank[1]: expected memory that does not overlap the workspace's state");
  EXPECT_EQ(workspace, nullptr);
}

TEST_F(MokCudaMemoryTest, SizesThatOverflowAreNamed) {
  const auto expect = [&](auto spoil, const std::string& text) {
    MokCudaLayer layer = rank().layer;
    spoil(layer);
    MokCudaLayerMemory memory{};
    memory.struct_size = sizeof(memory);
    EXPECT_EQ(mok_cuda_layer_memory(rank().workspace, &layer, &memory), MOK_INVALID_ARGUMENT);
    EXPECT_EQ(mok_last_error(), text);
  };
  constexpr int32_t kWide = 2147483640;
  expect(
      [](MokCudaLayer& layer) {
        layer.num_local_experts = layer.num_experts = 2048;
        layer.first_expert = 0;
        layer.intermediate = kWide;
      },
      "layer.num_local_experts * intermediate, hidden: expected at most 2^45 bytes, got "
      "[4398046494720, 72] of 2 bytes");
}

}  // namespace
}  // namespace mok::testing
