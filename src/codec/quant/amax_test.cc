#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <limits>
#include <random>

#include "codec/quant/quantize_testing.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr float kAmaxInf = std::numeric_limits<float>::infinity();
constexpr float kAmaxNan = std::numeric_limits<float>::quiet_NaN();

Amax naive_amax(const TestMatrix& m) {
  Amax amax;
  for (int64_t r = 0; r < m.rows(); ++r) {
    for (int64_t c = 0; c < m.columns(); ++c) {
      const float x = m.get(r, c);
      if (std::fabs(x) > amax.value) amax.value = std::fabs(x);
      if (std::isfinite(x)) continue;
      if (amax.nonfinite++ == 0) amax.first_nonfinite = r * m.columns() + c;
    }
  }
  return amax;
}

Amax amax_of(const TestMatrix& m, Parallel parallel = {}) {
  return compute_amax({{m.view()}}, parallel)[0];
}

class AmaxTest : public EveryKernelTest {};

TEST_P(AmaxTest, OfEveryLengthAtAnyAddress) {
  for (const DType dtype : kQuantizable) {
    for (int64_t columns = 0; columns < 300; ++columns) {
      for (const int64_t rows : {1, 3}) {
        TestMatrix m = random_matrix(dtype, rows, columns, static_cast<uint32_t>(columns),
                                     {columns % 5, static_cast<size_t>(columns % 13)});
        EXPECT_EQ(amax_of(m), naive_amax(m)) << to_string(dtype) << ", " << columns;
        EXPECT_TRUE(m.intact());
        if (columns == 0) continue;
        m.set(rows - 1, columns - 1, -100);  // the last element counts
        EXPECT_EQ(amax_of(m).value, 100);
        m.set(0, columns / 2, kAmaxNan);
        EXPECT_EQ(amax_of(m), naive_amax(m)) << to_string(dtype) << ", " << columns;
      }
    }
  }
}

TEST_P(AmaxTest, EveryValueOf16BitsAlone) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    TestMatrix m(dtype, 1, 1);
    for (uint32_t code = 0; code < 65536; ++code) {
      m.set_bits(0, 0, code);
      ASSERT_EQ(amax_of(m), naive_amax(m)) << to_string(dtype) << " " << code;
    }
  }
}

TEST_P(AmaxTest, OfSpecialValues) {
  struct Case {
    std::vector<float> values;
    Amax amax;
  };
  const Case cases[] = {
      {{}, {0, 0, -1}},
      {{-0.0F, 0}, {0, 0, -1}},
      {{FLT_TRUE_MIN, 0}, {FLT_TRUE_MIN, 0, -1}},
      {{1, -FLT_MAX, 2}, {FLT_MAX, 0, -1}},
      {{1, -3, kAmaxNan}, {3, 1, 2}},
      {{kAmaxNan, -kAmaxNan, kAmaxNan}, {0, 3, 0}},
      {{1, -kAmaxInf, kAmaxNan, 2}, {kAmaxInf, 2, 1}},
  };
  for (const auto& [values, amax] : cases) {
    TestMatrix m(DType::kF32, 1, static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size(); ++i) m.set(0, static_cast<int64_t>(i), values[i]);
    const Amax got = amax_of(m);
    EXPECT_EQ(got, amax);
    EXPECT_FALSE(std::signbit(got.value));
  }
}

TEST_P(AmaxTest, CountsWhatIsNotFiniteAndFindsTheFirst) {
  std::mt19937 random(51);
  for (const DType dtype : kQuantizable) {
    for (int i = 0; i < 40; ++i) {
      TestMatrix m = random_matrix(dtype, 37, 61, static_cast<uint32_t>(i), {3, 2});
      for (int n = 0; n < i; ++n)
        m.set(static_cast<int64_t>(random() % 37), static_cast<int64_t>(random() % 61),
              n % 3 == 0   ? kAmaxInf
              : n % 3 == 1 ? -kAmaxInf
                           : kAmaxNan);
      EXPECT_EQ(amax_of(m), naive_amax(m)) << to_string(dtype) << ", " << i;
    }
  }
}

TEST_P(AmaxTest, AListInOneCallIsEachAlone) {
  std::vector<TestMatrix> matrices;
  for (uint32_t i = 0; i < 60; ++i)
    matrices.push_back(random_matrix(kQuantizable[i % 3], i % 7 * 5, i * 11 % 97, i, {i % 4, i % 5}));
  matrices[20].set(0, 3, kAmaxNan);
  matrices[41].set(2, 1, -kAmaxInf);
  std::vector<MatrixView> views;
  for (const TestMatrix& m : matrices) views.push_back(m.view());
  for (const int threads : {1, 3}) {
    const std::vector<Amax> got = compute_amax(views, {threads});
    ASSERT_EQ(got.size(), matrices.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i], naive_amax(matrices[i])) << i;
      EXPECT_EQ(got[i], amax_of(matrices[i])) << i;
    }
  }
  EXPECT_TRUE(compute_amax({}).empty());
}

