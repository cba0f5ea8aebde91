// All ranks of a linear layer in one process, a device each, through the host seam: the same code
// allocates, launches and compares in the emulator and on GPUs. For tests: errors end the program.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "mok_core/device/runtime.h"
#include "mok_core/emulator/tests/test_support.h"
#include "mok_core/status.h"
#include "mok_gemm/sm90/tensor_maps.h"

namespace custom_kernel {

struct LinearShape {
  std::vector<int32_t> tokens;  // of each rank, >= 1
  int32_t width = 0;            // output columns of each rank, a multiple of 8
  int32_t k = 0;                // a multiple of 8

  int32_t num_ranks() const { return static_cast<int32_t>(tokens.size()); }
  int64_t OutputElements(int32_t rank) const { return int64_t{tokens[rank]} * num_ranks() * width; }
};

class LinearRanks {
 public:
  // Fills every rank's X and W with numbers whose sums of products are exact in fp32.
  LinearRanks(const LinearShape& shape, uint32_t seed) : shape_(shape), ranks_(shape.num_ranks()) {
    for (int32_t rank = 0; rank < shape.num_ranks(); ++rank) Allocate(rank, seed);
    for (int32_t rank = 0; rank < shape.num_ranks(); ++rank) Connect(rank);
  }

  // Before the launches of a pass: fills Y of all ranks with NaN.
  void StartPass() {
    for (int32_t rank = 0; rank < shape_.num_ranks(); ++rank) {
      const size_t bytes = sizeof(uint16_t) * shape_.OutputElements(rank);
      MOK_CHECK(mok::runtime::Fill(ranks_[rank].y, 0xFF, bytes).ok());
      ++ranks_[rank].params.pass;
    }
  }

  // Queues one rank's pass; at most as many blocks as the device has SMs. `kernel`: LinearKernel().
  void Launch(int32_t rank, const void* kernel, uint32_t num_blocks) {
    mok::runtime::LaunchConfig config;
    config.grid = {num_blocks, 1, 1};
    config.block = {kLinearThreads, 1, 1};
    config.shared_bytes = LinearSharedBytes();
    config.registers_per_thread = mok::kSm90LaunchRegisters;
    config.device = rank;
    config.stream = ranks_[rank].stream;
    config.name = "linear";
    const LinearParams& params = ranks_[rank].params;
    MOK_CHECK(mok::runtime::LaunchKernelAddress(kernel, config, &params, sizeof params).ok());
  }

  // Compares Y of all ranks with plain products, bit for bit. After runtime::Synchronize.
  bool Matches() const {
    const int32_t num_ranks = shape_.num_ranks(), width = shape_.width;
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      const auto y = mok::testing::HostCopy(ranks_[rank].y, shape_.OutputElements(rank));
      for (int32_t peer = 0; peer < num_ranks; ++peer) {
        const std::vector<float> product = mok::testing::ExactProduct(
            ranks_[rank].x, ranks_[peer].w, shape_.tokens[rank], width, shape_.k);
        for (size_t i = 0; i < product.size(); ++i) {
          const size_t at = (i / width * num_ranks + peer) * width + i % width;
          if (y[at] != mok::RoundToBFloat16(product[i]).bits) return false;
        }
      }
    }
    return true;
  }

  // Whether a wait of the rank has run out of time, and which.
  mok::Status CheckWaits(int32_t rank) const {
    const auto role_name = [](int32_t role) {
      constexpr const char* kNames[] = {"entry",    "pull", "scheduler", "producer",
                                        "consumer", "push", "exit"};
      return kNames[role];
    };
    return mok::CheckDeviceWaitRecord(*ranks_[rank].params.wait.record, {.role = role_name});
  }

 private:
  static constexpr uint64_t kTimeoutNs = 2'000'000'000;

  struct Rank {
    std::vector<uint16_t> x, w;  // [tokens, k], [width, k] bf16
    uint16_t* device_x = nullptr;
    uint16_t* y = nullptr;  // [tokens, num_ranks * width] bf16, device
    LinearParams params = {};
    void* stream = nullptr;
  };

