// fp32 product with a fixed order of summation: each element of c is one chain of fused
// multiply-adds over k ascending, by one thread. So its bits depend on nothing but its row of a and
// its column of b, which is what the router needs: neither the number of tokens nor a token's place
// among them may decide an expert. Tensor cores cannot give fp32 products, and libraries choose
// kernels (and splits of k) by the shape.
#include "mok_core/device/device.h"
#include "mok_megakernel/cuda/matmul.h"

namespace mok {
namespace {

constexpr int kStep = 16;                   // of k, per stage
constexpr int kPad = 4;                     // keeps columns of a stage out of one bank
constexpr int kPitch = kMatmulTile + kPad;  // floats
constexpr int kSide = kMatmulTile / 16;     // elements of c per thread and dimension
constexpr int kLoads =
    kMatmulTile * kStep / kMatmulThreads;  // of a, and of b, per thread and stage

struct MatmulStorage {
  // Two stages: one is read while the other is filled.
  float a[2][kStep][kPitch];
  float b[2][kStep][kPitch];
};

// One operand's elements of a stage: [kMatmulTile] along the rows of a or the columns of b, by
// [kStep] along k.
class StageLoader {
 public:
  MOK_DEVICE StageLoader(const float* base, int64_t first, int64_t count, int64_t stride,
                         int64_t k_stride)
      : base_(base), stride_(stride), k_stride_(k_stride) {
    // Neighbouring threads load neighbouring addresses, whichever dimension is contiguous.
    const int thread = static_cast<int>(ThreadIndex().x);
    const bool along_k = k_stride == 1;
    MOK_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int index = thread + i * kMatmulThreads;
      line_[i] = along_k ? index / kStep : index % kMatmulTile;
      k_[i] = along_k ? index % kStep : index / kMatmulTile;
      valid_[i] = first + line_[i] < count;
    }
    first_ = first;
  }

  // Elements outside the matrix are zeros: they add exact zeros.
  MOK_DEVICE void Load(int64_t k_begin, int64_t k_end) {
    MOK_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int64_t k = k_begin + k_[i];
      const bool inside = valid_[i] && k < k_end;
      values_[i] = inside ? base_[(first_ + line_[i]) * stride_ + k * k_stride_] : 0.0f;
    }
  }

  MOK_DEVICE void Store(float (&stage)[kStep][kPitch]) const {
    MOK_UNROLL
    for (int i = 0; i < kLoads; ++i) stage[k_[i]][line_[i]] = values_[i];
  }

 private:
  const float* base_;
  int64_t stride_, k_stride_, first_;
  int line_[kLoads], k_[kLoads];
  bool valid_[kLoads];
  float values_[kLoads];
};

MOK_DEVICE void MultiplyStage(const MatmulStorage& s, int stage, int row, int column,
                              float (&sum)[kSide][kSide]) {
  MOK_UNROLL
  for (int k = 0; k < kStep; ++k) {
    float a[kSide], b[kSide];
    MOK_UNROLL
    for (int i = 0; i < kSide; ++i) a[i] = s.a[stage][k][row + i];
    MOK_UNROLL
    for (int j = 0; j < kSide; ++j) b[j] = s.b[stage][k][column + j];
    MOK_UNROLL
    for (int i = 0; i < kSide; ++i) {
      MOK_UNROLL
      for (int j = 0; j < kSide; ++j) sum[i][j] = MultiplyAdd(a[i], b[j], sum[i][j]);
    }
  }
}

MOK_KERNEL(kMatmulThreads, 2)
MatmulKernel(MOK_GRID_CONSTANT(MatmulParams) p) {
  MOK_SHARED_STORAGE(MatmulStorage, s);
  const int64_t first_row = int64_t{BlockIndex().y} * kMatmulTile;
  const int64_t first_column = int64_t{BlockIndex().x} * kMatmulTile;
  StageLoader a(p.a, first_row, p.m, p.a_row, p.a_column);
  StageLoader b(p.b, first_column, p.n, p.b_column, p.b_row);
  const int thread = static_cast<int>(ThreadIndex().x);
  const int row = thread / 16 * kSide, column = thread % 16 * kSide;
  float sum[kSide][kSide] = {};
  a.Load(0, p.k);
  b.Load(0, p.k);
  int stage = 0;
  for (int64_t k = 0; k < p.k; k += kStep, stage ^= 1) {
    a.Store(s.a[stage]);
    b.Store(s.b[stage]);
    // Also keeps a thread from filling this stage again while another still reads it: to come here
    // for the next but one, all have to pass the barrier in between.
    SyncBlock();
    a.Load(k + kStep, p.k);
    b.Load(k + kStep, p.k);
    MultiplyStage(s, stage, row, column, sum);
  }
  for (int i = 0; i < kSide && first_row + row + i < p.m; ++i) {
    for (int j = 0; j < kSide && first_column + column + j < p.n; ++j) {
      p.c[(first_row + row + i) * p.n + first_column + column + j] = sum[i][j];
    }
  }
}

}  // namespace

const void* MatmulKernelAddress() { return reinterpret_cast<const void*>(&MatmulKernel); }

int64_t MatmulSharedBytes() { return sizeof(MatmulStorage); }

}  // namespace mok
