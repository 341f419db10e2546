#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>

#include "base/fail.h"
#include "checkpoint/test_contents.h"
#include "checkpoint/test_folder.h"
#include "tessera/checkpoint.h"

namespace tessera::checkpoint {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::map<std::string, std::string> kMetadata{{"format", "pt"}, {"step", "12"}};

struct Model {
  std::vector<TensorInfo> infos{{"rows", DType::kF32, {61, 7}},
                                {"columns", DType::kBF16, {5, 3, 40}},
                                {"scalar", DType::kI64, {}},
                                {"none", DType::kF16, {0, 4}},
                                {"codes", DType::kF4, {6, 4}}};
  std::vector<std::vector<std::byte>> contents;

  Model() {
    for (const TensorInfo& info : infos)
      contents.push_back(random_bytes(bytes_of(info.dtype, element_count(info.shape)), 5));
  }
  void write_with_one_process(const std::filesystem::path& path) const {
    std::vector<TensorView> views;
    for (size_t i = 0; i < infos.size(); ++i)
      views.push_back({infos[i].name, infos[i].dtype, infos[i].shape, contents[i].data()});
    write_safetensors(path, views, kMetadata);
  }
  // The part of rank r of n, dim `dim` of each tensor being cut; whole tensors are those of rank 0.
  void write_part(const SharedSafetensors& file, int r, int n) const {
    for (size_t i = 0; i < infos.size(); ++i) {
      const Shape& shape = infos[i].shape;
      Region region = Region::full(shape);
      if (shape.empty()) {
        if (r != 0) continue;
      } else {
        const size_t dim = infos[i].name == "columns" ? 2 : 0;
        std::vector<IntervalSet> dims;
        for (const Index size : shape) dims.emplace_back(Interval{0, size});
        const Index unit = infos[i].dtype == DType::kF4 ? 2 : 1;
        const Index size = shape[dim] / unit;
        dims[dim] = IntervalSet(Interval{size * r / n * unit, size * (r + 1) / n * unit});
        region = Region(std::move(dims));
      }
      const std::vector<std::byte> part =
          infos[i].dtype == DType::kF4
              ? std::vector(contents[i].begin() + region.dim(0).intervals().front().begin * 2,
                            contents[i].begin() + region.dim(0).intervals().front().end * 2)
              : slice_by_element(contents[i], shape, region, static_cast<size_t>(bytes_of(infos[i].dtype, 1)));
      file.write_slice(infos[i].name, region, part);
    }
  }
};

int exit_status_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(SharedSafetensors, ProcessesWriteTheBytesThatOneWouldWrite) {
  const TestFolder folder;
  const Model model;
  model.write_with_one_process(folder / "expected");
  for (const int processes : {1, 2, 3, 4}) {
    const auto path = folder / "shared";
    {
      const auto file = SharedSafetensors::create(path, model.infos, kMetadata);
      EXPECT_EQ(file.bytes(), static_cast<int64_t>(std::filesystem::file_size(path)));
      file.sync();
    }
    std::vector<pid_t> children;
    for (int r = 0; r < processes; ++r) {
      const pid_t child = ::fork();
      if (child == 0) {
        const Status status = status_of([&] {
          const auto file = SharedSafetensors::open(path, model.infos, kMetadata);
          model.write_part(file, r, processes);
          file.sync();
        });
        ::_exit(status.ok() ? 0 : 1);
      }
      children.push_back(child);
    }
    for (const pid_t child : children) EXPECT_EQ(exit_status_of(child), 0);
    EXPECT_EQ(folder.read("shared"), folder.read("expected")) << processes;
    std::filesystem::remove(path);
  }
}

TEST(SharedSafetensors, TheOrderOfTheListDoesNotMatter) {
  const TestFolder folder;
  const Model model;
  SharedSafetensors::create(folder / "a", model.infos, kMetadata);
  std::vector<TensorInfo> reversed(model.infos.rbegin(), model.infos.rend());
  SharedSafetensors::open(folder / "a", reversed, kMetadata);
}

TEST(SharedSafetensors, AFileOfOtherTensorsIsRefused) {
  const TestFolder folder;
  const Model model;
  SharedSafetensors::create(folder / "a", model.infos, kMetadata);
  const auto opening = [&](auto change) {
    Model other;
    change(other.infos);
    return status_of([&] { SharedSafetensors::open(folder / "a", other.infos, kMetadata); });
  };
  EXPECT_TRUE(opening([](auto&) {}).ok());
  for (const Status& status :
       {opening([](auto& infos) { infos.pop_back(); }), opening([](auto& infos) { infos[0].name = "swor"; }),
        opening([](auto& infos) { infos[0].shape = {7, 61}; }),
        status_of([&] { SharedSafetensors::open(folder / "a", model.infos, {}); })}) {
    EXPECT_EQ(status.code(), ErrorCode::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr("it was created for other tensors"));
  }
  EXPECT_EQ(status_of([&] { SharedSafetensors::open(folder / "b", model.infos, kMetadata); }).code(),
            ErrorCode::kNotFound);
  EXPECT_EQ(status_of([&] { SharedSafetensors::create(folder / "a", model.infos, kMetadata); }).code(),
            ErrorCode::kAlreadyExists);
}

TEST(SharedSafetensors, SlicesAreChecked) {
  const TestFolder folder;
  const Model model;
  const auto file = SharedSafetensors::create(folder / "a", model.infos, kMetadata);
  const std::string before = folder.read("a");
  const std::vector<std::byte> bytes(4096, std::byte{1});
  const auto writing = [&](const std::string& name, const std::vector<Interval>& dims, size_t count) {
    std::vector<IntervalSet> sets;
    for (const Interval& interval : dims) sets.emplace_back(interval);
    return status_of([&] { file.write_slice(name, Region(std::move(sets)), std::span(bytes).first(count)); });
  };
  EXPECT_EQ(writing("absent", {{0, 1}}, 4).code(), ErrorCode::kNotFound);
  EXPECT_THAT(writing("rows", {{60, 62}, {0, 7}}, 56).message(), HasSubstr("lies outside its shape"));
  EXPECT_THAT(writing("rows", {{0, 1}}, 4).message(), HasSubstr("lies outside its shape"));
  EXPECT_THAT(writing("codes", {{0, 1}, {0, 1}}, 0).message(), HasSubstr("cut inside a byte"));
  EXPECT_THAT(writing("codes", {{0, 6}, {1, 3}}, 6).message(), HasSubstr("cut inside a byte"));
  EXPECT_EQ(folder.read("a"), before);
}

TEST(SharedSafetensors, WhatNoReaderWouldTakeLeavesNoFile) {
  const TestFolder folder;
  for (const std::vector<TensorInfo>& infos : {std::vector<TensorInfo>{{"a", DType::kU8, {1}}, {"a", DType::kF32, {1}}},
                                               {{"a", DType::kF4, {3}}},
                                               {{"__metadata__", DType::kU8, {1}}},
                                               {{"a\xff", DType::kU8, {1}}}}) {
    EXPECT_EQ(status_of([&] { SharedSafetensors::create(folder / "a", infos); }).code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(folder.names(), IsEmpty());
  }
}

TEST(SharedSafetensors, AFileSizeLimitLeavesNoFile) {
  const TestFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{4096, 4096};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(9);
    const TensorInfo large{"large", DType::kU8, {8192}};
    const Status status = status_of([&] { SharedSafetensors::create(folder / "a", {&large, 1}); });
    ::_exit(status.code() == ErrorCode::kResourceExhausted ? 0 : 1);
  }
  EXPECT_EQ(exit_status_of(child), 0);
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(SpreadOverFiles, FilesAreAboutEqualAndTheOrderDoesNotMatter) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<TensorInfo> infos;
    for (int i = 0; i < 40; ++i)
      infos.push_back({std::to_string(i), DType::kF32, {static_cast<Index>(random() % 1000)}});
    const int files = 1 + trial % 5;
    const auto place = [&](const std::vector<TensorInfo>& list) {
      std::map<std::string, int> found;
      const std::vector<int> file = spread_over_files(list, files);
      for (size_t i = 0; i < list.size(); ++i) found[list[i].name] = file[i];
      return found;
    };
    const auto found = place(infos);
    std::vector<int64_t> bytes(static_cast<size_t>(files));
    int64_t largest = 0;
    for (const TensorInfo& info : infos) {
      const int file = found.at(info.name);
      ASSERT_TRUE(file >= 0 && file < files);
      bytes[static_cast<size_t>(file)] += info.shape[0] * 4;
      largest = std::max(largest, info.shape[0] * 4);
    }
    const int64_t most = *std::ranges::max_element(bytes);
    EXPECT_THAT(bytes, Each(::testing::Ge(most - largest)));
    std::ranges::shuffle(infos, random);
    EXPECT_EQ(place(infos), found);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
