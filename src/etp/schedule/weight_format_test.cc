#include "etp/schedule/weight_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "tessera/error.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

TEST(WeightFormats, AreReadBackFromTheirNames) {
  EXPECT_EQ(WeightFormat::all().size(), 7U);
  for (const WeightFormat& format : WeightFormat::all()) EXPECT_EQ(WeightFormat::parse(to_string(format)), format);
  EXPECT_EQ(WeightFormat::parse("NVFP4"), WeightFormat(Format::kNvfp4));
  EXPECT_EQ(WeightFormat::parse("float32"), WeightFormat(DType::kF32));
}

TEST(WeightFormats, OthersAreRefusedWithTheList) {
  for (const char* name : {"int4", "", "fp8_e5m2", "mxfp8_e5m2", "fp8_block_1x128", "i64", "f8_e4m3"})
    EXPECT_THAT(error_of([&] { WeightFormat::parse(name); }),
                HasSubstr("use one of f32, bf16, f16, fp8_e4m3, mxfp8, fp8_block_128x128, nvfp4"))
        << name;
  EXPECT_THAT(error_of([] { WeightFormat{Format::kFp8E5M2}; }), HasSubstr("fp8_e5m2"));
  EXPECT_THAT(error_of([] { WeightFormat{DType::kF64}; }), HasSubstr("f64"));
}

struct Expected {
  const char* name;
  int64_t alignment;
  bool needs_amax;
  bool one_plane;
  double bytes_a_value;  // of large matrices
};

TEST(WeightFormats, HaveTheDocumentedAlignmentPlanesAndBytes) {
  for (const Expected& expected : {
           Expected{"f32", 16, false, true, 4},
           Expected{"bf16", 16, false, true, 2},
           Expected{"f16", 16, false, true, 2},
           Expected{"fp8_e4m3", 16, true, true, 1},
           Expected{"mxfp8", 32, false, false, 1.03125},
           Expected{"fp8_block_128x128", 128, false, true, 1 + 4.0 / (128 * 128)},
           Expected{"nvfp4", 16, true, true, 0.5625},
       }) {
    SCOPED_TRACE(expected.name);
    const WeightFormat format = WeightFormat::parse(expected.name);
    EXPECT_EQ(format.alignment(), expected.alignment);
    EXPECT_EQ(format.needs_amax(), expected.needs_amax);
    EXPECT_EQ(format.one_plane(), expected.one_plane);
    EXPECT_EQ(format.planes(), (PlaneSet{true, !expected.one_plane}));
    EXPECT_EQ(format.gathered(Plane::kRow), Plane::kRow);
    EXPECT_EQ(format.gathered(Plane::kColumn), expected.one_plane ? Plane::kRow : Plane::kColumn);
    const int64_t scale = format == WeightFormat(Format::kFp8E4M3) ? 4 : 0;  // one for all
    for (const Plane plane : {Plane::kRow, Plane::kColumn})
      EXPECT_EQ(static_cast<double>(format.wire_bytes(plane, 512, 1024)),
                expected.bytes_a_value * 512 * 1024 + static_cast<double>(scale));
    EXPECT_EQ(format.wire_bytes(Plane::kRow, 0, 1024), scale);
  }
}

TEST(WeightFormats, BlocksAtTheEndAreClipped) {
  EXPECT_EQ(WeightFormat(Format::kMxfp8).wire_bytes(Plane::kRow, 3, 40), 3 * (40 + 2));
  EXPECT_EQ(WeightFormat(Format::kMxfp8).wire_bytes(Plane::kColumn, 33, 40), 33 * 40 + 2 * 40);
  EXPECT_EQ(WeightFormat(Format::kNvfp4).wire_bytes(Plane::kColumn, 3, 40), 3 * (20 + 3));  // the row plane's
  EXPECT_THROW(WeightFormat(Format::kNvfp4).wire_bytes(Plane::kRow, 16, 41), Error);
}

TEST(WeightFormats, APublicationIsACopyUnlessTheParameterIsOfThatDtype) {
  EXPECT_EQ(WeightFormat(DType::kBF16).publication_bytes(DType::kBF16, 5, 8), 0);
  EXPECT_EQ(WeightFormat(DType::kBF16).publication_bytes(DType::kF32, 5, 8), 5 * 8 * 2);
  // Both planes of mxfp8: codes 32x64, row scales 32x2, codes 32x64, column scales 1x64.
  EXPECT_EQ(WeightFormat(Format::kMxfp8).publication_bytes(DType::kF32, 32, 64), 2048 + 64 + 2048 + 64);
}

}  // namespace
}  // namespace tessera::etp
