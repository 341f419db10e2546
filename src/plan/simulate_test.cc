#include "tessera/simulate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "tessera/error.h"

namespace tessera {
namespace {

template <typename T>
std::vector<std::byte> bytes_of_values(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <typename T>
std::vector<T> values_of(const std::vector<std::byte>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The result on rank 9 for one element, given a value for each term, rank 0's first.
template <typename T>
T reduced(DType dtype, const char* op, const std::vector<T>& terms) {
  const Layout src = Layout::parse(std::to_string(terms.size()) + ":P" + op);
  const Plan plan = redistribute({{1}, dtype}, src, Layout::parse("1@9:R"));
  LocalArrays sources;
  for (size_t i = 0; i < terms.size(); ++i) sources[static_cast<Rank>(i)] = bytes_of_values<T>({terms[i]});
  return values_of<T>(simulate(plan, sources).at(9))[0];
}

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(Simulate, SumsFollowAscendingRanksInF32) {
  EXPECT_EQ(reduced<float>(DType::kF32, "sum", {1e8F, 1, -1e8F, 1}), 1);  // 2 or 0 in another order
  EXPECT_EQ(reduced<double>(DType::kF64, "sum", {1e8, 1, -1e8, 1}), 2);
}

TEST(Simulate, Bf16SumsAreRoundedOnceAtTheEnd) {
  // 1 + 2^-8 four times: a sum rounded to bf16 after every step would stay at 1.
  EXPECT_EQ(reduced<uint16_t>(DType::kBF16, "sum", {0x3F80, 0x3B80, 0x3B80, 0x3B80}), 0x3F82);  // 1 + 3 * 2^-8
  EXPECT_EQ(reduced<uint16_t>(DType::kF16, "sum", {0x6800, 0x3C00, 0x3C00}), 0x6801);  // 2048 + 1 + 1, f32 inside
}

TEST(Simulate, AverageDividesLast) {
  const float big = std::numeric_limits<float>::max();
  EXPECT_EQ(reduced<float>(DType::kF32, "avg", {1, 2, 6}), 3);
  EXPECT_TRUE(std::isinf(reduced<float>(DType::kF32, "avg", {big, big})));
}

TEST(Simulate, MinAndMaxPropagateNaNAndOrderZeros) {
  EXPECT_TRUE(std::isnan(reduced<float>(DType::kF32, "min", {kNaN, 1})));
  EXPECT_TRUE(std::isnan(reduced<float>(DType::kF32, "max", {1, kNaN})));
  EXPECT_TRUE(std::signbit(reduced<float>(DType::kF32, "min", {0.0F, -0.0F})));
  EXPECT_FALSE(std::signbit(reduced<float>(DType::kF32, "max", {-0.0F, 0.0F})));
}

TEST(Simulate, IntegersWrap) {
  EXPECT_EQ(reduced<int8_t>(DType::kI8, "sum", {127, 1}), -128);
  EXPECT_EQ(reduced<int64_t>(DType::kI64, "product", {INT64_MAX, 2}), -2);
  EXPECT_EQ(reduced<uint16_t>(DType::kU16, "product", {65535, 65535}), 1);
  EXPECT_EQ(reduced<uint32_t>(DType::kU32, "min", {0xFFFFFFFF, 5}), 5U);
  EXPECT_EQ(reduced<int32_t>(DType::kI32, "min", {-1, 5}), -1);
}

TEST(Simulate, ComplexProductsMultiplyAsPairs) {
  const uint64_t i = 0x3F80000000000000;  // 0 + 1i, little-endian pairs of f32
  EXPECT_EQ(reduced<uint64_t>(DType::kC64, "product", {i, i}), 0x00000000BF800000U);  // -1 + 0i
}

TEST(Simulate, HundredsOfRanksReceiveWhatTheirLayoutSays) {
  const Shape shape{96, 40};
  const Plan plan = redistribute({shape, DType::kI32}, Layout::parse("dp=3,fsdp=64@0-191:R,S0"),
                                 Layout::parse("a=8,b=20@192-351:S0*3,S1"));
  LocalArrays sources;
  std::vector<int32_t> whole(96 * 40);
  std::iota(whole.begin(), whole.end(), 0);
  for (const Rank rank : plan.src.mesh().ranks()) {
    const Region owned = plan.src.owned(shape, rank);
    std::vector<int32_t> mine;
    for (const Interval rows : owned.dim(0).intervals())
      mine.insert(mine.end(), whole.begin() + rows.begin * 40, whole.begin() + rows.end * 40);
    sources[rank] = bytes_of_values(mine);
  }
  const LocalArrays arrived = simulate(plan, sources);
  EXPECT_EQ(arrived.size(), 160U);
  // Rank (1, 2): rows 4-7 of each 32, columns 4 and 5.
  std::vector<int32_t> expected;
  for (const int32_t third : {0, 32, 64})
    for (int32_t row = 4; row < 8; ++row)
      for (int32_t column = 4; column < 6; ++column) expected.push_back((third + row) * 40 + column);
  EXPECT_EQ(values_of<int32_t>(arrived.at(192 + 22)), expected);
}

TEST(Simulate, RefusesArraysThatDoNotFit) {
  const Plan plan = redistribute({{4}, DType::kF32}, Layout::parse("2:S0"), Layout::parse("1@2:R"));
  EXPECT_THROW(simulate(plan, {{0, std::vector<std::byte>(8)}}), Error);
  EXPECT_THROW(simulate(plan, {{0, std::vector<std::byte>(8)}, {1, std::vector<std::byte>(4)}}), Error);
}

TEST(Simulate, NoticesAPlanThatWritesTooLittle) {
  Plan plan = redistribute({{4}, DType::kF32}, Layout::parse("2:S0"), Layout::parse("1@2:R"));
  plan.routes.pop_back();
  try {
    simulate(plan, {{0, std::vector<std::byte>(8)}, {1, std::vector<std::byte>(8)}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
  }
}

}  // namespace
}  // namespace tessera
