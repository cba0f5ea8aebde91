#include "mok_gemm/host/isa.h"

#include <gtest/gtest.h>

#include <vector>

#include "mok_gemm/host/kernels.h"
#include "mok_gemm/host/tile_worker.h"

namespace mok {
namespace {

TEST(IsaTest, NamesRoundTrip) {
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    const StatusOr<Isa> parsed = ParseIsa(IsaName(isa));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, isa);
  }
}

TEST(IsaTest, UnknownNameIsAnErrorThatListsTheValidOnes) {
  const StatusOr<Isa> parsed = ParseIsa("sse9");
  ASSERT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(parsed.status().message(),
            "ISA: expected one of portable, avx2, avx512, avx512_bf16; got \"sse9\"");
}

TEST(IsaTest, PortableIsAlwaysThereAndBestIsTheLast) {
  const std::vector<Isa> isas = SupportedIsas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.front(), Isa::kPortable);
  EXPECT_EQ(BestIsa(), isas.back());
  for (const Isa isa : isas) EXPECT_TRUE(IsaSupported(isa));
}

TEST(IsaTest, EveryTableDescribesItself) {
  for (const Isa isa : SupportedIsas()) {
    for (const DType dtype : {DType::kBf16, DType::kFp32}) {
      const KernelTable& kernels = KernelsOf(isa, dtype);
      EXPECT_EQ(kernels.dtype, dtype);
      EXPECT_EQ(kernels.panel_columns, 2 * kernels.lanes);
      const bool pairs = isa == Isa::kAvx512Bf16 && dtype == DType::kBf16;
      EXPECT_EQ(kernels.elements_per_unit, pairs ? 2 : 1);
      EXPECT_EQ(kernels.rows_are_units, pairs || dtype == DType::kFp32);
    }
  }
}

TEST(IsaTest, AWorkerKnowsWhatItWasMadeFor) {
  TileWorker worker(Isa::kPortable, DType::kFp32);
  EXPECT_EQ(worker.isa(), Isa::kPortable);
  EXPECT_EQ(worker.dtype(), DType::kFp32);
  EXPECT_DEATH(TileWorker(Isa::kPortable, DType::kE4m3), "dtype e4m3");
}

}  // namespace
}  // namespace mok
