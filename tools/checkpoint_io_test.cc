#include "tools/checkpoint_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/fail.h"
#include "base/testing.h"
#include "checkpoint/checksums.h"
#include "checkpoint/test_folder.h"
#include "codec/simd/cast.h"
#include "codec/simd/reduce.h"
#include "tools/interrupt.h"

namespace tessera::tools {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

// A checkpoint of one tensor [rows, 4] of f32, counting up from `first`.
class CheckpointIo : public ::testing::Test {
 protected:
  Checkpoint write_counting(const std::string& name, Index rows, float first = 0) {
    std::vector<float> values(static_cast<size_t>(rows * 4));
    std::iota(values.begin(), values.end(), first);
    const TensorView view{"w", DType::kF32, {rows, 4}, reinterpret_cast<const std::byte*>(values.data())};
    write_safetensors(folder_ / name, {&view, 1});
    return Checkpoint::open(folder_ / name);
  }

  checkpoint::TestFolder folder_;
  Interrupt interrupt_;
};

HeldTensors hold(const TensorInfo& info, const std::string& layout, Rank rank, int world) {
  return HeldTensors({info}, {Layout::parse(layout).bind(info.shape)}, rank, world);
}
HeldTensors hold(const Checkpoint& checkpoint, const std::string& layout, Rank rank, int world) {
  return hold(checkpoint.tensors().front(), layout, rank, world);
}

std::vector<float> floats_of(const HeldTensors& held) {
  const auto memory = held.tensors().front().memory;
  std::vector<float> values(memory.size() / sizeof(float));
  if (!memory.empty()) std::memcpy(values.data(), memory.data(), memory.size());
  return values;
}

TEST_F(CheckpointIo, EveryRankHoldsItsSlice) {
  const Checkpoint checkpoint = write_counting("c.safetensors", 3);
  const auto loaded = [&](const std::string& layout, Rank rank) {
    const HeldTensors held = hold(checkpoint, layout, rank, 4);
    load_slices(checkpoint, held, interrupt_);
    return floats_of(held);
  };
  EXPECT_THAT(loaded("2:S0", 1), ElementsAre(8, 9, 10, 11));
  EXPECT_THAT(loaded("2:S1", 1), ElementsAre(2, 3, 6, 7, 10, 11));
  EXPECT_THAT(loaded("2,2:S0,S1", 3), ElementsAre(10, 11));
  EXPECT_THAT(loaded("4:S0", 3), ElementsAre());  // a member whose shard is empty
  EXPECT_THAT(loaded("2@1-2:S0", 1), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(loaded("2@1-2:S0", 0), ElementsAre());  // outside the mesh
}

TEST_F(CheckpointIo, APartialSumLiesOnTheFirstRankOfItsAxis) {
  const Checkpoint checkpoint = write_counting("c.safetensors", 2);
  for (Rank rank = 0; rank < 4; ++rank) {
    const HeldTensors held = hold(checkpoint, "2,2:Psum,S0", rank, 4);
    load_slices(checkpoint, held, interrupt_);
    const float row = static_cast<float>(rank % 2) * 4;
    if (rank < 2) {
      EXPECT_THAT(floats_of(held), ElementsAre(row, row + 1, row + 2, row + 3));
    } else {
      for (const float value : floats_of(held)) EXPECT_TRUE(value == 0 && std::signbit(value));
    }
  }
}

TEST_F(CheckpointIo, OtherReductionsHoldOnesOrTheSlice) {
  const Checkpoint checkpoint = write_counting("c.safetensors", 1);
  const auto second = [&](const std::string& layout) {
    const HeldTensors held = hold(checkpoint, layout, 1, 2);
    load_slices(checkpoint, held, interrupt_);
    return floats_of(held);
  };
  EXPECT_THAT(second("2:Pproduct"), ElementsAre(1, 1, 1, 1));
  for (const char* layout : {"2:Pavg", "2:Pmin", "2:Pmax"}) EXPECT_THAT(second(layout), ElementsAre(0, 1, 2, 3));
}

// The first rank's slice and the second rank's element are combined as the owner of a reduction does it.
TEST_F(CheckpointIo, ComplexTermsGiveTheTensorBack) {
  const std::vector<std::complex<float>> values{{1.5F, -2}, {-3, 0.25F}, {1e30F, 1e-30F}, {0, 7}, {-0.0F, -0.0F}};
  const auto count = static_cast<Index>(values.size());
  const TensorView view{"z", DType::kC64, {count}, reinterpret_cast<const std::byte*>(values.data())};
  write_safetensors(folder_ / "c.safetensors", {&view, 1});
  const Checkpoint checkpoint = Checkpoint::open(folder_ / "c.safetensors");
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
    const bool sum = op == ReduceOp::kSum;
    std::vector<std::complex<float>> folded(values.size());
    for (const Rank rank : {0, 1}) {
      const HeldTensors held = hold(checkpoint, sum ? "2:Psum" : "2:Pproduct", rank, 2);
      load_slices(checkpoint, held, interrupt_);
      accumulate_row(op, DType::kC64, rank == 0)(held.tensors().front().memory.data(), folded.data(), folded.size());
    }
    EXPECT_EQ(folded, values) << to_string(op);
    if (sum) {  // to the bit
      EXPECT_EQ(std::memcmp(folded.data(), values.data(), values.size() * sizeof(values[0])), 0);
    }
  }
}

TEST_F(CheckpointIo, TermsThatCannotBeReducedAreRefusedOnEveryRank) {
  for (Rank rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(status_of([&] { hold({"e", DType::kF8E8M0, {2}}, "2:Pproduct", rank, 3); }).message(),
                HasSubstr("tensor \"e\": its layout 2:Pproduct: f8_e8m0 cannot be reduced by product"));
    EXPECT_THAT(status_of([&] { hold({"i", DType::kI32, {2}}, "2:Pavg", rank, 3); }).message(),
                HasSubstr("i32 cannot be reduced by avg"));
  }
}

TEST_F(CheckpointIo, ALayoutMustFitTheJobAndWholeBytes) {
  EXPECT_THAT(
      status_of([] { hold({"w", DType::kF32, {4}}, "2@1-2:S0", 0, 2); }).message(),
      HasSubstr("tensor \"w\": layout 2@1-2:S0 is over 2 ranks up to 2, but the job has 2 ranks, 0 to 1: choose"));
  EXPECT_THAT(status_of([] { hold({"w", DType::kF4, {2, 3}}, "2:S0", 0, 2); }).message(),
              HasSubstr("tensor \"w\": the slice [0:1][0:3] of f4 would be cut inside a byte"));
}

TEST_F(CheckpointIo, WhatWasLoadedVerifies) {
  const Checkpoint checkpoint = write_counting("c.safetensors", 5);
  for (Rank rank = 0; rank < 3; ++rank) {
    const HeldTensors held = hold(checkpoint, "2:S0", rank, 3);
    load_slices(checkpoint, held, interrupt_);
    EXPECT_TRUE(status_of([&] { verify_slices(checkpoint, held, {}, interrupt_); }).ok());
  }
}

TEST_F(CheckpointIo, AWrongElementIsNamedWithBothValues) {
  const Checkpoint checkpoint = write_counting("c.safetensors", 4);
  const HeldTensors held = hold(checkpoint, "2:S0", 1, 2);
  load_slices(checkpoint, held, interrupt_);
  const float wrong = 99;
  std::memcpy(held.tensors().front().memory.data() + 5 * sizeof(float), &wrong, sizeof(wrong));
  const Status status = status_of([&] { verify_slices(checkpoint, held, {}, interrupt_); });
  EXPECT_EQ(status.code(), ErrorCode::kDataLoss);
  EXPECT_THAT(status.message(), HasSubstr("rank 1: tensor \"w\" [3,1] is 99 (0x42c60000), expected 13 (0x41500000)"));
}

TEST_F(CheckpointIo, VerifiesAfterTheSameCast) {
  const Checkpoint checkpoint = write_counting("c.safetensors", 4, 0.1F);
  const HeldTensors held = hold({"w", DType::kBF16, {4, 4}}, "2:S1", 1, 2);
  std::vector<float> values(8);
  checkpoint.read_slice("w", held.tensors().front().region, std::as_writable_bytes(std::span(values)));
  cast_row(DType::kF32, DType::kBF16)(values.data(), held.tensors().front().memory.data(), values.size());
  EXPECT_TRUE(status_of([&] { verify_slices(checkpoint, held, {}, interrupt_); }).ok());
  held.tensors().front().memory[0] ^= std::byte{1};
  EXPECT_EQ(status_of([&] { verify_slices(checkpoint, held, {}, interrupt_); }).code(), ErrorCode::kDataLoss);
}

// The whole tensor quantised at once and decoded, in f32. REQUIRES: f32 or f64, a stack of matrices [rows, columns]
std::vector<float> decoded(const std::vector<float>& values, Format format, Index rows, Index columns) {
  const QuantSpec spec{.format = format};
  const PlaneShape shape = plane_shape(spec, Plane::kRow, rows, columns);
  std::vector<std::byte> codes(static_cast<size_t>(shape.code_bytes()));
  std::vector<std::byte> scales(static_cast<size_t>(shape.scale_bytes()));
  std::vector<float> result(values.size());
  for (size_t first = 0; first < values.size(); first += static_cast<size_t>(rows * columns)) {
    const MatrixView view{values.data() + first, DType::kF32, rows, columns, columns};
    const float amax = compute_amax({&view, 1})[0].value;
    const PlaneMemory to{codes.data(), shape.code_row_bytes(), scales.data(), shape.scale_row_bytes()};
    quantize(view, spec, {.row = amax}, {.row = to, .column = {}});
    dequantize(spec, Plane::kRow, {to.codes, to.code_stride, to.scales, to.scale_stride}, amax,
               {result.data() + first, DType::kF32, rows, columns, columns});
  }
  return result;
}

// Verifies this rank's part of `decoded`, and checks that one wrong bit in the last element is found.
void expect_verifies(const Checkpoint& checkpoint, const std::vector<float>& decoded, Format format,
                     const std::string& layout, const Interrupt& interrupt) {
  for (Rank rank = 0; rank < 2; ++rank) {
    const HeldTensors held = hold({"w", DType::kF32, checkpoint.tensors().front().shape}, layout, rank, 2);
    const HeldTensor& tensor = held.tensors().front();
    checkpoint::TestFolder folder;
    const TensorView view{"w", DType::kF32, tensor.info.shape, reinterpret_cast<const std::byte*>(decoded.data())};
    write_safetensors(folder / "decoded.safetensors", {&view, 1});
    load_slices(Checkpoint::open(folder / "decoded.safetensors"), held, interrupt);
    const std::vector<std::optional<Format>> wires{format};
    const auto verify = [&] { return status_of([&] { verify_slices(checkpoint, held, wires, interrupt); }); };
    EXPECT_EQ(verify().message(), "") << to_string(format) << " " << layout;
    tensor.memory[tensor.memory.size() - 4] ^= std::byte{1};
    EXPECT_THAT(verify().message(), HasSubstr(fmt::format("tensor \"w\" as {}: [", to_string(format))));
  }
}

TEST_F(CheckpointIo, WhatTravelledQuantisedIsComparedWithTheWholeTensorQuantised) {
  std::vector<double> values;
  for (int i = 0; i < 2 * 36 * 40; ++i) values.push_back(std::sin(i) * std::ldexp(1.0, -(i % 23)));
  const std::vector<float> rounded(values.begin(), values.end());
  const TensorView view{"w", DType::kF64, {2, 36, 40}, reinterpret_cast<const std::byte*>(values.data())};
  write_safetensors(folder_ / "w.safetensors", {&view, 1});
  const Checkpoint checkpoint = Checkpoint::open(folder_ / "w.safetensors");
  for (const Format format : all_formats())
    for (const char* layout : {"2:S0", "2:S1", "2:S2", "2:S2*3"})
      expect_verifies(checkpoint, decoded(rounded, format, 36, 40), format, layout, interrupt_);
}

// Read in several bands: the amax is in the last one.
TEST_F(CheckpointIo, ALargeMatrixHasOneAmax) {
  constexpr Index kRows = 1100;
  constexpr Index kColumns = 8192;
  std::vector<float> values(kRows * kColumns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 97) - 48;
  values.back() = 1e4F;
  const TensorView view{"w", DType::kF32, {kRows, kColumns}, reinterpret_cast<const std::byte*>(values.data())};
  write_safetensors(folder_ / "w.safetensors", {&view, 1});
  expect_verifies(Checkpoint::open(folder_ / "w.safetensors"), decoded(values, Format::kNvfp4, kRows, kColumns),
                  Format::kNvfp4, "2:S0", interrupt_);
}

TEST_F(CheckpointIo, AnotherShapeOrANameThatIsNotThereFailsVerification) {
  const Checkpoint checkpoint = write_counting("c.safetensors", 4);
  EXPECT_THAT(status_of([&] {
                verify_slices(checkpoint, hold({"w", DType::kF32, {2, 8}}, "1:R", 0, 1), {}, interrupt_);
              }).message(),
              HasSubstr("is f32 2x8 here and f32 4x4 in the checkpoint"));
  EXPECT_THAT(status_of([&] {
                verify_slices(checkpoint, hold({"v", DType::kF32, {4}}, "1:R", 0, 1), {}, interrupt_);
              }).message(),
              HasSubstr("tensor \"v\" is not in the checkpoint"));
}

TEST_F(CheckpointIo, WritesTheLocalTensorsWithWhatIsNeededToJoinThem) {
  const std::vector<TensorInfo> tensors{
      {"rows", DType::kF32, {4, 4}}, {"elsewhere", DType::kI8, {4}}, {"empty", DType::kU8, {0, 2}}};
  const HeldTensors held(
      tensors, {Layout::parse("2:S0"), Layout::parse("1@0:R"), Layout::parse("2:S0").bind(Shape{0, 2})}, 1, 2);
  EXPECT_EQ(write_slices(folder_.path(), held, 7), folder_ / "rank-00001.safetensors");
  EXPECT_EQ(write_slices(folder_.path(), held, 8), folder_ / "rank-00001.safetensors");  // replaces

  const Checkpoint written = Checkpoint::open(folder_.path());
  EXPECT_THAT(written.tensors(),
              UnorderedElementsAre(TensorInfo{"rows", DType::kF32, {2, 4}}, TensorInfo{"empty", DType::kU8, {0, 2}}));
  EXPECT_EQ(written.metadata().at("version"), "8");
  EXPECT_EQ(written.checksums().size(), 2u);
  EXPECT_EQ(written.checksums().at("rows"), checkpoint::checksum_of(held.tensors().front().memory));
  const auto described = nlohmann::json::parse(written.metadata().at("tensors"));
  EXPECT_EQ(described.size(), 2u);
  EXPECT_EQ(described["rows"], nlohmann::json::parse(R"({"shape":[4,4],"dtype":"f32","layout":"2:S0"})"));
}

}  // namespace
}  // namespace tessera::tools
