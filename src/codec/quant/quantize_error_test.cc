// Invalid input is refused, with a message that names it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "codec/quant/quantize_testing.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr float kErrorInf = std::numeric_limits<float>::infinity();
constexpr float kErrorNan = std::numeric_limits<float>::quiet_NaN();

// The message of an invalid argument; empty if there is none.
std::string refusal(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

std::string refusal_of(const MatrixView& view, const QuantSpec& spec = {}, PlaneAmax amax = {1, 1}) {
  std::vector<std::byte> memory(1 << 16);
  const PlaneMemory to{memory.data(), 256, memory.data() + (1 << 15), 256};
  return refusal([&] { quantize(view, spec, amax, {to, {}}); });
}

TEST(QuantizeErrorTest, MatricesThatCannotBe) {
  const std::vector<float> values(64);
  const auto view = [&](DType dtype, int64_t rows, int64_t columns, int64_t stride) {
    return MatrixView{values.data(), dtype, rows, columns, stride};
  };
  for (const DType dtype : all_dtypes()) {
    const bool taken = std::ranges::find(kQuantizable, dtype) != std::end(kQuantizable);
    const std::string message = refusal_of(view(dtype, 4, 4, 4));
    if (taken)
      EXPECT_EQ(message, "") << to_string(dtype);
    else
      EXPECT_THAT(message, HasSubstr(std::string(to_string(dtype))));
    EXPECT_EQ(refusal([&] { compute_amax({{view(dtype, 4, 4, 4)}}); }).empty(), taken);
  }
  EXPECT_THAT(refusal_of(view(DType::kF32, -3, 4, 4)), HasSubstr("-3"));
  EXPECT_THAT(refusal_of(view(DType::kF32, 4, -5, 4)), HasSubstr("-5"));
  EXPECT_THAT(refusal_of(view(DType::kF32, 2, 8, 7)), AllOf(HasSubstr("8"), HasSubstr("7")));
  EXPECT_THAT(refusal_of({nullptr, DType::kF32, 2, 8, 8}), HasSubstr("2 x 8"));
  EXPECT_THAT(refusal([&] { plane_shape({}, Plane::kRow, -1, 4); }), HasSubstr("-1"));
  EXPECT_THAT(refusal([&] { compute_amax({{view(DType::kF32, 2, 8, 3)}}); }), HasSubstr("3"));
}

TEST(QuantizeErrorTest, PlanesThatOverlapOrLack) {
  const TestMatrix m = random_matrix(DType::kF32, 34, 32, 61);
  std::vector<std::byte> memory(2048);
  const auto message = [&](PlaneMemory row) { return refusal([&] { quantize(m.view(), {}, {}, {row, {}}); }); };
  EXPECT_THAT(message({memory.data(), 31, memory.data(), 1}), AllOf(HasSubstr("row plane"), HasSubstr("31")));
  EXPECT_THAT(message({memory.data(), 32, memory.data(), 0}), AllOf(HasSubstr("scales"), HasSubstr("0")));
  EXPECT_THAT(message({memory.data(), 32, nullptr, 1}), HasSubstr("scales"));
  EXPECT_THAT(refusal([&] { quantize(m.view(), {}, {}, {{}, {memory.data(), 32, memory.data(), 16}}); }),
              AllOf(HasSubstr("column plane"), HasSubstr("16")));
}

TEST(QuantizeErrorTest, AnOddNumberOfCodesInARowOfPairs) {
  const QuantSpec spec = nvfp4_spec(NvScaling::k16x16);
  EXPECT_THAT(refusal([&] { plane_shape(spec, Plane::kRow, 4, 33); }), AllOf(HasSubstr("33"), HasSubstr("row plane")));
  EXPECT_THAT(refusal([&] { plane_shape(spec, Plane::kColumn, 7, 32); }),
              AllOf(HasSubstr("7"), HasSubstr("column plane")));
  const TestMatrix m = random_matrix(DType::kF32, 4, 33, 62);
  EXPECT_THAT(refusal_of(m.view(), spec), HasSubstr("33"));
}

TEST(QuantizeErrorTest, ATransformOfOtherTypesOrPartsOfGroups) {
  QuantSpec spec = nvfp4_spec(NvScaling::k1x16);
  spec.hadamard = true;
  const auto message = [&](const TestMatrix& m) {
    std::vector<std::byte> memory(4096);
    return refusal([&] { quantize(m.view(), spec, {1, 1}, {{}, {memory.data(), 64, memory.data() + 2048, 8}}); });
  };
  const TestMatrix f32 = random_matrix(DType::kF32, 16, 16, 63);
  const TestMatrix rows = random_matrix(DType::kBF16, 24, 16, 63);
  EXPECT_THAT(message(f32), HasSubstr("f32"));
  EXPECT_THAT(message(rows), HasSubstr("24"));
  EXPECT_THAT(refusal([&] { compute_hadamard_amax(f32.view()); }), HasSubstr("f32"));
  EXPECT_THAT(refusal([&] { compute_hadamard_amax(rows.view()); }), HasSubstr("24"));
  EXPECT_THAT(refusal([&] { plane_shape(spec, Plane::kColumn, 24, 16); }), HasSubstr("24"));
  // The row plane is not transformed.
  EXPECT_EQ(refusal_of(f32.view(), spec), "");
  // The transformed plane does not hold the matrix, either.
  std::vector<float> back(256);
  EXPECT_THAT(refusal([&] { dequantize(spec, Plane::kColumn, {}, 1, {back.data(), DType::kF32, 16, 16, 16}); }),
              HasSubstr("Hadamard"));
}

struct SpecCase {
  std::string name;
  std::function<void(QuantSpec&)> set;
  std::vector<Format> formats;  // those that take it
};

TEST(QuantizeErrorTest, MembersThatDoNotGoWithTheFormat) {
  const std::vector<Format> fp8{Format::kFp8E4M3, Format::kFp8E5M2, Format::kFp8Block1x128, Format::kFp8Block128x128};
  const SpecCase cases[] = {
      {"hadamard", [](QuantSpec& s) { s.hadamard = true; }, {Format::kNvfp4}},
      {"stochastic", [](QuantSpec& s) { s.rounding = Rounding::kStochastic; }, {Format::kNvfp4}},
      {"eps", [](QuantSpec& s) { s.eps = 1; }, fp8},
      {"power_of_two", [](QuantSpec& s) { s.power_of_two = false; }, fp8},
      {"margin", [](QuantSpec& s) { s.margin = 1; }, {Format::kFp8E4M3, Format::kFp8E5M2}},
  };
  for (const SpecCase& c : cases) {
    for (const Format format : all_formats()) {
      QuantSpec spec = spec_of(format);
      c.set(spec);
      const std::string message = refusal([&] { check_spec(spec); });
      if (std::ranges::find(c.formats, format) != c.formats.end())
        EXPECT_EQ(message, "") << c.name;
      else
        EXPECT_THAT(message, AllOf(HasSubstr(c.name), HasSubstr(std::string(to_string(format)))));
    }
  }
  QuantSpec spec = spec_of(Format::kFp8E4M3);
  for (const float eps : {-1.0F, kErrorNan, kErrorInf}) {
    spec.eps = eps;
    EXPECT_THAT(refusal([&] { check_spec(spec); }), HasSubstr("eps")) << eps;
  }
  spec.eps = 0;
  for (const int margin : {65, -65, 1000}) {
    spec.margin = margin;
    EXPECT_THAT(refusal([&] { check_spec(spec); }), HasSubstr(std::to_string(margin)));
  }
  for (const int margin : {64, -64}) {
    spec.margin = margin;
    EXPECT_EQ(refusal([&] { check_spec(spec); }), "");
  }
}

TEST(QuantizeErrorTest, AmaxesThatCannotBe) {
  const TestMatrix m = random_matrix(DType::kF32, 4, 32, 64);
  for (const QuantSpec& spec : every_spec()) {
    const bool needed = needs_amax(spec.format);
    EXPECT_EQ(refusal_of(m.view(), spec, {0, 0}), "") << describe(spec);
    for (const auto& [amax, name] : {std::pair{-2.5F, "-2.5"}, std::pair{kErrorNan, "nan"}}) {
      for (const bool propagate : {false, true}) {
        const std::string message = refusal_of(m.view(), propagate ? propagating(spec) : spec, {amax, 1});
        EXPECT_THAT(message, needed ? HasSubstr(name) : HasSubstr("")) << describe(spec);
        EXPECT_EQ(message.empty(), !needed) << describe(spec);
      }
    }
    EXPECT_EQ(refusal_of(m.view(), spec, {kErrorInf, 1}).empty(), !needed) << describe(spec);
    EXPECT_EQ(refusal_of(m.view(), propagating(spec), {kErrorInf, 1}), "") << describe(spec);
    // A plane that is not requested is not checked.
    EXPECT_EQ(refusal_of(m.view(), spec, {1, kErrorNan}), "") << describe(spec);
  }
}

TEST(QuantizeErrorTest, AmaxesOutsideNvfp4sRange) {
  const TestMatrix m = random_matrix(DType::kF32, 4, 32, 65);
  for (const QuantSpec& spec : every_spec()) {
    const bool nv = spec.format == Format::kNvfp4;
    for (const float amax : {7.8e-36F, 1e-38F, 7.6e35F, std::numeric_limits<float>::max()}) {
      const std::string message = refusal_of(m.view(), spec, {amax, 1});
      EXPECT_EQ(message.empty(), !nv) << describe(spec) << ", " << amax;
      if (nv) {
        EXPECT_THAT(message, AllOf(HasSubstr("7.9e-36"), HasSubstr("propagate")));
      }
      EXPECT_EQ(refusal_of(m.view(), propagating(spec), {amax, 1}), "") << describe(spec) << ", " << amax;
    }
    for (const float amax : {7.9e-36F, 7.5e35F, 0.0F})
      EXPECT_EQ(refusal_of(m.view(), spec, {amax, 1}), "") << describe(spec) << ", " << amax;
  }
}

class NonfiniteErrorTest : public EveryKernelTest {};

TEST_P(NonfiniteErrorTest, NamesHowManyThereAreAndWhereTheFirstIs) {
  for (const DType dtype : kQuantizable) {
    for (const float x : {kErrorNan, kErrorInf, -kErrorInf}) {
      TestMatrix m = random_matrix(dtype, 130, 262, 66, {2, 0});
      m.set(129, 261, x);
      m.set(77, 255, x);
      m.set(77, 256, x);
      for (const QuantSpec& spec : every_spec()) {
        for (const Plane plane : kPlanes) {
          SCOPED_TRACE(describe(spec, plane, dtype, 130, 262));
          EXPECT_THAT(refusal([&] { quantized(m.view(), spec, plane, 2); }),
                      AllOf(HasSubstr("3 of 34060"), HasSubstr("[77, 255]")));
          EXPECT_EQ(refusal([&] { quantized(m.view(), propagating(spec), plane, 2); }), "");
        }
      }
    }
  }
}

TEST_P(NonfiniteErrorTest, FindsTheOnlyOneAnywhere) {
  for (const QuantSpec& spec : every_spec()) {
    for (const int64_t at : {0, 15, 16, 31, 32, 40, 127, 128, 131}) {
      TestMatrix m = random_matrix(DType::kF32, 6, 132, 67);
      m.set(at % 6, at, kErrorNan);
      for (const Plane plane : kPlanes) {
        EXPECT_THAT(
            refusal([&] { quantized(m.view(), spec, plane, 2); }),
            AllOf(HasSubstr("1 of 792"), HasSubstr("[" + std::to_string(at % 6) + ", " + std::to_string(at) + "]")))
            << describe(spec);
      }
    }
  }
}

// Sums of the transform may overflow although no element did.
TEST_P(NonfiniteErrorTest, ATransformThatOverflowsIsRefusedAsSuch) {
  TestMatrix m(DType::kBF16, 16, 2);
  m.fill(3e38F);
  constexpr int kSigns[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  for (int64_t i = 0; i < 16; ++i) m.set(i, 1, static_cast<float>(kSigns[i]) * 3e38F);
  QuantSpec spec = nvfp4_spec(NvScaling::k1x16);
  spec.hadamard = true;
  const Amax amax = compute_hadamard_amax(m.view());
  EXPECT_EQ(amax.value, kErrorInf);
  EXPECT_EQ(amax.nonfinite, 0) << "of the matrix itself";
  EXPECT_THAT(refusal([&] { quantized(m.view(), spec, Plane::kColumn, amax.value); }), HasSubstr("amax is infinite"));
  EXPECT_THAT(refusal([&] { quantized(m.view(), spec, Plane::kColumn, 2); }),
              AllOf(HasSubstr("Hadamard"), testing::Not(HasSubstr("-1"))));
}

INSTANTIATE_TEST_SUITE_P(Kernels, NonfiniteErrorTest, every_kernel(), kernel_name);

TEST(QuantizeErrorTest, TransposesOfPlanesThatAreNoTransposes) {
  QuantSpec stochastic = nvfp4_spec(NvScaling::k16x16);
  stochastic.rounding = Rounding::kStochastic;
  for (const QuantSpec& spec :
       {nvfp4_spec(NvScaling::k1x16), stochastic, spec_of(Format::kMxfp8), spec_of(Format::kFp8Block1x128)}) {
    EXPECT_THAT(refusal([&] { transpose_plane(spec, 16, 16, {}, {}); }),
                HasSubstr(std::string(to_string(spec.format))));
  }
  EXPECT_THAT(refusal([&] { transpose_plane(nvfp4_spec(NvScaling::k16x16), 15, 16, {}, {}); }), HasSubstr("15"));
}

TEST(QuantizeErrorTest, OutputsOfOtherTypes) {
  std::vector<double> memory(64);
  EXPECT_THAT(refusal([&] { dequantize({}, Plane::kRow, {}, 1, {memory.data(), DType::kF64, 2, 2, 2}); }),
              HasSubstr("f64"));
  EXPECT_THAT(refusal([&] { dequantize({}, Plane::kRow, {}, 1, {memory.data(), DType::kF32, 2, 5, 4}); }),
              AllOf(HasSubstr("5"), HasSubstr("4")));
}

TEST(QuantizeErrorTest, ANegativeNumberOfThreads) {
  const TestMatrix m = random_matrix(DType::kF32, 4, 32, 68);
  EXPECT_THAT(refusal([&] { quantized(m.view(), {}, Plane::kRow, 1, {-2}); }), HasSubstr("-2"));
  EXPECT_THAT(refusal([&] { compute_amax({{m.view()}}, {-2}); }), HasSubstr("-2"));
}

TEST(FormatTest, NamesGoBothWays) {
  for (const Format format : all_formats()) {
    std::string name(to_string(format));
    EXPECT_EQ(parse_format(name), format);
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    EXPECT_EQ(parse_format(name), format) << "in any case";
  }
  EXPECT_EQ(all_formats().size(), 7U);
  EXPECT_THAT(refusal([] { parse_format("fp6"); }),
              AllOf(HasSubstr("fp6"), HasSubstr("nvfp4"), HasSubstr("fp8_block_128x128")));
}

}  // namespace
}  // namespace tessera