  void Allocate(int32_t rank, uint32_t seed) {
    using mok::testing::DeviceArray;
    const int32_t num_ranks = shape_.num_ranks();
    const size_t k = shape_.k, width = shape_.width;
    Rank& r = ranks_[rank];
    r.x = mok::testing::ExactBFloat16(shape_.tokens[rank] * k, seed * 100 + rank);
    r.w = mok::testing::ExactBFloat16(width * k, seed * 100 + 50 + rank);
    r.device_x = DeviceArray(r.x, "X", rank);
    r.y = mok::testing::UninitializedArray<uint16_t>(shape_.OutputElements(rank), "Y", rank);
    r.stream = mok::runtime::CreateStream(rank).value();

    // The rows of all ranks, this rank's first: they need no link. Row t * num_ranks + rank of a
    // peer's Y is this rank's part of its token t, row t of its X.
    std::vector<int32_t> source_rank, source_route;
    for (int32_t i = 0; i < num_ranks; ++i) {
      const int32_t source = (rank + i) % num_ranks;
      for (int32_t token = 0; token < shape_.tokens[source]; ++token) {
        source_rank.push_back(source);
        source_route.push_back(token * num_ranks + rank);
      }
    }
    LinearParams& p = r.params;
    const size_t rows = source_rank.size();
    p.shape = {static_cast<int32_t>(rows), shape_.width,
               mok::CeilDiv(shape_.k, int32_t{LinearGemm::kTileK})};
    p.pull.sources = {DeviceArray(source_rank, "source_rank", rank),
                      DeviceArray(source_route, "source_route", rank)};
    p.pull.own_rank = rank;
    p.push = p.pull;
    p.pull.routes_per_row = num_ranks;
    p.pull.peers.row_bytes = shape_.k * int64_t{sizeof(uint16_t)};
    p.pull.local =
        mok::testing::UninitializedArray<std::byte>(rows * k * sizeof(uint16_t), "rows of X", rank);
    p.push.routes_per_row = 1;
    p.push.peers.row_bytes = shape_.width * int64_t{sizeof(uint16_t)};
    p.push.local = mok::testing::UninitializedArray<std::byte>(rows * width * sizeof(uint16_t),
                                                               "rows of Y", rank);
    const auto* x = reinterpret_cast<const mok::BFloat16*>(p.pull.local);
    p.x = mok::runtime::EncodeTensorMap(
              mok::ActivationMapSpec(x, p.shape.rows, shape_.k, shape_.k).value())
              .value();
    const auto* w = reinterpret_cast<const mok::BFloat16*>(DeviceArray(r.w, "W", rank));
    p.w = mok::runtime::EncodeTensorMap(mok::WeightMapSpec({w, 1, shape_.width, shape_.k},
                                                           LinearGemm::kOrder, LinearGemm::kHalfN)
                                            .value())
              .value();
    const std::vector<uint64_t> flags(size_t{mok::kNumMeetings} * num_ranks, 0);
    p.meeting.flags_of_rank[rank] = DeviceArray(flags, "flags", rank);
    p.meeting.rank = rank;
    p.meeting.num_ranks = num_ranks;
    p.counters = DeviceArray(std::vector<uint64_t>(p.CounterCount(), 0), "counters", rank);
    p.ticket = DeviceArray(std::vector<mok::TicketCounter>{{0, 0}}, "ticket", rank);
    void* const record =
        mok::runtime::AllocateMappedHost(sizeof(mok::DeviceWaitRecord), "wait record").value();
    p.wait = {static_cast<mok::DeviceWaitRecord*>(record),
              DeviceArray(std::vector<uint32_t>{0}, "abort flag", rank), kTimeoutNs, rank};
    p.meeting_wait = p.wait;
    p.meeting_wait.timeout_ns = kTimeoutNs / 2;
  }

  void Connect(int32_t rank) {
    LinearParams& p = ranks_[rank].params;
    for (int32_t peer = 0; peer < shape_.num_ranks(); ++peer) {
      if (peer != rank) MOK_CHECK(mok::runtime::EnablePeerAccess(rank, peer).ok());
      const Rank& other = ranks_[peer];
      p.pull.peers.of_rank[peer] = reinterpret_cast<std::byte*>(other.device_x);
      p.push.peers.of_rank[peer] = reinterpret_cast<std::byte*>(other.y);
      p.meeting.flags_of_rank[peer] = other.params.meeting.flags_of_rank[peer];
    }
  }

  LinearShape shape_;
  std::vector<Rank> ranks_;
};

}  // namespace custom_kernel
