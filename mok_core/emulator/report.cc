// Failures, and what the threads were doing when they happened.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "mok_core/emulator/engine.h"

extern "C" char __executable_start;

namespace mok::emulator {
namespace {

constexpr size_t kMaxFrames = 12;
constexpr int kMaxPositions = 3;      // source positions shown per thread
constexpr int kMaxGroups = 24;        // groups of threads shown in a stall
constexpr int kSymbolizedGroups = 6;  // ... with source positions

// Return addresses along the frame-pointer chain of a parked fiber, or of the running one.
std::vector<uintptr_t> Unwind(const Fiber* fiber) {
  std::vector<uintptr_t> addresses;
  const auto low = reinterpret_cast<uintptr_t>(fiber->stack);
  const uintptr_t high = low + kStackBytes;
  uintptr_t frame;
  if (fiber == g_current) {
    frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  } else {
    frame = static_cast<const uintptr_t*>(fiber->stack_pointer)[5];  // saved rbp
  }
  while (frame > low && frame + 16 <= high && addresses.size() < kMaxFrames) {
    const auto* words = reinterpret_cast<const uintptr_t*>(frame);
    if (words[1] == 0) break;
    addresses.push_back(words[1]);
    if (words[0] <= frame) break;
    frame = words[0];
  }
  return addresses;
}

bool IsOwnFrame(const std::string& line) {
  for (const char* own : {"mok_core/emulator/", "std::", "??"}) {
    if (line.find(own) != std::string::npos && line.find("emulator/tests/") == std::string::npos) {
      return true;
    }
  }
  return false;
}

// Source positions of kernel code, as indented lines.
std::string Symbolize(const Fiber* fiber) {
  if (!g_engine.options.symbolize) return "";
  const std::vector<uintptr_t> addresses = Unwind(fiber);
  if (addresses.empty()) return "";
  std::string command = Format("addr2line -C -i -f -p -e /proc/%d/exe", getpid());
  const auto base = reinterpret_cast<uintptr_t>(&__executable_start);
  const uintptr_t offset = base > 0x500000 ? base : 0;  // position-independent executable
  for (uintptr_t address : addresses) command += Format(" 0x%lx", address - 1 - offset);
  FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  std::string text;
  char line[1024];
  int shown = 0;
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    std::string position = line;
    while (!position.empty() && position.back() == '\n') position.pop_back();
    const size_t at = position.rfind(" at ");
    if (at == std::string::npos || IsOwnFrame(position) || shown == kMaxPositions) continue;
    ++shown;
    std::string function = position.substr(0, std::min(position.find('('), at));
    if (function.size() > 48) function = function.substr(0, 45) + "...";
    text += "        at " + position.substr(at + 4) + "  " + function + "\n";
  }
  pclose(pipe);
  return text;
}

std::string DescribeBarrierWait(const Fiber* fiber) {
  const uint32_t address = fiber->operation.argument;
  const auto& blocks = fiber->block->cluster->blocks;
  if (address >> 24 >= blocks.size()) return "";
  const Block* block = blocks[address >> 24];
  const auto it = block->barriers.find(address & kOffsetMask);
  if (it == block->barriers.end()) return "";
  const Barrier& barrier = it->second;
  return Format(
      " %s parity %lu [phase %u, pending arrivals %u/%u, transactions %ld, transfers in flight %d]",
      DescribeShared(block, it->first).c_str(), static_cast<unsigned long>(fiber->operation.detail),
      barrier.phase, barrier.pending, barrier.count, static_cast<long>(barrier.transactions),
      barrier.transfers);
}

std::string DescribeWait(const Fiber* fiber) {
  const Operation& operation = fiber->operation;
  const std::string name = operation.name;
  std::string text = Format(
      "  %s%s warp %2d: %s %s", fiber->block->grid->options.name,
      Format("(%u,%u,%u)", fiber->block->index.x, fiber->block->index.y, fiber->block->index.z)
          .c_str(),
      fiber->warp, fiber->state == FiberState::kBlocked ? "blocked in" : "spinning in",
      operation.name);
  if (name.rfind("mbarrier", 0) == 0) {
    text += DescribeBarrierWait(fiber);
  } else if (name.rfind("bar.", 0) == 0) {
    text += Format(" id %u [arrived %d of %lu]", operation.argument,
                   fiber->block->named_barriers[operation.argument & 15].arrived,
                   static_cast<unsigned long>(operation.detail));
  } else if (name.rfind("warp.", 0) == 0) {
    const Collective& collective = fiber->block->collectives[fiber->warp];
    text += Format(" mask %08x arrived %08x", collective.mask, collective.arrived);
  } else if (operation.pointer != nullptr) {
    text += " " + DescribeGlobal(operation.pointer);
  }
  return text;
}

std::string DescribeAgent(const Access& access) {
  const Agent& agent = g_engine.agents[access.agent];
  const std::string block =
      Format("block (%u,%u,%u)", agent.block->index.x, agent.block->index.y, agent.block->index.z);
  switch (agent.kind) {
    case Agent::Kind::kFiber:
      return DescribeFiber(static_cast<const Fiber*>(agent.object));
    case Agent::Kind::kBarrier: {
      const auto* barrier = static_cast<const Barrier*>(agent.object);
      return Format("the transfer completing on mbarrier %s of %s phase %u",
                    DescribeShared(barrier->block, barrier->offset).c_str(), block.c_str(),
                    access.clock - 1);
    }
    case Agent::Kind::kWgmma:
      return Format("wgmma #%u of %s", access.clock - 1, block.c_str());
    case Agent::Kind::kBulkRead:
    case Agent::Kind::kBulkWrite:
      return "a bulk copy issued by " + DescribeFiber(static_cast<const Fiber*>(agent.object));
    case Agent::Kind::kTensorCore:
      return Format("tcgen05 operation #%u of %s", access.clock, block.c_str());
  }
  return "?";
}

}  // namespace

