// Warpgroup matrix multiply. Issue is only recorded; operands are read when someone waits, as late
// as the hardware may. Meanwhile the accumulator registers hold a marked NaN.
#include <algorithm>
#include <cstring>

#include "mok_core/emulator/engine.h"
#include "mok_core/emulator/operands.h"

namespace mok::emulator {
namespace {

constexpr int kRows = 64;
constexpr int kThreads = 128;
constexpr uint32_t kInFlightNan = 0x7FC0DEAD;

// Row and column that register i of a thread holds (PTX ISA 9.7.15, fragment D of m64nNk16).
struct Place {
  int row, column;
};
Place FragmentPlace(int thread, int i) {
  const int lane = thread % 32;
  return {thread / 32 * 16 + lane / 4 + (i / 2 % 2) * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

int TakeBuffer(Warpgroup& warpgroup, int columns) {
  if (warpgroup.free_buffers.empty()) {
    warpgroup.free_buffers.push_back(static_cast<int>(warpgroup.buffers.size()));
    warpgroup.buffers.emplace_back();
    warpgroup.references.push_back(0);
  }
  const int buffer = warpgroup.free_buffers.back();
  warpgroup.free_buffers.pop_back();
  warpgroup.buffers[buffer].assign(static_cast<size_t>(kRows) * columns, 0.0f);
  return buffer;
}

void MoveIn(Warpgroup& warpgroup, const InflightAccumulator& inflight, int thread) {
  float* buffer = warpgroup.buffers[inflight.buffer].data();
  for (int i = 0; i < inflight.count; ++i) {
    const Place place = FragmentPlace(thread, i);
    buffer[place.row * inflight.count * 2 + place.column] = inflight.registers[i];
    std::memcpy(&inflight.registers[i], &kInFlightNan, sizeof kInFlightNan);
  }
}

void MoveOut(Warpgroup& warpgroup, const InflightAccumulator& inflight, int thread) {
  const float* buffer = warpgroup.buffers[inflight.buffer].data();
  for (int i = 0; i < inflight.count; ++i) {
    const Place place = FragmentPlace(thread, i);
    inflight.registers[i] = buffer[place.row * inflight.count * 2 + place.column];
  }
  if (--warpgroup.references[inflight.buffer] == 0) {
    warpgroup.free_buffers.push_back(inflight.buffer);
  }
}

OperandMajor MajorOf(bool transpose) { return transpose ? OperandMajor::kMn : OperandMajor::kK; }

void Execute(Block* block, Warpgroup& warpgroup, uint64_t number) {
  static float a[kRows * 16], b[16 * 256];
  WgmmaOperation& operation = warpgroup.operations[number];
  const WgmmaOperands& operands = operation.operands;
  const int n = operands.columns;
  const Access access{static_cast<uint32_t>(number + 1), warpgroup.agent, AccessKind::kAsync, 0xF};
  constexpr auto kSm90 = OperandArchitecture::kSm90;
  LoadOperand({block, &operation.clock, access, "wgmma (read of A)"},
              DecodeDescriptor(operands.descriptor_a, kSm90, MajorOf(operands.transpose_a)), kRows,
              ElementFormat::kBf16, nullptr, {a, false, 0});
  LoadOperand({block, &operation.clock, access, "wgmma (read of B)"},
              DecodeDescriptor(operands.descriptor_b, kSm90, MajorOf(operands.transpose_b)), n,
              ElementFormat::kBf16, nullptr, {b, true, n});
  float* c = warpgroup.buffers[operation.buffer].data();
  if (!operands.accumulate) std::fill(c, c + kRows * n, 0.0f);
  MultiplyAccumulate(c, a, b, kRows, n);
  operation.clock = Clock{};
}

}  // namespace

void WgmmaFence() {
  Enter("wgmma.fence");
  g_current->wgmma_fenced = true;
}

void WgmmaCommitGroup() {
  Enter("wgmma.commit_group");
  g_current->wgmma_groups.push_back(g_current->wgmma_issued);
}

void WgmmaBf16(float* accumulator, const WgmmaOperands& operands) {
  Enter("wgmma.mma_async");
  Fiber* fiber = g_current;
  Warpgroup& warpgroup = fiber->block->warpgroups[fiber->thread / kThreads];
  if (!fiber->wgmma_fenced) {
    Fail("usage", "wgmma.mma_async without wgmma.fence since the registers were last accessible");
  }
  const uint64_t number = fiber->wgmma_issued++;
  auto mine = std::find_if(fiber->wgmma_inflight.begin(), fiber->wgmma_inflight.end(),
                           [&](const auto& in) { return in.registers == accumulator; });
  const bool fresh = mine == fiber->wgmma_inflight.end();
  if (number == warpgroup.operations.size()) {
    const int buffer = fresh ? TakeBuffer(warpgroup, operands.columns) : mine->buffer;
    warpgroup.operations.push_back({operands, buffer, fresh, 0, false, Clock{}});
  }
  WgmmaOperation& operation = warpgroup.operations[number];
  if (!(operation.operands == operands)) {
    Fail("usage",
         "wgmma #%lu differs between threads of the warpgroup: %016lx/%016lx, %016lx/%016lx",
         static_cast<unsigned long>(number),
         static_cast<unsigned long>(operation.operands.descriptor_a),
         static_cast<unsigned long>(operation.operands.descriptor_b),
         static_cast<unsigned long>(operands.descriptor_a),
         static_cast<unsigned long>(operands.descriptor_b));
  }
  if (fresh != operation.fresh || (!fresh && mine->buffer != operation.buffer)) {
    Fail("usage", "wgmma accumulators differ between threads of the warpgroup");
  }
  if (fresh) {
    fiber->wgmma_inflight.push_back({accumulator, operands.columns / 2, operation.buffer, number});
    ++warpgroup.references[operation.buffer];
    MoveIn(warpgroup, fiber->wgmma_inflight.back(), fiber->thread % kThreads);
  } else {
    mine->last = number;
  }
  if (g_engine.options.check_races && fiber->lane == 0) {
    if (!operation.have_clock) {
      operation.clock = fiber->clock;
      operation.have_clock = true;
    } else {
      operation.clock.Meet(fiber->clock);  // what all four warps know
    }
  }
  if (++operation.issued == kThreads) Wake(warpgroup.waiters);
}

void WgmmaWaitGroup(int pending) {
  Fiber* fiber = g_current;
  const int group = static_cast<int>(fiber->wgmma_groups.size()) - pending - 1;
  const uint64_t target = group >= 0 ? fiber->wgmma_groups[group] : 0;
  Enter("wgmma.wait_group", pending, target);
  Warpgroup& warpgroup = fiber->block->warpgroups[fiber->thread / kThreads];
  while (warpgroup.executed < target) {
    if (warpgroup.operations[warpgroup.executed].issued < kThreads) {
      warpgroup.waiters.push_back(fiber);
      BlockFiber();
      continue;
    }
    Execute(fiber->block, warpgroup, warpgroup.executed);
    ++warpgroup.executed;
  }
  auto& inflight = fiber->wgmma_inflight;
  for (size_t i = 0; i < inflight.size();) {
    if (inflight[i].last >= target) {
      ++i;
      continue;
    }
    MoveOut(warpgroup, inflight[i], fiber->thread % kThreads);
    inflight.erase(inflight.begin() + static_cast<int64_t>(i));
  }
  if (inflight.empty()) fiber->wgmma_fenced = false;
  if (g_engine.options.check_races) fiber->clock.happened.Raise(warpgroup.agent, target);
}

}  // namespace mok::emulator
