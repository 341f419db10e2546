#include "tools/doctor_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/runtime_dir.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(DoctorChecks, PrivateMemoryIsReadEachWayWhereItIsCheaper) {
  // The ring is cheap for each piece but not for each byte: at 4 KiB readv is cheaper, at 2 KiB the ring.
  const PathCost readv{.byte = 1e-10, .piece = 4e-7};
  const PathCost ring{.byte = 2e-10, .piece = 2e-8};
  EXPECT_THAT(private_memory_text(readv, ring),
              HasSubstr("process_vm_readv (10.0 GB/s, 400 ns a piece) for pieces of 4.10 kB and more, "
                        "the bounce ring (5.0 GB/s, 20 ns a piece) for smaller ones"));
}

TEST(DoctorChecks, ARingThatIsCheaperAtEverySizeHasThemAll) {
  const PathCost readv{.byte = 4e-10, .piece = 4e-7};
  const PathCost ring{.byte = 2e-10, .piece = 2e-8};
  EXPECT_THAT(private_memory_text(readv, ring), HasSubstr("the bounce ring (5.0 GB/s, 20 ns a piece) for all sizes"));
  EXPECT_THAT(private_memory_text(readv, ring), Not(HasSubstr("pieces of")));
}

class RuntimeFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    parent_ = name;
    root_ = parent_ + "/run";
  }
  void TearDown() override { fs::remove_all(parent_); }

  std::string parent_, root_;
};

TEST_F(RuntimeFolderTest, WhatTheDeadLeftIsNamedAndTheLivingAreCounted) {
  const RuntimeDir living = RuntimeDir::open(root_, "trainer/0");
  const fs::path dead = fs::path(root_) / "p-0123456789abcdef";
  fs::create_directory(dead);
  std::ofstream(dead / "lock") << "";
  std::ofstream(dead / "owner") << "pid 4711\ncommand python train.py\nrole trainer/3\n";
  std::ofstream(root_ + "/store.members") << "";

  const std::vector<Check> checks = examine_runtime_folder(root_);
  ASSERT_EQ(checks.size(), 3U);
  EXPECT_EQ(checks[0].detail, root_ + ", used by 1 process");
  EXPECT_EQ(checks[1].name, "left over");
  EXPECT_THAT(checks[1].detail, HasSubstr("p-0123456789abcdef of pid 4711, trainer/3, since "));
  EXPECT_THAT(checks[1].detail, HasSubstr("UTC: python train.py"));
  EXPECT_THAT(checks[1].fix, HasSubstr("--clean"));
  EXPECT_THAT(checks[2].detail, HasSubstr("store.members of a host"));
  EXPECT_TRUE(fs::exists(dead)) << "to look removes nothing";

  clean_runtime_folder(root_);
  EXPECT_EQ(examine_runtime_folder(root_).size(), 1U);
  EXPECT_TRUE(fs::exists(living.path("lock")));
  EXPECT_FALSE(fs::exists(root_ + "/store.members"));
}

TEST_F(RuntimeFolderTest, OneThatCannotBeUsedIsMissingAndSaysWhy) {
  fs::create_directory(root_);
  fs::permissions(root_, fs::perms::all);
  const std::vector<Check> checks = examine_runtime_folder(root_);
  ASSERT_EQ(checks.size(), 1U);
  EXPECT_EQ(checks[0].state, Check::State::kMissing);
  EXPECT_THAT(checks[0].detail, HasSubstr("open to other users"));
}

}  // namespace
}  // namespace tessera::tools
