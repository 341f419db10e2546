#include "base/trace.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <vector>

#include "base/fail.h"
#include "base/testing.h"
#include "base/thread.h"

namespace tessera {
namespace {

class TraceTest : public testing::Test {
 protected:
  ~TraceTest() override { std::filesystem::remove(path_); }

  // The events without the metadata, after a check of the structure that the format requires.
  std::vector<nlohmann::json> events(std::map<int64_t, std::string>* threads = nullptr) const {
    const auto trace = nlohmann::json::parse(std::ifstream(path_));
    std::vector<nlohmann::json> found;
    for (const auto& event : trace.at("traceEvents")) {
      EXPECT_EQ(event.at("pid"), ::getpid());
      const std::string phase = event.at("ph");
      if (phase == "M") {
        if (threads != nullptr && event["name"] == "thread_name") (*threads)[event["tid"]] = event["args"]["name"];
        continue;
      }
      EXPECT_TRUE(event.at("ts").is_number() && event.at("tid").is_number());
      EXPECT_EQ(event.contains("dur"), phase == "X");
      EXPECT_EQ(event.contains("id"), phase == "b" || phase == "e");
      found.push_back(event);
    }
    return found;
  }

  const std::string path_ = fmt::format("{}/tessera-trace.{}.json", testing::TempDir(), ::getpid());
};

TEST_F(TraceTest, SpansNestAndCarryWhatTheyAreAbout) {
  {
    const auto trace = Trace::start(path_);
    TraceSpan outer("plan", {.subject = "weights/policy"});
    {
      const TraceSpan inner("compile", {.version = 3});
    }
    outer.args().bytes = 17;
    Trace::begin("version", 1, {.version = 4});
  }
  EXPECT_EQ(events().size(), 3U) << "what had not ended when the trace did is not in it";
  {
    const auto trace = Trace::start(path_);
    {
      TraceSpan outer("plan", {.subject = "weights/policy"});
      {
        const TraceSpan inner("compile", {.version = 3});
      }
      outer.args().bytes = 17;
    }
    Trace::begin("version", 1, {.version = 4});
  }
  const auto all = events();
  ASSERT_EQ(all.size(), 3U);
  const auto &inner = all[0], &outer = all[1];
  EXPECT_EQ(outer["name"], "plan");
  EXPECT_EQ(outer["args"], (nlohmann::json{{"subject", "weights/policy"}, {"bytes", 17}}));
  EXPECT_LE(outer["ts"], inner["ts"]);
  EXPECT_GE(outer["ts"].get<double>() + outer["dur"].get<double>(),
            inner["ts"].get<double>() + inner["dur"].get<double>());
  EXPECT_EQ(all[2]["args"]["version"], 4);
}

TEST_F(TraceTest, EventsOfManyThreadsAreAllThereUnderTheirNames) {
  constexpr int kThreads = 4, kEvents = 3000;
  {
    const auto trace = Trace::start(path_);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.push_back(start_thread("tracer-" + std::to_string(t), [t] {
        for (int i = 0; i < kEvents; ++i) Trace::begin("event", 1, {.version = t + 1, .bytes = i + 1});
      }));
    for (std::thread& thread : threads) thread.join();
  }
  std::map<int64_t, std::string> names;
  std::map<std::string, std::vector<int64_t>> by_thread;
  for (const auto& event : events(&names)) by_thread[names[event["tid"]]].push_back(event["args"]["bytes"]);
  ASSERT_EQ(by_thread.size(), size_t{kThreads});
  for (const auto& [thread, order] : by_thread) {
    EXPECT_EQ(order.size(), size_t{kEvents}) << thread;
    EXPECT_TRUE(std::ranges::is_sorted(order)) << thread;
  }
}

TEST_F(TraceTest, AsynchronousSpansHaveABeginAndAnEndOfOneTrack) {
  {
    const auto trace = Trace::start(path_);
    const uint64_t track = Trace::new_track();
    EXPECT_NE(track, Trace::new_track());
    Trace::begin("pull", track, {.subject = "trainer/3"});
    std::thread([&] { Trace::end("pull", track); }).join();
  }
  std::set<std::pair<std::string, std::string>> seen;
  for (const auto& event : events()) seen.emplace(event["ph"], event["id"]);
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen.begin()->second, seen.rbegin()->second);
}

TEST_F(TraceTest, TextFromElsewhereKeepsTheFileValid) {
  const std::string hostile = "\"}],\x1b[2J\n\xff\\ and far more than fits into one event of a trace";
  {
    const auto trace = Trace::start(path_);
    Trace::begin("version", 1, {.subject = hostile});
  }
  const std::string subject = events().at(0)["args"]["subject"];
  EXPECT_TRUE(subject.starts_with("\"}],\x1b[2J\n"));
}

TEST_F(TraceTest, OffItRecordsNothingAndOneTraceLivesAtATime) {
  EXPECT_FALSE(Trace::on());
  Trace::begin("early", 1, {});
  {
    const auto trace = Trace::start(path_);
    EXPECT_TRUE(Trace::on());
    EXPECT_THROW(Trace::start(path_), Error);
  }
  EXPECT_FALSE(Trace::on());
  Trace::begin("late", 1, {});
  EXPECT_TRUE(events().empty());
  const auto again = Trace::start(path_);
}

TEST_F(TraceTest, AFileThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(Trace::start("/nonexistent/trace.json"), Error);
  EXPECT_THROW(Trace::start("/dev/full"), Error);
  EXPECT_FALSE(Trace::on());
  EXPECT_NO_THROW(Trace::start(path_)) << "a failed start leaves room for another";
}

TEST_F(TraceTest, AKilledProcessLeavesAFileThatParses) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto trace = Trace::start(path_);
    for (size_t i = 0; i < 5 * Trace::kBufferEvents / 2; ++i) Trace::begin("event", 1, {.version = 1});
    while (true) ::pause();
  }
  const auto written = [&] {
    const auto trace = nlohmann::json::parse(std::ifstream(path_), nullptr, false);
    return trace.is_discarded() ? 0 : trace["traceEvents"].size();
  };
  const Deadline deadline = soon();
  while (written() < 2 * Trace::kBufferEvents && !deadline.passed()) std::this_thread::yield();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_GE(written(), 2 * Trace::kBufferEvents) << "all buffers that were full, and a file that is whole";
}

TEST_F(TraceTest, AFileThatAnotherProcessWritesIsLeftAlone) {
  int started[2];  // checking the lock would take it for a moment, and the child would find it held
  ASSERT_EQ(::pipe(started), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto trace = Trace::start(path_);
    (void)!::write(started[1], "y", 1);
    while (true) ::pause();
  }
  ::close(started[1]);
  char said = 0;
  EXPECT_EQ(::read(started[0], &said, 1), 1) << "the child has ended";
  ::close(started[0]);
  const std::string error = error_of([&] { Trace::start(path_); });
  EXPECT_TRUE(error.find("another process writes it; %p in the path stands for the pid") != std::string::npos) << error;
  EXPECT_FALSE(Trace::on());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_NO_THROW(Trace::start(path_)) << "the lock goes with its process";
  const auto first = Trace::start("/dev/null");
  EXPECT_TRUE(Trace::on()) << "what is not a file is not locked";
}

TEST_F(TraceTest, AForkedChildTracesNothingAndEnds) {
  {
    const auto trace = Trace::start(path_);
    Trace::begin("parent", 1, {});
    const pid_t child = ::fork();
    if (child == 0) {
      Trace::begin("child", 1, {});
      ::_exit(Trace::on() ? 1 : 0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(events().size(), 1U);
}

}  // namespace
}  // namespace tessera
