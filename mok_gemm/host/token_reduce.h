// TokenReduce: the sum over a token's routes that ends each pass.
#pragma once

#include "mok_gemm/host/isa.h"
#include "mok_gemm/host/tiles.h"

namespace mok {

// Thread-safe. `isa` must be supported. With -1 for every route and no shared term out is zero.
// The bits of an element depend on its token's data and the ISA only (products are fused except on
// kPortable).
void TokenReduce(Isa isa, const TokenReduceTile& tile);

}  // namespace mok