// A large tensor is cut into pieces of rows: the last may be short, and the first non-finite value may be in any of
// them.
TEST_P(AmaxTest, LargeTensorsByAnyNumberOfThreads) {
  TestMatrix m = random_matrix(DType::kF32, 1031, 700, 52, {1, 0});
  const TestMatrix small = random_matrix(DType::kBF16, 3, 70, 53);
  m.set(1030, 699, -1000);
  const Amax plain{1000, 0, -1};
  EXPECT_EQ(amax_of(m), plain);
  for (const int threads : {2, 3, 0}) EXPECT_EQ(amax_of(m, {threads}), plain);
  m.set(1029, 1, kAmaxNan);
  m.set(400, 699, kAmaxNan);
  m.set(401, 0, kAmaxInf);
  const Amax broken{kAmaxInf, 3, 400 * 700 + 699};
  for (const int threads : {1, 2, 3, 0}) {
    EXPECT_EQ(amax_of(m, {threads}), broken) << threads;
    EXPECT_THAT(compute_amax({{small.view(), m.view(), small.view()}}, {threads}),
                testing::ElementsAre(naive_amax(small), broken, naive_amax(small)));
  }
}

TEST_P(AmaxTest, WhileTheNoOpFlagIsUpNothingIsReadOrWritten) {
  const MatrixView unreadable{reinterpret_cast<const void*>(16), DType::kF32, 64, 64, 64};
  const Amax before{17, 2, 3};
  Amax out[1] = {before};
  const float up = -2;
  compute_amax({&unreadable, 1}, out, {}, &up);
  EXPECT_EQ(out[0], before);
  const TestMatrix m = random_matrix(DType::kF32, 4, 4, 54);
  const MatrixView view = m.view();
  const float down = 0;
  compute_amax({&view, 1}, out, {}, &down);
  EXPECT_EQ(out[0], naive_amax(m)) << "what stood there before does not count";
}

INSTANTIATE_TEST_SUITE_P(Kernels, AmaxTest, every_kernel(), kernel_name);

// Delayed scaling -----------------------------------------------------------------------------------------------------

TEST(AmaxHistoryTest, StartsWithoutValues) {
  const AmaxHistory history;
  EXPECT_EQ(history.length(), 1024U);
  EXPECT_EQ(history.algorithm(), AmaxHistory::Algorithm::kMax);
  EXPECT_EQ(history.margin(), 0);
  EXPECT_TRUE(history.values().empty());
  EXPECT_EQ(history.amax(), 0);
}

TEST(AmaxHistoryTest, GivesTheLargestOrTheNewestOfTheLastValues) {
  for (const size_t length : {1, 2, 3, 7}) {
    AmaxHistory largest(length);
    AmaxHistory newest(length, AmaxHistory::Algorithm::kMostRecent, 3);
    EXPECT_EQ(newest.margin(), 3);
    std::vector<float> all;
    for (const float amax : {5.0F, 1.0F, 0.0F, 7.0F, 2.0F, 2.5F, kAmaxInf, 1.0F, 3.0F, 0.5F, 4.0F, 0.25F, 6.0F, 1.0F}) {
      all.insert(all.begin(), amax);
      if (all.size() > length) all.resize(length);
      largest.push(amax);
      newest.push(amax);
      EXPECT_EQ(largest.values(), all);
      EXPECT_EQ(newest.values(), all);
      EXPECT_EQ(largest.amax(), *std::ranges::max_element(all));
      EXPECT_EQ(newest.amax(), amax);
    }
  }
}

// A step's scale comes from earlier steps: larger values saturate.
TEST(AmaxHistoryTest, ScalesTheNextStep) {
  AmaxHistory history(4, AmaxHistory::Algorithm::kMax, 1);
  QuantSpec spec = spec_of(Format::kFp8E4M3);
  spec.margin = history.margin();
  history.push(14);
  TestMatrix m(DType::kBF16, 1, 3);
  m.set(0, 0, 14);
  m.set(0, 1, 28);
  m.set(0, 2, -56);
  const OraclePlane got = quantized(m.view(), spec, Plane::kRow, history.amax());
  const double decoded[] = {224, 448, -448};  // scaled by 448 / 2 / 14 = 16
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(e4m3_oracle().decode(static_cast<uint32_t>(got.codes[i])), decoded[i]);
}

TEST(AmaxHistoryTest, RefusesWhatIsNoMagnitudeLengthOrMargin) {
  const auto message = [](const auto& run) -> std::string {
    try {
      run();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  AmaxHistory history(2);
  history.push(3);
  EXPECT_THAT(message([&] { history.push(-1.5F); }), testing::HasSubstr("-1.5"));
  EXPECT_THAT(message([&] { history.push(kAmaxNan); }), testing::HasSubstr("nan"));
  EXPECT_EQ(history.values(), std::vector<float>{3});
  EXPECT_THAT(message([] { AmaxHistory(0); }), testing::HasSubstr("0"));
  EXPECT_THAT(message([] { AmaxHistory(4, AmaxHistory::Algorithm::kMax, 65); }), testing::HasSubstr("65"));
  EXPECT_THAT(message([] { AmaxHistory(4, AmaxHistory::Algorithm::kMax, -65); }), testing::HasSubstr("-65"));
}

}  // namespace
}  // namespace tessera
