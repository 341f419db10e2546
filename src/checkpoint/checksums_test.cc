#include "checkpoint/checksums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "base/fail.h"
#include "base/testing.h"
#include "checkpoint/test_contents.h"
#include "checkpoint/test_folder.h"
#include "tessera/checkpoint.h"

namespace tessera::checkpoint {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kOne(32, 'a');
const std::string kTwo = "0123456789abcdef0123456789abcdef";

std::string in_index(const std::string& checksums) {
  return R"({"metadata":{"total_size":4,"tessera":{"generation":1,"checksums":)" + checksums +
         R"(,"tied":{"a":"b"}}},"weight_map":{"x":"a.safetensors"}})";
}

TEST(Checksums, ComeBackAsTheyWereWritten) {
  const Checksums checksums{{"a\"\n\x01", kOne}, {"b", kTwo}, {"", kOne}};
  EXPECT_EQ(parse_checksums(format_checksums(checksums), "f"), checksums);
  EXPECT_EQ(parse_index_checksums(in_index(format_checksums(checksums)), "i"), checksums);
  EXPECT_THAT(parse_checksums("{}", "f"), IsEmpty());
}

TEST(Checksums, OfOtherProgramsIndexesAreNone) {
  for (const std::string json :
       {R"({})", R"({"metadata":{}})", R"({"metadata":3})", R"({"metadata":{"tessera":"0.1"}})",
        R"({"metadata":{"tessera":[{"checksums":{"x":1}}]}})", R"({"checksums":{"x":1}})",
        R"({"tessera":{"checksums":{"x":1}}})", R"({"metadata":{"other":{"tessera":{"checksums":{"x":1}}}}})",
        R"({"metadata":{"tessera":{"other":{"checksums":{"x":1}},"list":[{"checksums":3}]}}})",
        R"([{"metadata":{"tessera":{"checksums":{"x":1}}}}])"})
    EXPECT_THAT(parse_index_checksums(json, "i"), IsEmpty()) << json;
}

TEST(Checksums, RefusesWhatNobodyWrites) {
  for (const std::string json :
       {"", "3", "[]", "null", "\"a\"", "[{}]", R"({"x":1})", R"({"x":null})", R"({"x":true})", R"({"x":1.5})",
        R"({"x":["a"]})", R"({"x":{}})", R"({"x":""})", R"({"x":"0123"})",
        R"({"x":"0123456789ABCDEF0123456789ABCDEF"})", R"({"x":"0123456789abcdef0123456789abcdeg"})",
        R"({"x":"0123456789abcdef0123456789abcdef0"})",
        R"({"x":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","x":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"})"}) {
    EXPECT_EQ(status_of([&] { parse_checksums(json, "f"); }).code(), ErrorCode::kInvalidArgument) << json;
    EXPECT_EQ(status_of([&] { parse_index_checksums(in_index(json), "i"); }).code(), ErrorCode::kInvalidArgument)
        << json;
  }
}

struct Flip {
  std::string name;
  DType dtype;
  int64_t bytes;
};

// One tensor of each dtype, and one that is read in several pieces.
std::vector<Flip> tensors() {
  std::vector<Flip> flips;
  for (const DType dtype : all_dtypes()) flips.push_back({std::string(to_string(dtype)), dtype, bytes_of(dtype, 16)});
  flips.push_back({"large", DType::kU8, (3 << 20) + 5});
  flips.push_back({"empty", DType::kF32, 0});
  return flips;
}

void flip_bit(const std::filesystem::path& path, std::streamoff from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-from_end, std::ios::end);
  const auto byte = static_cast<char>(file.get() ^ 0x20);
  file.seekp(-from_end, std::ios::end);
  file.put(byte);
}

// Writes a checkpoint whose checksums are in the file (index: no) or in an index beside it. Returns what to open.
std::filesystem::path write_checkpoint(const TestFolder& folder, bool index) {
  std::vector<std::vector<std::byte>> contents;
  std::vector<TensorView> views;
  Checksums checksums;
  std::string weight_map;
  for (const Flip& tensor : tensors()) {
    contents.push_back(random_bytes(tensor.bytes, static_cast<uint32_t>(contents.size())));
    views.push_back({tensor.name, tensor.dtype, {tensor.bytes * 8 / bits_of(tensor.dtype)}, contents.back().data()});
    checksums[tensor.name] = checksum_of(contents.back());
    weight_map += fmt::format("{}\"{}\":\"m.safetensors\"", weight_map.empty() ? "" : ",", tensor.name);
  }
  const std::string text = format_checksums(checksums);
  const std::map<std::string, std::string> metadata{{std::string(kChecksumsKey), text}};
  write_safetensors(folder / "m.safetensors", views, index ? std::map<std::string, std::string>() : metadata);
  if (!index) return folder / "m.safetensors";
  return folder.write("m.safetensors.index.json",
                      R"({"metadata":{"tessera":{"checksums":)" + text + R"(}},"weight_map":{)" + weight_map + "}}");
}

TEST(Checksums, AFlippedBitIsFoundInEveryTensorAndInNoOther) {
  for (const bool index : {false, true}) {
    const TestFolder folder;
    const std::filesystem::path path = write_checkpoint(folder, index);
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.checksums().size(), tensors().size());
    int64_t behind = 0;  // bytes of the tensors from this one on
    for (size_t i = checkpoint.tensors().size(); i-- > 0;) {
      const TensorInfo& info = checkpoint.tensors()[i];
      checkpoint.verify(info.name);
      const int64_t bytes = bytes_of(info.dtype, element_count(info.shape));
      behind += bytes;
      if (bytes == 0) continue;
      for (const int64_t from_end : {behind, behind - bytes + 1}) {
        flip_bit(folder / "m.safetensors", from_end);
        for (const TensorInfo& other : checkpoint.tensors()) {
          const Status status = status_of([&] { checkpoint.verify(other.name); });
          EXPECT_EQ(status.code(), other.name == info.name ? ErrorCode::kDataLoss : ErrorCode::kOk) << other.name;
          const std::string damaged = fmt::format("m.safetensors: tensor \"{}\" is damaged", info.name);
          EXPECT_THAT(status.message(), HasSubstr(status.ok() ? "" : damaged));
        }
        flip_bit(folder / "m.safetensors", from_end);
      }
    }
  }
}

TEST(Checksums, ATensorWithoutOneIsTaken) {
  const TestFolder folder;
  const std::vector<std::byte> bytes = random_bytes(8, 1);
  const TensorView view{"w", DType::kU8, {8}, bytes.data()};
  write_safetensors(folder / "m.safetensors", {&view, 1}, {{std::string(kChecksumsKey), "{}"}});
  Checkpoint::open(folder / "m.safetensors").verify("w");
  write_safetensors(folder / "m.safetensors", {&view, 1}, {{std::string(kChecksumsKey), "{"}});
  EXPECT_THROW(Checkpoint::open(folder / "m.safetensors"), Error);
}

}  // namespace
}  // namespace tessera::checkpoint
