// One fault at a time: the clock jumps, the store is restarted, memory or descriptors are refused. No call hangs, no
// staged version is mixed, nothing is left behind, and once the fault is over the transfer completes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/clock.h"
#include "base/testing.h"
#include "tessera/memory.h"
#include "tessera/store.h"
#include "tests/fault/hazard.h"
#include "tests/fault/wall_clock.h"

namespace tessera::test {
namespace {

// Jumps by days, back and forth, for all processes and the store: deadlines, leases and versions do not depend on it.
using WallClockJumps = JobsTest;

TEST_F(WallClockJumps, AndTheTransfersGoOn) {
  constexpr int64_t kTransfers = 100;
  const WallClock clock;
  const auto transfer = [=](const Side& side) {
    return [=](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kTransfers; ++version) {
        if (side.sends) fill(side, tensor, version);
        const int64_t done = (side.sends ? batch.send(version, kPatience) : batch.recv({}, kPatience)).wait();
        if (done != version || !holds(side, tensor, version)) return 5;
      }
      return 0;
    };
  };
  for (const Side& side : {trainer(0), trainer(1), inference(0), inference(1)}) start(side, transfer(side));
  const auto before = std::chrono::system_clock::now();
  clock.jump(std::chrono::hours(24));
  EXPECT_GT(std::chrono::system_clock::now() - before, std::chrono::hours(23));
  std::atomic<bool> over = false;
  std::thread jumps([&] {
    std::mt19937_64 random(1);
    while (!over) {
      clock.jump(std::chrono::hours(static_cast<int64_t>(random() % 2000) - 1000));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  expect_all_well();
  over = true;
  jumps.join();
}

// --- the store -----------------------------------------------------------------------------------

TEST_F(Hazard, TheStoreIsRestartedInTheMidstOfARegistration) {
  const Signal joined;
  const auto transfer = [](const Side& side) {
    return [=](Batch& batch, std::vector<float>& tensor) {
      if (side.sends) fill(side, tensor, kVersion);
      (side.sends ? batch.send(kVersion) : batch.recv()).wait();
      return side.sends || holds(side, tensor, kVersion) ? 0 : 5;
    };
  };
  for (const Side& side : {trainer(0), trainer(1), inference(0)}) start(side, transfer(side));
  start("watcher", [&] {
    for (const char* rank : {"trainer/0", "trainer/1", "inference/0"})
      open_store(store_)->wait_for(
          store_key("default", "pair", std::string("weights/") + rank),
          [](const StoreView& items) { return !items.empty(); }, hang_limit());
    joined.raise();
    return 0;
  });
  joined.wait();
  group_.kill_store();
  group_.start_store(store_);
  start(inference(1), transfer(inference(1)));
  expect_all_well();
}

TEST_F(Hazard, TheStoreIsRestartedInTheMidstOfTransfers) {
  constexpr int64_t kTransfers = 20;
  const Signal begun;
  for (const Side& side : {trainer(0), trainer(1), staged(inference(0)), staged(inference(1))})
    start(side, [=, &begun](Batch& batch, std::vector<float>& tensor) {
      for (int64_t version = 1; version <= kTransfers; ++version) {
        if (side.sends) fill(side, tensor, version);
        const auto transfer = [&] {
          try {
            (side.sends ? batch.send(version, kPatience) : batch.recv(version, kPatience)).wait();
            return true;
          } catch (const Error& error) {
            if (error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kPeerLost) return false;
            throw;
          }
        };
        while (!transfer()) continue;
        REQUIRE_HERE(side.sends || (batch.version() >= version && holds(side, tensor, batch.version())));
        if (version == 3) begun.raise();
      }
      return 0;
    });
  begun.wait();
  group_.kill_store();
  group_.start_store(store_);
  expect_all_well();
}

TEST_F(Hazard, AStoreThatStandsStillKeepsNobodyFromStopping) {
  const Signal open, hangs;
  const pid_t trainer_0 = start("trainer/0", [&] {
    std::stop_source stop;
    Bus bus({.job = "trainer", .store = store_, .threads = 1, .stop = stop.get_token()});
    open.raise();
    hangs.wait();
    const std::jthread stopper([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      stop.request_stop();
    });
    const Deadline soon = Deadline::after(hang_limit() / 2);
    try {
      bus.pair({.name = "weights", .peer = "inference"});
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      REQUIRE_HERE(error.code() == ErrorCode::kCancelled && !soon.passed());
      return 0;
    }
    return 6;
  });
  open.wait();
  stop_process(group_.store_pid());
  hangs.raise();
  const Outcome& outcome = of(trainer_0);
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  ::kill(group_.store_pid(), SIGCONT);
}

// --- what the machine refuses --------------------------------------------------------------------

TEST_F(Hazard, MemoryThatIsRefusedEndsTheRegistrationWithALine) {
  expect_taken_after("inference/0 without memory", [this] {
    REQUIRE_HERE(forbid_system_call(SYS_fallocate, ENOSPC));  // as on a machine without memory
    const std::string error = error_of([&] { take(store_); });
    std::fprintf(stderr, "%s\n", error.c_str());
    REQUIRE_HERE(error.starts_with("resource-exhausted: ") && error.find("bytes") != std::string::npos);
    return 0;
  });
}

// Runs `call` with as many descriptors as `pid` has, and with one more in each further try, until there are enough. Its
// error must say that descriptors are missing, or contain one of `others`.
int with_few_descriptors(pid_t pid, const std::function<void()>& call, const std::vector<std::string>& others) {
  rlimit limit{};
  ::prlimit(pid, RLIMIT_NOFILE, nullptr, &limit);
  const auto open_files = [=] { return Footprint::of(pid).fds; };
  const size_t before = open_files();  // may be a few too many if the process is still closing something
  for (rlim_t more = 0; more < 60; ++more) {
    const rlimit few{.rlim_cur = before + more, .rlim_max = limit.rlim_max};
    ::prlimit(pid, RLIMIT_NOFILE, &few, nullptr);
    std::string error = "(went well)";
    try {
      call();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    ::prlimit(pid, RLIMIT_NOFILE, &limit, nullptr);
    std::fprintf(stderr, "%d more: %s\n", static_cast<int>(more), error.c_str());
    const Deadline deadline = soon();
    size_t after = open_files();
    for (; after > before && !deadline.passed(); after = open_files()) std::this_thread::yield();
    REQUIRE_HERE(after <= before);
    if (error == "(went well)") return more > 0 ? 0 : 6;
    const auto says = [&](const std::string& what) { return error.find(what) != std::string::npos; };
    REQUIRE_HERE(says("open files") || std::ranges::any_of(others, says));
  }
  return 7;
}

#ifdef __SANITIZE_ADDRESS__
constexpr const char* kNeedsDescriptors =
    "without a descriptor, the sanitizer's check of an object's type fails: it opens a pipe";
#else
constexpr const char* kNeedsDescriptors = nullptr;
#endif

TEST_F(Hazard, DescriptorsThatRunOutAtAReceiverEndTheCallWithALine) {
  if (kNeedsDescriptors) GTEST_SKIP() << kNeedsDescriptors;
  expect_taken_after("inference/0 with few descriptors", [this] {
    SharedHeap::process().allocate(1);  // the heap keeps an arena from now on
    return with_few_descriptors(::getpid(), [this] { take_whole(kShort); }, {"waited"});
  });
}

// If the sender cannot accept a caller, each waits for the other.
TEST_F(Hazard, DescriptorsThatRunOutAtASenderEndTheCallWithALine) {
  if (kNeedsDescriptors) GTEST_SKIP() << kNeedsDescriptors;
  const Shared<std::atomic<bool>> sent;
  const pid_t sender = start("trainer/0 with few descriptors", [&] {
    SharedHeap::process().allocate(1);
    const int outcome = with_few_descriptors(::getpid(), [this] { give(store_, kShort); }, {"inference/0", "waited"});
    *sent = true;
    return outcome;
  });
  start("inference/0", [&] {
    bool taken = false;
    while (!*sent) {  // goes on after it has taken a version that its sender has not completed
      try {
        taken = take(store_, kShort) == 0 || taken;
      } catch (const Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
    }
    return taken ? 0 : 6;
  });
  EXPECT_EQ(of(sender, 6 * hang_limit()).status, 0) << of(sender).output;
  expect_all_well();
}

TEST_F(Hazard, DescriptorsThatRunOutAtAnAgentEndTheCallWithALine) {
  if (kNeedsDescriptors) GTEST_SKIP() << kNeedsDescriptors;
  const Shared<std::atomic<bool>> over;
  const pid_t agent = start_agent("inference", 0);
  const Side offers = staged(trainer(0, 1));
  start(offers, [&](Batch& batch, std::vector<float>& tensor) {
    fill(offers, tensor, kVersion);
    batch.send(kVersion).wait();
    while (!*over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  });
  const pid_t worker = start("the worker of inference/0", [&] {
    take_whole(kPatience, "daemon");  // the agent keeps what it makes for the first transfer
    return with_few_descriptors(agent, [&] { take_whole(kShort, "daemon"); }, {"the agent", "trainer/0", "waited"});
  });
  EXPECT_EQ(of(worker, 12 * hang_limit()).status, 0) << of(worker).output;
  *over = true;
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
