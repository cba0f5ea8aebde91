// TileWorker: the GEMM tiles of the MoE layer with their epilogues, on one host thread.
//
// Numerics. Products are accumulated in fp32, one accumulator per output element, K ascending; the
// accumulator is rounded once (RNE) to the operand dtype. Hence the bits of an output element
// depend on its own row, its own column and K only: not on the tile's position or size, the other
// rows, the thread, or what the worker ran before. They do depend on the ISA:
//  - kPortable: separate multiply and add; kAvx2, kAvx512: fused multiply-add;
//  - kAvx512Bf16 with bf16 operands: VDPBF16PS takes K in pairs (2j, 2j + 1) and accumulates the
//    odd product first, then the even one, each by a fused multiply-add rounded to nearest even.
//    Denormal inputs count as zero and denormal results become zero, whatever MXCSR says. An odd K
//    is completed with a pair partner of zero.
// Memory beyond `rows`, `columns` and K is never read or written, so it may hold NaN.
#pragma once

#include <memory>

#include "mok_core/dtype.h"
#include "mok_gemm/host/isa.h"
#include "mok_gemm/host/tiles.h"

namespace mok {

class TileWorkerImpl;

// One per thread (not thread-safe); owns 2 MiB of packing scratch. Nothing survives from
// one tile to the next: operands are packed K block by K block while they are multiplied, so there
// is no weight cache that a caller would have to invalidate.
class TileWorker {
 public:
  // `isa` must be supported and `dtype` kBf16 or kFp32 (checked: a violation ends the process).
  TileWorker(Isa isa, DType dtype);
  ~TileWorker();
  TileWorker(TileWorker&&) noexcept;
  TileWorker& operator=(TileWorker&&) noexcept;

  Isa isa() const;
  DType dtype() const;

  void GateUp(const GateUpTile& tile);
  void Down(const DownTile& tile);
  void DownGrad(const DownGradTile& tile);
  void InputGrad(const InputGradTile& tile);
  void WeightGrad(const WeightGradTile& tile);

 private:
  std::unique_ptr<TileWorkerImpl> impl_;
};

}  // namespace mok
