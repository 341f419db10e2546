#include "tessera/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "base/fail.h"
#include "checkpoint/test_contents.h"
#include "checkpoint/test_folder.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::byte> read_all(const Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo* info = checkpoint.find(name);
  std::vector<std::byte> bytes(static_cast<size_t>(bytes_of(info->dtype, element_count(info->shape))));
  checkpoint.read_slice(name, Region::full(info->shape), bytes);
  return bytes;
}

Status status_of_opening(const std::filesystem::path& path) {
  return status_of([&] { Checkpoint::open(path); });
}

// A file with one U8 tensor of 0, 1, 2, ...
std::filesystem::path write_counting(const TestFolder& folder, const std::string& file, const std::string& tensor,
                                     Index elements) {
  std::vector<std::byte> bytes(static_cast<size_t>(elements));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  const TensorView view{tensor, DType::kU8, {elements}, bytes.data()};
  write_safetensors(folder / file, {&view, 1});
  return folder / file;
}

TEST(Checkpoint, EveryDtypeAndShapeComesBackAsWritten) {
  const TestFolder folder;
  const Shape shapes[] = {{}, {0}, {3, 0, 2}, {2}, {6, 4}, {2, 1, 3, 2}, {1, 1, 1, 1, 1, 1, 1, 2}};
  std::vector<std::vector<std::byte>> contents;
  std::vector<TensorView> views;
  for (const DType dtype : all_dtypes())
    for (const Shape& shape : shapes) {
      if (dtype == DType::kF4 && shape.empty()) continue;
      contents.push_back(random_bytes(bytes_of(dtype, element_count(shape)), static_cast<uint32_t>(contents.size())));
      views.push_back(
          {fmt::format("{}/{}", to_string(dtype), to_string_shape(shape)), dtype, shape, contents.back().data()});
    }
  const int64_t size = write_safetensors(folder / "m.safetensors", views, {{"version", "3"}, {"naïve\n", "\"\\"}});
  EXPECT_EQ(size, static_cast<int64_t>(std::filesystem::file_size(folder / "m.safetensors")));

  const Checkpoint checkpoint = Checkpoint::open(folder / "m.safetensors");
  EXPECT_EQ(checkpoint.metadata().at("naïve\n"), "\"\\");
  ASSERT_EQ(checkpoint.tensors().size(), views.size());
  for (size_t i = 0; i < views.size(); ++i) {
    ASSERT_NE(checkpoint.find(views[i].name), nullptr) << views[i].name;
    EXPECT_EQ(*checkpoint.find(views[i].name), (TensorInfo{views[i].name, views[i].dtype, views[i].shape}));
    EXPECT_EQ(read_all(checkpoint, views[i].name), contents[i]) << views[i].name;
  }
}

// The order of safetensors 0.8, which writes the same bytes for the same tensors.
TEST(WriteSafetensors, LaysTensorsOutAsTheReferenceDoes) {
  const TestFolder folder;
  const std::byte data[8]{};
  std::vector<TensorView> views;
  for (const DType dtype : all_dtypes()) views.push_back({std::string(to_string(dtype)), dtype, {2}, data});
  views.push_back({"a", DType::kF32, {2}, data});
  for (TensorView& view : views)
    if (bits_of(view.dtype) == 64) view.shape = {1};
  write_safetensors(folder / "m.safetensors", views);
  std::vector<std::string> names;
  const Checkpoint checkpoint = Checkpoint::open(folder / "m.safetensors");
  for (const TensorInfo& info : checkpoint.tensors()) names.push_back(info.name);
  EXPECT_THAT(names, ElementsAre("u64", "i64", "f64", "c64", "a", "f32", "u32", "i32", "bf16", "f16", "u16", "i16",
                                 "f8_e8m0", "f8_e4m3", "f8_e5m2", "i8", "u8", "f4", "bool"));
}

