// A thousand connections that never say who they are cost a listener little and end within seconds, while honest peers
// come and go as before.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "bus/daemon/messages.h"
#include "bus/registration/records.h"
#include "peer/message.h"
#include "store/protocol.h"
#include "tessera/store.h"
#include "tests/support/agents.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

constexpr int kStrangers = 1000;
constexpr size_t kKept = 256 + 16;  // unknown connections, and what an honest peer takes
constexpr size_t kBytesOfEach = 6 << 10;
constexpr size_t kSlack = 3 << 20;  // for anything else in the process

enum class Listener { kRank, kAgent, kStore };
enum class Says { kNothing, kHalfAHeader, kHalfAFrame, kGarbage };
constexpr int kKindsOfWords = 4;

size_t resident_bytes(pid_t pid) {
  size_t pages = 0, resident = 0;
  std::ifstream("/proc/" + std::to_string(pid) + "/statm") >> pages >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

bool comes_true(const std::function<bool()>& claim) {
  for (const Deadline deadline = Deadline::after(2 * hang_limit()); !claim();) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

class Strangers : public testing::TestWithParam<Listener>, protected TestJobs {
 protected:
  std::vector<std::byte> words(Says says) const {
    ByteWriter out;
    if (says == Says::kNothing) return {};
    if (says == Says::kGarbage) {
      for (int i = 0; i < 100; ++i) out.put(uint32_t{0xDEADBEEF});
      return out.take();
    }
    out.put(magic());
    out.put(uint16_t{1});
    out.put(uint16_t{1});
    if (says == Says::kHalfAHeader) return out.take();
    out.put(uint32_t{0});
    out.put(uint32_t{4000});  // of which 2000 come
    out.put(uint32_t{0});
    for (int i = 0; i < 500; ++i) out.put(uint32_t{0});
    return out.take();
  }
  uint32_t magic() const {
    switch (GetParam()) {
      case Listener::kRank:
        return kBusMagic;
      case Listener::kAgent:
        return bus::kAgentMagic;
      case Listener::kStore:
        break;
    }
    return store::kMagic;
  }
  UniqueFd connect() const {
    switch (GetParam()) {
      case Listener::kRank: {
        static const std::string key = bus::rank_key("default", "trainer", 0);
        static const std::string address =
            bus::read_record<bus::RankRecord>(key, open_store(store_)->get(key)->value).address;
        return connect_unix(address, soon());
      }
      case Listener::kAgent: {
        static const std::string address =
            RuntimeDir::living_files(RuntimeDir::default_root(), bus::agent_socket_name("default", "inference", 0))
                .front();
        return connect_unix(address, soon());
      }
      case Listener::kStore:
        break;
    }
    return connect_tcp(parse_host_port(store_.substr(std::string("tcp://").size())), soon());
  }
  static void send_all(const UniqueFd& socket, std::span<const std::byte> bytes) {
    try {
      if (!bytes.empty()) (void)send_some(socket.get(), bytes);
    } catch (const Error&) {
      // It has been closed already.
    }
  }
  static Deadline soon() { return Deadline::after(hang_limit()); }
};

// In a process of its own: connects to that process, and has `honest` do its work meanwhile.
int be_many(pid_t pid, const std::function<UniqueFd(Says)>& connect, const std::function<int()>& honest) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 4 * kStrangers);
  ::setrlimit(RLIMIT_NOFILE, &files);
  const uint32_t descriptors = Footprint::of(pid).fds;
  const size_t bytes = resident_bytes(pid);
  const auto more = [&] { return std::max(bytes, resident_bytes(pid)) - bytes; };
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < kStrangers; ++i) strangers.push_back(connect(static_cast<Says>(i % kKindsOfWords)));
  REQUIRE_HERE(comes_true([&] { return Footprint::of(pid).fds <= descriptors + kKept; }));
  const size_t held = more();
  REQUIRE_HERE(honest() == 0);
  REQUIRE_HERE(comes_true([&] { return Footprint::of(pid).fds <= descriptors; }));
  std::fprintf(stderr, "%zu KiB with them, %zu KiB after them\n", held >> 10, more() >> 10);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  REQUIRE_HERE(held <= kKept * kBytesOfEach + kSlack);
  REQUIRE_HERE(more() <= kSlack);
#endif
  return 0;
}

TEST_P(Strangers, CostLittleAndGo) {
  const Signal over;
  const pid_t agent = start_agent("inference", 0);
  const Side sender = staged(trainer(0, 1)), receiver = with_agent(inference(0, 1));
  const pid_t rank = start(sender, [&](Batch& batch, std::vector<float>& tensor) {
    fill(sender, tensor, 7);
    batch.send(7, kPatience).wait();
    while (!went_well([&] { over.wait(); })) continue;  // longer than its limit
    return 0;
  });
  // Which goes through all that listens here.
  const auto take = [&] {
    return with_batch(receiver, store_, [&](Batch& batch, std::vector<float>& tensor) {
      batch.recv({}, kPatience).wait();
      return holds(receiver, tensor, 7) ? 0 : 5;
    });
  };
  const pid_t first = start("inference/0", take);
  EXPECT_EQ(of(first).status, 0) << of(first).output;
  const Listener listener = GetParam();
  const pid_t pid = listener == Listener::kRank ? rank : listener == Listener::kAgent ? agent : group_.store_pid();
  const pid_t strangers = start("strangers", [&] {
    return be_many(
        pid,
        [this](Says says) {
          UniqueFd socket = connect();
          send_all(socket, words(says));
          return socket;
        },
        take);
  });
  EXPECT_EQ(of(strangers, 6 * hang_limit()).status, 0) << of(strangers).output;
  std::printf("%s", of(strangers).output.c_str());
  over.raise();
  expect_all_well();
}

std::string name_of(const testing::TestParamInfo<Listener>& info) {
  constexpr const char* kNames[] = {"ARank", "AnAgent", "AStore"};
  return kNames[static_cast<size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Of, Strangers, testing::Values(Listener::kRank, Listener::kAgent, Listener::kStore), name_of);

}  // namespace
}  // namespace tessera::test
