// Stackful context switches. Three kinds of context: the caller of Run(), the scheduler, fibers.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "mok_core/emulator/engine.h"

// Saves the callee-saved registers of the System V AMD64 ABI on the stack, publishes the stack
// pointer in *save, and continues from the stack pointer `to`.
extern "C" void mok_emulator_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl mok_emulator_switch
.type mok_emulator_switch,@function
mok_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mok_emulator_switch,.-mok_emulator_switch
)");
#else
#error "the emulator's context switch is written for x86-64 only"
#endif

namespace mok::emulator {
namespace {

constexpr uint64_t kCanary = 0x5AFE57AC5AFE57ACull;
constexpr int kSavedRegisters = 6;
constexpr size_t kSchedulerStackBytes = 1 << 20;
// Stacks come in slabs and end in canaries: one guard page each would exceed vm.max_map_count with
// 132 blocks of 384 threads.
constexpr int kStacksPerSlab = 128;

std::vector<char*> g_free_stacks;
char* g_scheduler_stack = nullptr;
void* g_scheduler_pointer = nullptr;
void* g_caller_pointer = nullptr;
void (*g_scheduler_function)() = nullptr;

char* MapPages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    std::perror("emulator: cannot map stacks");
    std::abort();
  }
  return static_cast<char*>(pages);
}

// A stack pointer from which mok_emulator_switch continues at `entry`. The entry never returns.
void* InitialStackPointer(char* top, void (*entry)()) {
  auto** frame = reinterpret_cast<void**>(top - 128);  // entry sees rsp = 8 modulo 16
  for (int i = 0; i < kSavedRegisters; ++i) frame[i] = nullptr;
  frame[kSavedRegisters] = reinterpret_cast<void*>(entry);
  frame[kSavedRegisters + 1] = nullptr;  // the unwinder stops here
  return frame;
}

void SchedulerMain() {
  g_scheduler_function();
  LeaveScheduler();
}

}  // namespace

void RunOnScheduler(void (*function)()) {
  if (g_scheduler_stack == nullptr) g_scheduler_stack = MapPages(kSchedulerStackBytes);
  g_scheduler_function = function;
  void* start = InitialStackPointer(g_scheduler_stack + kSchedulerStackBytes, SchedulerMain);
  mok_emulator_switch(&g_caller_pointer, start);
}

void LeaveScheduler() {
  void* abandoned;
  mok_emulator_switch(&abandoned, g_caller_pointer);
  std::abort();  // nobody continues an abandoned context
}

void SwitchToScheduler() { mok_emulator_switch(&g_current->stack_pointer, g_scheduler_pointer); }

void SwitchToFiber(Fiber* fiber) {
  g_current = fiber;
  mok_emulator_switch(&g_scheduler_pointer, fiber->stack_pointer);
  g_current = nullptr;
}

void PrepareFiber(Fiber* fiber, void (*entry)()) {
  if (g_free_stacks.empty()) {
    char* slab = MapPages(kStackBytes * kStacksPerSlab);
    for (int i = kStacksPerSlab - 1; i >= 0; --i) g_free_stacks.push_back(slab + i * kStackBytes);
  }
  fiber->stack = g_free_stacks.back();
  g_free_stacks.pop_back();
  *reinterpret_cast<uint64_t*>(fiber->stack) = kCanary;
  char* top = fiber->stack + kStackBytes - 256;
  fiber->context = reinterpret_cast<ThreadContext*>(top);
  fiber->stack_pointer = InitialStackPointer(top, entry);
}

void ReleaseStack(Fiber* fiber) {
  if (fiber->stack != nullptr) g_free_stacks.push_back(fiber->stack);
  fiber->stack = nullptr;
}

bool StackIntact(const Fiber* fiber) {
  return *reinterpret_cast<const uint64_t*>(fiber->stack) == kCanary;
}

}  // namespace mok::emulator
