#include "tools/etp/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/testing.h"

namespace tessera::tools {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class EtpModels : public ::testing::Test {
 protected:
  EtpModels() { std::filesystem::create_directories(folder_); }
  ~EtpModels() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path list(const std::string& text) const {
    std::ofstream(folder_ / "weights.txt") << text;
    return folder_ / "weights.txt";
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("tessera-etp-" + std::to_string(::getpid()));
};

EtpModel model_of(const std::vector<ListedWeight>& listed, const std::vector<std::string>& rules,
                  const EtpModelOptions& options) {
  return shard_model(listed, WeightFormatRules::parse(rules), options);
}

TEST_F(EtpModels, AListHasALineForEachWeight) {
  const auto weights = read_model(list("# the model\n\nb 64 32 bf16\n  a\t16 8 float32 nvfp4 # small\n"));
  ASSERT_EQ(weights.size(), 2U);
  EXPECT_EQ(weights[0].tensor, (TensorInfo{"b", DType::kBF16, {64, 32}}));
  EXPECT_EQ(weights[0].format, std::nullopt);
  EXPECT_EQ(weights[1].tensor, (TensorInfo{"a", DType::kF32, {16, 8}}));
  EXPECT_EQ(weights[1].format, etp::WeightFormat(Format::kNvfp4));
}

TEST_F(EtpModels, AMistakeIsNamedWithItsLine) {
  for (const char* line : {"a 64 bf16", "a 64 32", "a 0 32 bf16", "a -1 32 bf16", "a 64 x bf16", "a 64 3x bf16",
                           "a 64 32 bf16 nvfp4 more", "a 99999999999999999999 1 bf16"})
    EXPECT_THAT(error_of([&] { read_model(list(std::string("ok 1 1 bf16\n") + line)); }),
                AllOf(HasSubstr("weights.txt:2: "), HasSubstr("NAME ROWS COLUMNS DTYPE [FORMAT]")))
        << line;
  EXPECT_THAT(error_of([&] { read_model(list("a 64 32 bf17")); }), HasSubstr("weights.txt:1: "));
  EXPECT_THAT(error_of([&] { read_model(list("a 64 32 bf16 fp5")); }), AllOf(HasSubstr(":1: "), HasSubstr("fp5")));
  EXPECT_THAT(error_of([&] { read_model(folder_ / "missing.txt"); }), HasSubstr("missing.txt"));
}

TEST_F(EtpModels, ACheckpointIsTakenInTheNaturalOrderOfNames) {
  std::vector<std::byte> data(16 * 4);
  std::vector<TensorView> tensors;
  for (const char* name : {"layers.10.w", "layers.2.w", "embed", "layers.2.a", "layers.010.v"})
    tensors.push_back({.name = name, .dtype = DType::kF32, .shape = {4, 4}, .data = data.data()});
  write_safetensors(folder_ / "model.safetensors", tensors);
  std::vector<std::string> names;
  for (const ListedWeight& weight : read_model(folder_ / "model.safetensors")) names.push_back(weight.tensor.name);
  EXPECT_THAT(names, ElementsAre("embed", "layers.2.a", "layers.2.w", "layers.010.v", "layers.10.w"));
}

TEST(EtpModel, ShardsMatricesAndReplicatesTheRest) {
  const std::vector<ListedWeight> listed{
      {{"a", DType::kBF16, {100, 64}}}, {{"experts", DType::kBF16, {4, 100, 64}}}, {{"norm", DType::kF32, {64}}},
      {{"small", DType::kF32, {2, 2}}}, {{"steps", DType::kI64, {64, 64}}},
  };
  const EtpModel model = model_of(listed, {}, {.ranks = 2});
  EXPECT_THAT(model.names, ElementsAre("a", "experts"));
  EXPECT_EQ(model.replicated, 3);
  EXPECT_EQ(model.replicated_bytes, 64 * 4 + 4 * 4 + 64 * 64 * 8);
  EXPECT_THAT(model.costs[0].row, ElementsAre(etp::GatherBuffer{0, 128 * 64 * 2}));
  EXPECT_FALSE(model.costs[0].experts);
  EXPECT_EQ(model.costs[1].row.size(), 4U);
  EXPECT_TRUE(model.costs[1].experts);
  EXPECT_EQ(model.weights.size(), 5U);
  EXPECT_EQ(model.weights[4].sharding, etp::shard_rows(100, 2, 16));
}

TEST(EtpModel, TheFormatIsTheRulesThenTheListsThenTheDtypes) {
  const std::vector<ListedWeight> listed{
      {{"a", DType::kF32, {64, 64}}, etp::WeightFormat(Format::kNvfp4)},
      {{"b", DType::kF32, {64, 64}}, etp::WeightFormat(Format::kNvfp4)},
      {{"c", DType::kF32, {64, 64}}},
  };
  const EtpModel model = model_of(listed, {"a=mxfp8"}, {.ranks = 1, .dtype = DType::kBF16});
  EXPECT_EQ(model.weights[0].format, etp::WeightFormat(Format::kMxfp8));
  EXPECT_EQ(model.weights[1].format, etp::WeightFormat(Format::kNvfp4));
  EXPECT_EQ(model.weights[2].format, etp::WeightFormat(DType::kBF16));
  EXPECT_THAT(model.costs[0].column, ElementsAre(etp::GatherBuffer{1, 64 * 64 * 2}));
  EXPECT_EQ(model.keys.key(2).decoded, DType::kBF16);
  EXPECT_EQ(model.keys.key(3).decoded, std::nullopt);
}

TEST(EtpModel, MistakesNameTheTensorOrTheRule) {
  const std::vector<ListedWeight> listed{{{"w", DType::kBF16, {63, 64}}}};
  EXPECT_THAT(error_of([&] { model_of(listed, {}, {.ranks = 4, .pad_for_alignment = 0}); }),
              AllOf(HasSubstr("tensor \"w\""), HasSubstr("63 rows")));
  EXPECT_THAT(error_of([&] { model_of(listed, {"w"}, {}); }), HasSubstr("format rule \"w\": no '='"));
  EXPECT_THAT(error_of([&] { model_of(listed, {"(=nvfp4"}, {}); }), HasSubstr("bad regex"));
  EXPECT_THAT(error_of([&] { model_of(listed, {"w=fp5"}, {}); }),
              AllOf(HasSubstr("format rule \"w=fp5\""), HasSubstr("unknown weight format \"fp5\"")));
}

}  // namespace
}  // namespace tessera::tools
