#include "mok_gemm/host/token_reduce.h"

#include "mok_gemm/host/kernels.h"

namespace mok {

void TokenReduce(Isa isa, const TokenReduceTile& tile) {
  KernelsOf(isa, tile.dtype).token_reduce(tile);
}

}  // namespace mok