TEST(Checkpoint, AFileMayHoldNoTensorAtAll) {
  const TestFolder folder;
  write_safetensors(folder / "m.safetensors", {});
  EXPECT_TRUE(Checkpoint::open(folder / "m.safetensors").tensors().empty());
}

Region random_region(const Shape& shape, std::mt19937& random) {
  std::vector<IntervalSet> dims;
  for (const Index size : shape) {
    std::vector<Interval> intervals;
    const bool whole = random() % 3 == 0;
    for (Index begin = 0; begin < size;) {
      const Index end = whole ? size : std::min<Index>(size, begin + 1 + static_cast<Index>(random() % 9));
      if (whole || random() % 2 == 0) intervals.push_back({begin, end});
      begin = end;
    }
    dims.push_back(IntervalSet::of_sorted(intervals));
  }
  return Region(std::move(dims));
}

TEST(Checkpoint, RandomSlicesEqualTheElementByElementOnes) {
  const TestFolder folder;
  std::mt19937 random(20240607);
  for (int trial = 0; trial < 60; ++trial) {
    Shape shape(random() % 5);
    for (Index& size : shape) size = static_cast<Index>(random() % 14);
    const DType dtype = all_dtypes()[random() % all_dtypes().size()];
    if (dtype == DType::kF4) continue;
    const auto whole = random_bytes(bytes_of(dtype, element_count(shape)), static_cast<uint32_t>(random()));
    const TensorView view{"t", dtype, shape, whole.data()};
    write_safetensors(folder / "m.safetensors", {&view, 1});
    const Checkpoint checkpoint = Checkpoint::open(folder / "m.safetensors");
    for (int slice = 0; slice < 20; ++slice) {
      const Region region = random_region(shape, random);
      std::vector<std::byte> read(static_cast<size_t>(bytes_of(dtype, region.size())));
      checkpoint.read_slice("t", region, read);
      ASSERT_EQ(read, slice_by_element(whole, shape, region, static_cast<size_t>(bytes_of(dtype, 1))))
          << to_string_shape(shape) << " " << region.to_string();
    }
  }
}

TEST(Checkpoint, SlicesWiderThanAWindowAreWholeToo) {
  const TestFolder folder;
  const Shape shape{70, 3, 8192};  // rows of 16 KiB, 3.3 MiB in total
  const auto whole = random_bytes(element_count(shape) * 2, 1);
  const TensorView view{"t", DType::kBF16, shape, whole.data()};
  write_safetensors(folder / "m.safetensors", {&view, 1});
  const Checkpoint checkpoint = Checkpoint::open(folder / "m.safetensors");
  const auto set = [](Index begin, Index end) { return IntervalSet(Interval{begin, end}); };
  for (const Region& region :
       {Region({set(1, 70), set(0, 3), set(0, 8192)}), Region({set(0, 70), set(1, 2), set(0, 8192)}),
        Region({set(0, 70), set(0, 3), set(4096, 8192)}), Region({set(0, 70), set(0, 3), set(1000, 7500)}),
        Region({set(3, 50), set(1, 3), set(8000, 8001)})}) {
    std::vector<std::byte> read(static_cast<size_t>(region.size()) * 2);
    checkpoint.read_slice("t", region, read);
    EXPECT_EQ(read, slice_by_element(whole, shape, region, 2)) << region.to_string();
  }
}

