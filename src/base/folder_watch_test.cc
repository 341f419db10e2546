#include "base/folder_watch.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "base/testing.h"

namespace tessera {
namespace {

class FolderWatchTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void make(const std::string& name) const { std::ofstream(folder_ + "/" + name) << "it"; }

  std::string folder_;
};

TEST_F(FolderWatchTest, WhatAppearsWakesWhoeverWaits) {
  FolderWatch watch;
  watch.add(folder_);
  const std::jthread other([&] { make("a"); });
  EXPECT_TRUE(watch.wait(soon()));
}

TEST_F(FolderWatchTest, WhatHasAppearedSinceItWasAddedIsNotMissed) {
  make("a");
  FolderWatch watch;
  watch.add(folder_);
  EXPECT_FALSE(watch.wait(Deadline::after(Duration::zero())));
  make("b");
  EXPECT_TRUE(watch.wait(Deadline::after(Duration::zero())));
  EXPECT_FALSE(watch.wait(Deadline::after(seconds(0.01))));
  std::filesystem::rename(folder_ + "/a", folder_ + "/c");
  EXPECT_TRUE(watch.wait(Deadline::after(Duration::zero())));
}

TEST_F(FolderWatchTest, AStopEndsTheWait) {
  FolderWatch watch;
  watch.add(folder_);
  std::stop_source stop;
  const std::jthread other([&] { stop.request_stop(); });
  EXPECT_FALSE(watch.wait(Deadline::after(Duration::max()), stop.get_token()));
}

TEST_F(FolderWatchTest, AFolderThatIsNotThereIsNone) {
  FolderWatch watch;
  watch.add(folder_ + "/none");
  make("none");
  watch.add(folder_ + "/none");
  EXPECT_FALSE(watch.wait(Deadline::after(Duration::zero())));
}

}  // namespace
}  // namespace tessera
