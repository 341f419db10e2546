#include "base/observation.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "tessera/error.h"

namespace tessera {
namespace {

TEST(ObservationTest, ThereIsOneAProcessWhileSomebodyHoldsIt) {
  const auto first = Observation::start("0");
  EXPECT_TRUE(first->metrics_url().starts_with("http://127.0.0.1:")) << first->metrics_url();
  EXPECT_EQ(Observation::start(), first) << "a library's shows what the command's does";
  EXPECT_EQ(Observation::start("0"), first);
}

TEST(ObservationTest, NothingIsShownUnlessItIsAskedFor) {
  const auto observation = Observation::start();
  EXPECT_EQ(observation->metrics_url(), "");
  EXPECT_FALSE(Trace::on());
}

TEST(ObservationTest, AnOptionThatCannotBeFollowedIsAnErrorAndLeavesNothing) {
  EXPECT_THROW(Observation::start("nonsense"), Error);
  EXPECT_THROW(Observation::start("0", "/nonexistent/trace.json"), Error);
  EXPECT_EQ(Observation::start()->metrics_url(), "");
}

TEST(ObservationTest, ATracesNameTellsProcessesApart) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir());
  const auto file = folder / ("trace-" + std::to_string(::getpid()) + ".json");
  std::filesystem::remove(file);
  {
    const auto observation = Observation::start({}, folder / "trace-%p.json");
    EXPECT_TRUE(Trace::on());
  }
  EXPECT_TRUE(std::filesystem::remove(file));
}

}  // namespace
}  // namespace tessera