TEST(Checkpoint, FourBitElementsAreCutAtBytesOnly) {
  const TestFolder folder;
  const std::array<uint8_t, 6> codes{0x10, 0x32, 0x54, 0x76, 0x98, 0xBA};
  const TensorView view{"w", DType::kF4, {4, 3}, reinterpret_cast<const std::byte*>(codes.data())};
  write_safetensors(folder / "m.safetensors", {&view, 1});
  const Checkpoint checkpoint = Checkpoint::open(folder / "m.safetensors");
  const auto rows = [](Index begin, Index end) {
    return Region({IntervalSet(Interval{begin, end}), IntervalSet(Interval{0, 3})});
  };
  std::array<std::byte, 3> half{};
  checkpoint.read_slice("w", rows(2, 4), half);
  EXPECT_EQ(half, (std::array{std::byte{0x76}, std::byte{0x98}, std::byte{0xBA}}));

  for (const Region& cut : {rows(0, 1), rows(1, 3)}) {
    std::array<std::byte, 3> buffer{};
    const Status status = status_of(
        [&] { checkpoint.read_slice("w", cut, std::span(buffer).first(static_cast<size_t>(cut.size() / 2))); });
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("tensor \"w\""));
    EXPECT_THAT(status.message(), HasSubstr("cut inside a byte"));
  }
}

TEST(Checkpoint, ASliceOutsideTheShapeOrOfNoTensorIsRefused) {
  const TestFolder folder;
  const Checkpoint checkpoint = Checkpoint::open(write_counting(folder, "m.safetensors", "t", 8));
  std::array<std::byte, 8> buffer{};
  EXPECT_THAT(status_of([&] { checkpoint.read_slice("t", Region({IntervalSet({4, 12})}), buffer); }).message(),
              HasSubstr("slice [4:12] lies outside its shape 8"));
  EXPECT_FALSE(status_of([&] { checkpoint.read_slice("t", Region(), std::span(buffer).first(1)); }).ok());
  EXPECT_EQ(status_of([&] { checkpoint.read_slice("u", Region(), buffer); }).code(), ErrorCode::kNotFound);
}

TEST(Checkpoint, AFileTruncatedWhileOpenIsAnError) {
  const TestFolder folder;
  const auto path = write_counting(folder, "m.safetensors", "t", 100'000);
  const Checkpoint checkpoint = Checkpoint::open(path);
  std::filesystem::resize_file(path, 5000);
  const Status status = status_of([&] { read_all(checkpoint, "t"); });
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("tensor \"t\": the file ends at 5000"));
}

TEST(Checkpoint, FilesThatAreNoneAreRefused) {
  const TestFolder folder;
  const auto with_length = [](uint64_t length, const std::string& rest) {
    return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + rest;
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "0 bytes, shorter than its length field"},
      {"1234567", "7 bytes, shorter than its length field"},
      {with_length(100'000'001, "{}"), "more than the limit of 100000000"},
      {with_length(~0ULL, "{}"), "more than the limit of 100000000"},
      {with_length(3, "{}"), "a header of 3 bytes in a file of 10: is it truncated?"},
      {with_length(0, "{}"), "does not begin with '{'"},
      {with_length(2, "{}left"), "4 bytes after the last tensor"},
      {std::string(100, '\0'), "does not begin with '{'"},
  };
  for (const auto& [content, complaint] : cases) {
    const Status status = status_of_opening(folder.write("bad.safetensors", content));
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(complaint));
    EXPECT_THAT(status.message(), HasSubstr("bad.safetensors"));
  }
  EXPECT_EQ(status_of_opening(folder / "absent.safetensors").code(), ErrorCode::kNotFound);
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(status_of_opening(folder / "fifo").message(), HasSubstr("not a regular file"));
}

TEST(Checkpoint, AnIndexGathersItsFiles) {
  const TestFolder folder;
  write_counting(folder, "a.safetensors", "x", 4);
  write_counting(folder, "b.safetensors", "y", 6);
  const auto index =
      folder.write("model.safetensors.index.json", R"({"metadata":{"total_size":10,"deep":[{"a":[null]}]},
    "weight_map":{"y":"b.safetensors","x":"a.safetensors"}})");
  for (const auto& path : {index, folder.path()}) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_THAT(checkpoint.tensors(), ElementsAre(TensorInfo{"x", DType::kU8, {4}}, TensorInfo{"y", DType::kU8, {6}}));
    EXPECT_EQ(checkpoint.bytes(), 10);
    EXPECT_EQ(read_all(checkpoint, "y").back(), std::byte{5});
  }
}

