#include "mok_core/emulator/tests/primitives_sm90.h"

#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"

namespace mok::testing::primitives {
namespace {

struct alignas(1024) CopyStorage {
  unsigned char image[kLoads][kBoxBytes];
  uint16_t tile[2][kStoreRows * kStoreColumns];
  uint64_t full;
};

MOK_DEVICE void IssueLoads(const CopyParams& p, CopyStorage& s) {
  const auto& c = p.coordinates;
  MbarrierArriveExpectTransaction(&s.full, kLoads * kBoxBytes);
  TensorLoad2d(s.image[0], &p.loads[0], &s.full, c[0][0], c[0][1]);
  TensorLoad3d(s.image[1], &p.loads[1], &s.full, c[1][0], c[1][1], c[1][2]);
  TensorLoad4d(s.image[2], &p.loads[2], &s.full, c[2][0], c[2][1], c[2][2], c[2][3]);
  TensorLoad5d(s.image[3], &p.loads[3], &s.full, c[3][0], c[3][1], c[3][2], c[3][3], c[3][4]);
}

MOK_KERNEL(kThreads, 1)
Copies(MOK_GRID_CONSTANT(CopyParams) p) {
  MOK_SHARED_STORAGE(CopyStorage, s);
  const int thread = static_cast<int>(ThreadIndex().x);
  if (thread == 0) {
    MbarrierInit(&s.full, 1);
    FenceMbarrierInit();
  }
  for (int i = thread; i < kStoreRows * kStoreColumns; i += kThreads) {
    s.tile[0][i] = static_cast<uint16_t>(i);
    s.tile[1][i] = static_cast<uint16_t>(0x8000 + i);
  }
  FenceProxyAsyncShared();
  SyncBlock();
  if (thread == 0) {
    IssueLoads(p, s);
    const auto& c = p.store_coordinates;
    TensorStore2d(&p.store_2d, s.tile[0], c[0][0], c[0][1]);
    TensorStore3d(&p.store_3d, s.tile[1], c[1][0], c[1][1], c[1][2]);
    BulkCommitGroup();
    BulkWaitGroup<0>();
  }
  SpinWait().ForBarrier(&s.full, 0);
  for (int load = 0; load < kLoads; ++load) {
    for (int i = thread; i < kBoxBytes; i += kThreads) {
      p.images[load * kBoxBytes + i] = s.image[load][i];
    }
  }
}

MOK_KERNEL(kThreads, 1)
Arithmetic(MOK_GRID_CONSTANT(MathParams) p) {
  const int thread = static_cast<int>(ThreadIndex().x);
  for (int i = thread; i < p.count; i += kThreads) {
    p.exponential[i] = ExponentialBase2(p.x[i]);
    p.reciprocal[i] = Reciprocal(p.x[i]);
    p.multiply_add[i] = MultiplyAdd(p.x[i], p.y[i], p.z[i]);
    p.product[i] = Multiply(p.x[i], p.y[i]);
    p.packed[i] = PackBFloat16(p.x[i], p.y[i]);
  }
  const uint32_t value = static_cast<uint32_t>(thread * thread);
  uint32_t* warp = p.warp + thread * 6;
  warp[0] = Shuffle(value, thread + 3);
  warp[1] = ShuffleXor(value, 5);
  warp[2] = ShuffleUp(value, 3);
  warp[3] = ShuffleDown(value, 7);
  warp[4] = Ballot(thread % 3 == 0);
  warp[5] = static_cast<uint32_t>(PopulationCount(value));
}

}  // namespace

TestKernel CopyKernel() {
  return {reinterpret_cast<const void*>(&Copies), kThreads, sizeof(CopyStorage)};
}

TestKernel MathKernel() { return {reinterpret_cast<const void*>(&Arithmetic), kThreads, 0}; }

}  // namespace mok::testing::primitives
