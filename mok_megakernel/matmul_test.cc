// mok_matmul: values, batch invariance, and callers that come at once or from a forked process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mok_megakernel/mok.h"

// ThreadSanitizer (where it is linked in) must not object to threads in a forked child: they are
// what is tested here.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace mok {
namespace {

std::vector<float> RandomValues(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = normal(random);
  return values;
}

struct Product {
  Product(int32_t layout, int64_t m, int64_t n, int64_t k)
      : a(RandomValues(m * k, 1)), b(RandomValues(k * n, 2)), c(static_cast<size_t>(m * n), NAN) {
    args.struct_size = sizeof(args);
    args.layout = layout;
    args.num_threads = 3;
    args.isa = -1;
    args.m = m;
    args.n = n;
    args.k = k;
    args.a = a.data();
    args.b = b.data();
    args.c = c.data();
  }

  double Expected(int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t l = 0; l < args.k; ++l) {
      const int64_t a_index = args.layout == MOK_MATMUL_TN ? l * args.m + i : i * args.k + l;
      const int64_t b_index = args.layout == MOK_MATMUL_NT ? j * args.k + l : l * args.n + j;
      sum += static_cast<double>(a[static_cast<size_t>(a_index)]) *
             static_cast<double>(b[static_cast<size_t>(b_index)]);
    }
    return sum;
  }

  MokMatmulArgs args{};
  std::vector<float> a, b, c;
};

TEST(MatmulTest, Values) {
  for (const int32_t layout : {MOK_MATMUL_NT, MOK_MATMUL_NN, MOK_MATMUL_TN}) {
    Product product(layout, 37, 19, 53);
    ASSERT_EQ(mok_matmul(&product.args), MOK_OK) << mok_last_error();
    for (int64_t i = 0; i < 37; ++i) {
      for (int64_t j = 0; j < 19; ++j) {
        ASSERT_NEAR(product.c[static_cast<size_t>(i * 19 + j)], product.Expected(i, j), 1e-4);
      }
    }
  }
}

TEST(MatmulTest, RowsDoNotDependOnTheBatchOrThreads) {
  Product large(MOK_MATMUL_NT, 700, 64, 256);
  ASSERT_EQ(mok_matmul(&large.args), MOK_OK);
  for (const int64_t rows : {1, 3, 64, 699}) {
    Product small(MOK_MATMUL_NT, 700, 64, 256);
    small.args.m = rows;
    small.args.num_threads = 1;
    ASSERT_EQ(mok_matmul(&small.args), MOK_OK);
    for (int64_t i = 0; i < rows * 64; ++i) {
      ASSERT_EQ(small.c[static_cast<size_t>(i)], large.c[static_cast<size_t>(i)]);
    }
  }
}

TEST(MatmulTest, CallersAtOnce) {
  Product expected(MOK_MATMUL_NT, 300, 64, 256);
  ASSERT_EQ(mok_matmul(&expected.args), MOK_OK);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 10; ++repeat) {
        Product product(MOK_MATMUL_NT, 300, 64, 256);
        ASSERT_EQ(mok_matmul(&product.args), MOK_OK);
        ASSERT_TRUE(product.c == expected.c);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(MatmulTest, Errors) {
  Product product(MOK_MATMUL_NT, 2, 2, 2);
  product.args.layout = 3;
  EXPECT_EQ(mok_matmul(&product.args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(), "layout: expected 0 to 2, got 3");
  product.args.layout = 0;
  product.args.m = -1;
  EXPECT_EQ(mok_matmul(&product.args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(), "m: expected 0 to 2147483647, got -1");
  product.args.m = 2;
  product.args.num_threads = -1;
  EXPECT_EQ(mok_matmul(&product.args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(), "num_threads: expected 0 to 1024, got -1");
  product.args.num_threads = 0;
  product.args.isa = MOK_NUM_ISAS;
  EXPECT_EQ(mok_matmul(&product.args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(), "isa: expected -1 to 3, got 4");
  product.args.isa = -1;
  product.args.reserved = 1;
  EXPECT_EQ(mok_matmul(&product.args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(), "MokMatmulArgs.reserved: expected 0, got 1");
  product.args.reserved = 0;
  // The number of tiles would overflow.
  product.args.m = product.args.n = int64_t{1} << 40;
  EXPECT_EQ(mok_matmul(&product.args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(), "m: expected 0 to 2147483647, got 1099511627776");
}

TEST(MatmulTest, AfterFork) {
  Product product(MOK_MATMUL_NT, 300, 64, 256);
  ASSERT_EQ(mok_matmul(&product.args), MOK_OK);  // the parent has threads now
  const pid_t child = fork();
  if (child == 0) {
    Product again(MOK_MATMUL_NT, 300, 64, 256);
    const bool same = mok_matmul(&again.args) == MOK_OK && again.c == product.c;
    _exit(same ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace mok