TEST(Checkpoint, OfTwoFilesWithOneNameTheIndexDecides) {
  const TestFolder folder;
  write_counting(folder, "a.safetensors", "x", 4);
  write_counting(folder, "b.safetensors", "x", 6);
  const auto index = folder.write("m.safetensors.index.json", R"({"weight_map":{"x":"b.safetensors"}})");
  EXPECT_EQ(Checkpoint::open(index).find("x")->shape, Shape{6});
}

TEST(Checkpoint, RefusesHostileIndexes) {
  const TestFolder folder;
  write_counting(folder, "a.safetensors", "x", 4);
  std::string deep = R"({"metadata":)";
  deep.append(100'000, '[');
  const std::pair<std::string, std::string> cases[] = {
      {"", "not JSON"},
      {"[]", "an array is out of place"},
      {"{}", "no weight_map"},
      {R"({"weight_map":{}}x)", "not JSON"},
      {R"({"weight_map":[]})", "an array is out of place"},
      {R"({"weight_map":"a"})", "a string is out of place"},
      {R"({"weight_map":{"x":1}})", "weight_map: \"x\": a number is out of place"},
      {R"({"weight_map":{"x":{}}})", "weight_map: \"x\": an object is out of place"},
      {R"({"weight_map":{"x":"../a.safetensors"}})", "not the name of a file beside the index"},
      {R"({"weight_map":{"x":"/etc/passwd"}})", "not the name of a file beside the index"},
      {R"({"weight_map":{"x":""}})", "not the name of a file beside the index"},
      {R"({"weight_map":{"x":".."}})", "not the name of a file beside the index"},
      {R"({"weight_map":{"x":"a.safetensors","x":"a.safetensors"}})", "\"x\" is there twice"},
      {R"({"weight_map":{},"weight_map":{}})", "weight_map is there twice"},
      {R"({"weight_map":{"z":"a.safetensors"}})", "tensor \"z\" is not in a.safetensors"},
      {R"({"weight_map":{"x":"absent.safetensors"}})", "absent.safetensors"},
      {deep, "nested deeper than 16 levels"},
  };
  for (const auto& [json, complaint] : cases) {
    const Status status = status_of_opening(folder.write("m.safetensors.index.json", json));
    EXPECT_THAT(status.message(), HasSubstr(complaint)) << json.substr(0, 100);
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
  }
}

TEST(Checkpoint, AFolderHoldsExactlyOne) {
  const TestFolder folder;
  EXPECT_EQ(status_of_opening(folder.path()).code(), ErrorCode::kNotFound);
  write_counting(folder, "a.safetensors", "x", 4);
  EXPECT_EQ(Checkpoint::open(folder.path()).path(), folder / "a.safetensors");
  write_counting(folder, "b.safetensors", "x", 4);
  EXPECT_THAT(status_of_opening(folder.path()).message(), HasSubstr("holds 2 of *.safetensors: name one"));
}

TEST(WriteSafetensors, RefusesWhatNoReaderWouldTake) {
  const TestFolder folder;
  const std::byte data[8]{};
  const auto complaint = [&](const std::vector<TensorView>& views) {
    return status_of([&] { write_safetensors(folder / "m.safetensors", views); }).message();
  };
  EXPECT_THAT(complaint({{"a", DType::kU8, {1}, data}, {"a", DType::kF32, {1}, data}}),
              HasSubstr("\"a\" is given twice"));
  EXPECT_THAT(complaint({{"a", DType::kF4, {3}, data}}), HasSubstr("ends inside a byte"));
  EXPECT_THAT(complaint({{"__metadata__", DType::kU8, {1}, data}}), HasSubstr("cannot be called __metadata__"));
  EXPECT_TRUE(folder.names().empty());
}

}  // namespace
}  // namespace tessera::checkpoint
