#include "tessera/dtype.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tessera/error.h"

namespace tessera {
namespace {

TEST(DTypeTest, EveryNameLeadsBackToItsType) {
  EXPECT_EQ(all_dtypes().size(), 18U);
  for (const DType dtype : all_dtypes()) {
    std::string upper(to_string(dtype));
    std::ranges::transform(upper, upper.begin(), [](char c) { return static_cast<char>(std::toupper(c)); });
    EXPECT_EQ(dtype_of(to_string(dtype)), dtype) << upper;
    EXPECT_EQ(parse_dtype(upper), dtype) << "safetensors' own spelling";
  }
}

TEST(DTypeTest, AnUnknownNameIsAnErrorThatListsTheKnownOnes) {
  EXPECT_FALSE(dtype_of("float32")) << "a file has no other names than safetensors' own";
  EXPECT_FALSE(dtype_of(""));
  EXPECT_FALSE(dtype_of("f3"));
  try {
    parse_dtype("float33");
    FAIL() << "float33 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("dtype 'float33' is not one that Tessera moves"));
    EXPECT_THAT(error.what(), testing::HasSubstr("f64, f32, f16, bf16, f8_e4m3"));
  }
}

TEST(DTypeTest, UsersMayWriteTheNamesOfTorchAndNumPyToo) {
  for (const DType dtype : all_dtypes()) {
    EXPECT_EQ(parse_dtype(torch_name(dtype)), dtype);
    EXPECT_EQ(parse_dtype("torch." + std::string(torch_name(dtype))), dtype);
  }
  const std::pair<const char*, DType> cases[] = {
      {"fp32", DType::kF32},       {"FP16", DType::kF16},           {"half", DType::kF16},   {"double", DType::kF64},
      {"torch.half", DType::kF16}, {"float8_e4m3", DType::kF8E4M3}, {"Float32", DType::kF32}};
  for (const auto& [name, dtype] : cases) EXPECT_EQ(parse_dtype(name), dtype) << name;
  for (const char* ambiguous : {"float", "int", "", " ", "torch.", "fp64 double", "torch.torch.float32"})
    EXPECT_THROW(parse_dtype(ambiguous), Error) << "NumPy's float is torch's double";
}

TEST(DTypeTest, BytesCountPackedNibbles) {
  EXPECT_EQ(bytes_of(DType::kF4, 6), 3);
  EXPECT_EQ(bytes_of(DType::kBF16, 6), 12);
  EXPECT_EQ(bytes_of(DType::kC64, 6), 48);
  EXPECT_EQ(bytes_of(DType::kBool, 0), 0);
}

TEST(DTypeTest, OnlyTheFourPlainFloatsAreCastOnTheBus) {
  for (const DType dtype : all_dtypes())
    EXPECT_EQ(is_castable_float(dtype),
              dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16);
  EXPECT_TRUE(is_integer(DType::kU8));
  EXPECT_TRUE(is_integer(DType::kI64));
  EXPECT_FALSE(is_integer(DType::kBool));
  EXPECT_FALSE(is_integer(DType::kF4));
  EXPECT_FALSE(is_integer(DType::kC64));
}

}  // namespace
}  // namespace tessera
