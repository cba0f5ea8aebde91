// tcgen05 matrix multiplies and the copy of scales. Instruction descriptors: PTX ISA 8.8 section
// 9.7.16, tables of kind::f16 and kind::mxf8f6f4.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "mok_core/dtype.h"
#include "mok_core/emulator/operands.h"
#include "mok_core/emulator/tensor_memory.h"

namespace mok::emulator {
namespace {

constexpr int kRows = 128;  // of the accumulator in one block

struct InstructionDescriptor {
  int m, n, format_a, format_b;
};

InstructionDescriptor DecodeShape(uint32_t bits) {
  return {static_cast<int>(bits >> 24 & 31) * 16, static_cast<int>(bits >> 17 & 63) * 8,
          static_cast<int>(bits >> 7 & 7), static_cast<int>(bits >> 10 & 7)};
}

InstructionDescriptor DecodeF16(uint32_t bits, bool pair) {
  const InstructionDescriptor d = DecodeShape(bits);
  const int step = pair ? 32 : 16;
  if (d.m != (pair ? 2 * kRows : kRows)) Fail("descriptor", "%08x: M=%d not emulated", bits, d.m);
  if (d.n < step || d.n > 256 || d.n % step != 0) {
    Fail("descriptor", "%08x: N=%d is not valid for M=%d", bits, d.n, d.m);
  }
  if ((bits >> 4 & 3) != 1) Fail("descriptor", "%08x: the accumulator must be fp32", bits);
  if (d.format_a > 1 || d.format_b > 1) Fail("descriptor", "%08x: operand formats", bits);
  if ((bits >> 15 & 3) != 0) Fail("descriptor", "%08x: MN-major operands not emulated", bits);
  if ((bits & 0xF) != 0 || (bits >> 13 & 3) != 0 || bits >> 29 != 0) {
    Fail("descriptor", "%08x sets unsupported bits", bits);
  }
  return d;
}

ElementFormat F16Format(int format) {
  return format == 0 ? ElementFormat::kFp16 : ElementFormat::kBf16;
}

ElementFormat Mxf8Format(uint32_t bits, int format) {
  switch (format) {
    case 0:
      return ElementFormat::kE4m3;
    case 1:
      return ElementFormat::kE5m2;
    case 5:
      return ElementFormat::kE2m1;
    default:
      Fail("descriptor", "%08x: operand format %d not emulated", bits, format);
  }
}

void AddPending(Block* block, uint32_t column, int count, int amount) {
  for (int i = 0; i < count; ++i) block->tensor_pending[column + i] += amount;
}

// Accumulator columns [column, column + n) of a block, as [128][n].
void ReadAccumulator(const Block* block, uint32_t column, int n, bool accumulate, float* d) {
  for (int m = 0; m < kRows; ++m) {
    if (accumulate) {
      std::memcpy(d + m * n, &block->tensor_memory[m * kTensorColumns + column], n * 4);
    } else {
      std::fill(d + m * n, d + (m + 1) * n, 0.0f);
    }
  }
}

void WriteAccumulator(Block* block, uint32_t column, int n, const float* d) {
  for (int m = 0; m < kRows; ++m) {
    std::memcpy(&block->tensor_memory[m * kTensorColumns + column], d + m * n, n * 4);
  }
}

// Block r of the pair (or the only block) holds rows r*128.. of A and D and rows r*N/count.. of B.
void ExecuteF16(const std::vector<Block*>& blocks, const Tcgen05Operands& operands,
                const InstructionDescriptor& shape, const TensorIssue& issue) {
  static float a[kRows * 16], part[16 * 256], b[16 * 256], d[kRows * 256];
  const int n = shape.n, count = static_cast<int>(blocks.size()), share = n / count;
  const OperandDescriptor da = DecodeDescriptor(operands.descriptor_a, OperandArchitecture::kSm100);
  const OperandDescriptor db = DecodeDescriptor(operands.descriptor_b, OperandArchitecture::kSm100);
  for (int r = 0; r < count; ++r) {
    LoadOperand({blocks[r], issue.clock.get(), issue.access, "tcgen05.mma (read of B)"}, db, share,
                F16Format(shape.format_b), nullptr, {part, true, share});
    for (int k = 0; k < 16; ++k) {
      std::memcpy(&b[k * n + r * share], &part[k * share], share * sizeof(float));
    }
  }
  const uint32_t column = operands.d & 0xFFFF;
  for (Block* block : blocks) {
    LoadOperand({block, issue.clock.get(), issue.access, "tcgen05.mma (read of A)"}, da, kRows,
                F16Format(shape.format_a), nullptr, {a, false, 0});
    ReadAccumulator(block, column, n, operands.accumulate, d);
    MultiplyAccumulate(d, a, b, kRows, n);
    WriteAccumulator(block, column, n, d);
    AddPending(block, column, n, -1);
  }
}

// Scale of row or column `index`: byte `selector` of the word that holds it in tensor memory.
float ReadScale(const Block* block, uint32_t column, int index, int selector) {
  const uint32_t place = column + index / 32;
  const uint32_t word = block->tensor_memory[(index % 32) * kTensorColumns + place];
  for (int quadrant = 1; quadrant < kQuadrants; ++quadrant) {
    const int lane = quadrant * 32 + index % 32;
    if (block->tensor_memory[lane * kTensorColumns + place] != word) {
      Fail("descriptor", "scales in column %u are not the same in all lane quadrants", place);
    }
  }
  return ToFloat(Float8E8M0{static_cast<uint8_t>(word >> 8 * selector)});
}

void ExecuteMxf8(Block* block, const Tcgen05Operands& operands, const InstructionDescriptor& shape,
                 const TensorIssue& issue) {
  static float a[kRows * 32], b[32 * 256], d[kRows * 256];
  float scales_a[kRows], scales_b[256];
  const uint32_t bits = operands.instruction;
  const int n = shape.n;
  for (int m = 0; m < kRows; ++m) {
    scales_a[m] = ReadScale(block, operands.scales_a & 0xFFFF, m, bits >> 29 & 3);
  }
  for (int i = 0; i < n; ++i) {
    scales_b[i] = ReadScale(block, operands.scales_b & 0xFFFF, i, bits >> 4 & 3);
  }
  LoadOperand({block, issue.clock.get(), issue.access, "tcgen05.mma (read of A)"},
              DecodeDescriptor(operands.descriptor_a, OperandArchitecture::kSm100), kRows,
              Mxf8Format(bits, shape.format_a), scales_a, {a, false, 0});
  LoadOperand({block, issue.clock.get(), issue.access, "tcgen05.mma (read of B)"},
              DecodeDescriptor(operands.descriptor_b, OperandArchitecture::kSm100), n,
              Mxf8Format(bits, shape.format_b), scales_b, {b, true, n});
  const uint32_t column = operands.d & 0xFFFF;
  ReadAccumulator(block, column, n, operands.accumulate, d);
  MultiplyAccumulate(d, a, b, kRows, n);
  MultiplyAccumulate(d, a + kRows * 16, b + 16 * n, kRows, n);
  WriteAccumulator(block, column, n, d);
  AddPending(block, column, n, -1);
}

}  // namespace

void Tcgen05MmaF16(const Tcgen05Operands& operands, bool pair) {
  Enter("tcgen05.mma", operands.d);
  CheckTensorFence("tcgen05.mma");
  Block* block = g_current->block;
  const auto& members = block->cluster->blocks;
  std::vector<Block*> blocks{block};
  if (pair) {
    if (members.size() < 2 || block->rank % 2 != 0) {
      Fail("usage", "a cta_group::2 multiply is issued by the even block of a pair");
    }
    blocks.push_back(members[block->rank + 1]);
  }
  const InstructionDescriptor shape = DecodeF16(operands.instruction, pair);
  if (operands.d >> 16 != 0) Fail("descriptor", "accumulator lane %u is not 0", operands.d >> 16);
  const uint32_t column = operands.d & 0xFFFF;
  for (Block* member : blocks) CheckTensorColumns(member, column, shape.n, "tcgen05.mma");
  const TensorIssue issue = IssueTensorOperation(block);
  for (Block* member : blocks) {
    RecordTensorColumns(true, member, column, shape.n, *issue.clock, issue.access,
                        "tcgen05.mma (write of tensor memory)");
    AddPending(member, column, shape.n, 1);
  }
  AddAsync(
      [=] {
        ExecuteF16(blocks, operands, shape, issue);
        return true;
      },
      TensorQueue(block));
}

void Tcgen05MmaMxf8(const Tcgen05Operands& operands) {
  Enter("tcgen05.mma", operands.d);
  CheckTensorFence("tcgen05.mma");
  Block* block = g_current->block;
  const uint32_t bits = operands.instruction;
  const InstructionDescriptor shape = DecodeShape(bits);
  if (shape.m != kRows || shape.n < 16 || shape.n > 256 || shape.n % 16 != 0) {
    Fail("descriptor", "%08x: M=%d N=%d", bits, shape.m, shape.n);
  }
  if ((bits >> 23 & 1) == 0) Fail("descriptor", "%08x: scales must be E8M0 (bit 23)", bits);
  if (bits >> 31 != 0 || (bits & 0xF) != 0 || (bits >> 6 & 1) != 0 || (bits >> 13 & 15) != 0) {
    Fail("descriptor", "%08x sets unsupported bits", bits);
  }
  Mxf8Format(bits, shape.format_a);
  Mxf8Format(bits, shape.format_b);
  if (((operands.scales_a | operands.scales_b) >> 16 & 0x3FFF) != 0) {
    Fail("descriptor", "scale addresses must be in lane 0");
  }
  const uint32_t column = operands.d & 0xFFFF;
  const int scale_columns_b = (shape.n + 31) / 32;
  CheckTensorColumns(block, column, shape.n, "tcgen05.mma D");
  CheckTensorColumns(block, operands.scales_a & 0xFFFF, 4, "tcgen05.mma scales of A");
  CheckTensorColumns(block, operands.scales_b & 0xFFFF, scale_columns_b, "tcgen05.mma scales of B");
  const TensorIssue issue = IssueTensorOperation(block);
  RecordTensorColumns(true, block, column, shape.n, *issue.clock, issue.access,
                      "tcgen05.mma (write of tensor memory)");
  RecordTensorColumns(false, block, operands.scales_a & 0xFFFF, 4, *issue.clock, issue.access,
                      "tcgen05.mma (read of scales of A)");
  RecordTensorColumns(false, block, operands.scales_b & 0xFFFF, scale_columns_b, *issue.clock,
                      issue.access, "tcgen05.mma (read of scales of B)");
  AddPending(block, column, shape.n, 1);
  AddAsync(
      [=] {
        ExecuteMxf8(block, operands, shape, issue);
        return true;
      },
      TensorQueue(block));
}

void Tcgen05CopyScales(uint32_t destination, uint64_t descriptor) {
  Enter("tcgen05.cp", destination);
  CheckTensorFence("tcgen05.cp");
  Block* block = g_current->block;
  const uint32_t column = destination & 0xFFFF;
  CheckTensorColumns(block, column, 4, "tcgen05.cp");
  if (destination >> 16 != 0) Fail("descriptor", "tcgen05.cp: the lane must be 0");
  const OperandDescriptor source = DecodeDescriptor(descriptor, OperandArchitecture::kSm100);
  if (source.swizzle != 0) Fail("descriptor", "tcgen05.cp: swizzled sources are not emulated");
  const TensorIssue issue = IssueTensorOperation(block);
  RecordTensorColumns(true, block, column, 4, *issue.clock, issue.access,
                      "tcgen05.cp (write of tensor memory)");
  AddPending(block, column, 4, 1);
  AddAsync(
      [=] {
        for (int row = 0; row < 32; ++row) {
          const uint32_t offset = source.start + row / 8 * source.stride + row % 8 * 16;
          CheckSharedOffset(block, offset, 16, "tcgen05.cp");
          RecordAccess(false, {block, offset, nullptr, 16}, *issue.clock, issue.access,
                       "tcgen05.cp (read of shared)");
          for (int quadrant = 0; quadrant < kQuadrants; ++quadrant) {
            std::memcpy(&block->tensor_memory[(quadrant * 32 + row) * kTensorColumns + column],
                        block->shared + offset, 16);
          }
        }
        AddPending(block, column, 4, -1);
        return true;
      },
      TensorQueue(block));
}

}  // namespace mok::emulator