std::string Format(const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

std::string DescribeFiber(const Fiber* fiber) {
  const Block* block = fiber->block;
  return Format("%s device %d block (%u,%u,%u) warp %d lane %d", block->grid->options.name,
                block->grid->options.device, block->index.x, block->index.y, block->index.z,
                fiber->warp, fiber->lane);
}

std::string DescribeShared(const Block* block, uint32_t offset) {
  auto it = block->names.upper_bound(offset);
  if (it == block->names.begin()) return Format("shared 0x%x", offset);
  --it;
  return Format("%s+%u (shared 0x%x)", it->second.c_str(), offset - it->first, offset);
}

void Fail(const char* kind, const char* format, ...) {
  Engine& e = g_engine;
  if (e.failed) LeaveScheduler();  // a failure while reporting the first one
  e.failed = true;
  char text[16384];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (e.report.ok) {
    e.report.ok = false;
    e.report.kind = kind;
    e.report.text = text;
    if (g_current != nullptr) {
      e.report.text += "\n  reported in " + DescribeFiber(g_current) + " during " +
                       g_current->operation.name + "\n" + Symbolize(g_current);
    }
  }
  LeaveScheduler();
}

void FailRace(const char* kind, const char* problem, const std::string& where, const char* what,
              const Access& previous, bool previous_write) {
  static const char* const kKinds[] = {"?", "generic", "async-proxy", "gpu-scope atomic",
                                       "system-scope atomic"};
  Fail(kind, "%s at %s: %s is not ordered after %s %s by %s", problem, where.c_str(), what,
       kKinds[static_cast<int>(previous.kind)], previous_write ? "write" : "read",
       DescribeAgent(previous).c_str());
}

std::string DescribeStall() {
  std::vector<std::pair<std::string, std::vector<const Fiber*>>> groups;
  std::unordered_map<std::string, size_t> index;
  for (const auto& fiber : g_engine.fibers) {
    if (fiber->state == FiberState::kDone) continue;
    const std::string key = DescribeWait(fiber.get());
    const auto [it, inserted] = index.try_emplace(key, groups.size());
    if (inserted) groups.push_back({key, {}});
    groups[it->second].second.push_back(fiber.get());
  }
  std::string text;
  int shown = 0;
  for (const auto& [key, fibers] : groups) {
    uint32_t lanes = 0;
    for (const Fiber* fiber : fibers) lanes |= 1u << fiber->lane;
    text += key + (lanes == 0xFFFFFFFFu ? " (all 32 lanes)\n" : Format(" (lanes %08x)\n", lanes));
    if (shown++ < kSymbolizedGroups) text += Symbolize(fibers.front());
    if (shown > kMaxGroups) return text + "  ...\n";
  }
  return text;
}

}  // namespace mok::emulator
