#include "mok_core/emulator/operands.h"

#include <cmath>
#include <cstring>

#include "mok_core/dtype.h"
#include "mok_core/emulator/tensor_map.h"

namespace mok::emulator {
namespace {

// A binary float of 1 sign bit, the given exponent and mantissa bits, without Inf and NaN.
float DecodeFinite(unsigned bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const float magnitude = exponent != 0
                              ? std::ldexp(static_cast<float>((1 << mantissa_bits) + mantissa),
                                           exponent - bias - mantissa_bits)
                              : std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  return (bits >> (exponent_bits + mantissa_bits) & 1) != 0 ? -magnitude : magnitude;
}

float DecodeIeee(unsigned bits, int exponent_bits, int mantissa_bits) {
  const unsigned all_ones = (1u << exponent_bits) - 1;
  if ((bits >> mantissa_bits & all_ones) != all_ones) {
    return DecodeFinite(bits, exponent_bits, mantissa_bits);
  }
  if ((bits & ((1u << mantissa_bits) - 1)) != 0) return NAN;
  return (bits >> (exponent_bits + mantissa_bits) & 1) != 0 ? -INFINITY : INFINITY;
}

// Element k of a 16-byte chunk. Four-bit elements fill the low 8 bytes.
float DecodeElement(const uint8_t* chunk, int k, ElementFormat format) {
  switch (format) {
    case ElementFormat::kBf16:
    case ElementFormat::kFp16: {
      uint16_t bits;
      std::memcpy(&bits, chunk + 2 * k, 2);
      return format == ElementFormat::kBf16 ? ToFloat(BFloat16{bits}) : DecodeIeee(bits, 5, 10);
    }
    case ElementFormat::kE4m3:
      return ToFloat(Float8E4M3{chunk[k]});
    case ElementFormat::kE5m2:
      return DecodeIeee(chunk[k], 5, 2);
    case ElementFormat::kE2m1:
      return DecodeFinite(chunk[k / 2] >> (k & 1) * 4 & 15, 2, 1);
  }
  return NAN;
}

int ElementsPerChunk(ElementFormat format) {
  return format == ElementFormat::kBf16 || format == ElementFormat::kFp16 ? 8 : 16;
}

}  // namespace

OperandDescriptor DecodeDescriptor(uint64_t descriptor, OperandArchitecture architecture,
                                   OperandMajor major) {
  const auto bits = static_cast<unsigned long>(descriptor);
  OperandDescriptor decoded{static_cast<uint32_t>(descriptor & 0x3FFF) << 4,
                            static_cast<uint32_t>(descriptor >> 16 & 0x3FFF) << 4,
                            static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4, 0, major};
  if (architecture == OperandArchitecture::kSm90) {
    if ((descriptor >> 46 & 3) != 0) {
      Fail("descriptor", "%016lx has bits 46 and 47 set (an sm_100 descriptor?)", bits);
    }
    static constexpr int kSwizzles[] = {0, 128, 64, 32};
    decoded.swizzle = kSwizzles[descriptor >> 62 & 3];
  } else {
    if ((descriptor >> 46 & 3) != 1) {
      Fail("descriptor", "%016lx: bits 46 and 47 must hold 1 on sm_100", bits);
    }
    static constexpr int kSwizzles[] = {0, -1, 128, -1, 64, -1, 32, -1};
    decoded.swizzle = kSwizzles[descriptor >> 61 & 7];
    if (decoded.swizzle < 0) Fail("descriptor", "%016lx: layout type not emulated", bits);
  }
  if ((descriptor >> 49 & 7) != 0) Fail("descriptor", "%016lx: base offset not emulated", bits);
  if (major == OperandMajor::kMn && decoded.swizzle == 0) {
    Fail("descriptor", "%016lx: MN-major operands without swizzle are not emulated", bits);
  }
  return decoded;
}

uint32_t OperandOffset(const OperandDescriptor& descriptor, int row, int chunk) {
  if (descriptor.major == OperandMajor::kMn) {
    const int chunks = descriptor.swizzle / 16;  // of an atom
    const uint32_t linear = descriptor.start + chunk / chunks * descriptor.leading +
                            row / 8 * descriptor.stride + row % 8 * descriptor.swizzle +
                            chunk % chunks * 16;
    return SwizzleOffset(linear, descriptor.swizzle);
  }
  const uint32_t group = static_cast<uint32_t>(row / 8) * descriptor.stride;
  if (descriptor.swizzle == 0) {
    return descriptor.start + group + (row % 8) * 16 + chunk * descriptor.leading;
  }
  const uint32_t linear = descriptor.start + group + (row % 8) * descriptor.swizzle + chunk * 16;
  return SwizzleOffset(linear, descriptor.swizzle);
}

namespace {

// The checked chunk at a shared offset; `row` for the report.
const uint8_t* ReadChunk(const OperandReader& reader, uint32_t offset, int row) {
  Block* block = reader.block;
  CheckSharedOffset(block, offset, 16, reader.what);
  if (g_engine.options.check_races) {
    if (block->shadow[offset / 4].write.kind == AccessKind::kNone) {
      Fail("uninit", "%s: row %d reads shared %s, which was never written", reader.what, row,
           DescribeShared(block, offset).c_str());
    }
    RecordAccess(false, {block, offset, nullptr, 16}, *reader.clock, reader.access, reader.what);
  }
  return reinterpret_cast<const uint8_t*>(block->shared + offset);
}

void StoreElement(const OperandOutput& output, int rows, int row, int k, float value) {
  if (output.transposed) {
    output.values[k * output.leading_dimension + row] = value;
  } else {
    output.values[(k / 16) * rows * 16 + row * 16 + k % 16] = value;
  }
}

}  // namespace

void LoadOperand(const OperandReader& reader, const OperandDescriptor& descriptor, int rows,
                 ElementFormat format, const float* scales, const OperandOutput& output) {
  const int elements = ElementsPerChunk(format);
  const bool is_mn = descriptor.major == OperandMajor::kMn;
  const int lines = is_mn ? 16 : rows, chunks = is_mn ? rows / elements : 2;
  for (int line = 0; line < lines; ++line) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint8_t* bytes = ReadChunk(reader, OperandOffset(descriptor, line, chunk), line);
      for (int i = 0; i < elements; ++i) {
        const int across = chunk * elements + i;
        const int row = is_mn ? across : line, k = is_mn ? line : across;
        float value = DecodeElement(bytes, i, format);
        if (scales != nullptr) value *= scales[row];
        StoreElement(output, rows, row, k, value);
      }
    }
  }
}

__attribute__((optimize("O3"), noinline)) void MultiplyAccumulate(float* __restrict c,
                                                                  const float* __restrict a,
                                                                  const float* __restrict b, int m,
                                                                  int n) {
  for (int row = 0; row < m; ++row) {
    float* __restrict out = c + static_cast<size_t>(row) * n;
    for (int k = 0; k < 16; k += 4) {
      const float a0 = a[row * 16 + k], a1 = a[row * 16 + k + 1];
      const float a2 = a[row * 16 + k + 2], a3 = a[row * 16 + k + 3];
      const float* b0 = b + static_cast<size_t>(k) * n;
      const float *b1 = b0 + n, *b2 = b1 + n, *b3 = b2 + n;
      for (int j = 0; j < n; ++j) {
        out[j] = out[j] + a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j];
      }
    }
  }
  g_engine.report.multiply_accumulates += static_cast<uint64_t>(m) * n * 16;
}

}  // namespace mok::emulator
