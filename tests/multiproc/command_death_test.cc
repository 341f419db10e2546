// Command queues between processes of which one is killed in the middle of a stream of commands. The survivor ends
// within its deadline and continues over a new queue; what was acknowledged was executed, and nothing twice.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <optional>
#include <random>
#include <set>

#include "base/event_loop.h"
#include "base/fail.h"
#include "base/testing.h"
#include "command/client.h"
#include "command/server.h"
#include "tests/support/harness.h"
#include "tests/support/jobs.h"

namespace tessera::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kRounds = 4;
#else
constexpr uint64_t kRounds = 30;
#endif

enum Type : uint16_t { kNow = 1, kLater = 2, kNever = 3 };

constexpr uint64_t kMostIds = 1 << 16;

// The state of each command, whoever dies: in memory that all processes of a round share.
struct Journal {
  std::array<std::atomic<uint8_t>, kMostIds> executed;
  std::array<std::atomic<uint8_t>, kMostIds> acknowledged;
};

// One queue and the journal of what goes over it. Made by the test, used by the processes that it starts.
class Line {
 public:
  explicit Line(uint64_t incarnation, Journal* shared = nullptr)
      : memory_(CommandMemory::create(incarnation, {.commands = 8, .replies = 16})), own_(shared == nullptr) {
    if (own_) {
      void* data = ::mmap(nullptr, sizeof(Journal), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
      if (data == MAP_FAILED) fail_errno("mmap");
      shared = new (data) Journal{};
    }
    journal_ = shared;
    inherited_ = ::dup(memory_->fd());
  }
  ~Line() {
    ::close(inherited_);
    if (own_) ::munmap(journal_, sizeof(Journal));
  }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  uint64_t incarnation() const { return memory_->incarnation(); }
  // In a process of the round.
  std::shared_ptr<CommandMemory> open() const { return CommandMemory::open(UniqueFd(::dup(inherited_)), "the test"); }
  Journal& journal() const { return *journal_; }

 private:
  std::shared_ptr<CommandMemory> memory_;
  bool own_;
  Journal* journal_;
  int inherited_;
};

// This process is killed within the next milliseconds, wherever it is by then.
void die_soon(std::mt19937_64& random) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer;
  const itimerspec when{.it_interval = {},
                        .it_value = {.tv_sec = 0, .tv_nsec = 1 + static_cast<long>(random() % 3'000'000)}};
  if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 || ::timer_settime(timer, 0, &when, nullptr) != 0)
    fail_errno("timer");
}

// Calls `on_death` on a separate thread once the process has died.
class Watch {
 public:
  Watch(pid_t pid, const std::function<void()>& on_death)
      : pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))), loop_("watch") {
    if (!pidfd_) {  // dead already
      on_death();
      return;
    }
    loop_.add_fd(pidfd_.get(), EPOLLIN, [this, on_death](uint32_t) {
      loop_.remove_fd(pidfd_.get());
      on_death();
    });
    loop_.start();
  }

 private:
  UniqueFd pidfd_;
  EventLoop loop_;
};

const Status kDied(ErrorCode::kPeerLost, "the test has killed it");

class Agent {
 public:
  // `at_first` is called when the first command comes.
  explicit Agent(std::function<void()> at_first = {}) : at_first_(std::move(at_first)) { later_.start(); }

  void serve(const Line& line) {
    auto& log = logs_[line.incarnation()];
    if (!log) log = std::make_shared<CommandLog>(line.incarnation());
    server_.reset();
    server_.emplace(
        line.open(), log, "the client",
        [this, &journal = line.journal()](const Command& command, Replier& replier) {
          if (at_first_) std::exchange(at_first_, nullptr)();
          journal.executed[command.id]++;
          execute(command, replier);
        },
        [this](const Status&) { ended_.raise(); });
  }
  CommandServer& server() { return *server_; }
  void await_end() const { ended_.wait(); }

 private:
  void execute(const Command& command, Replier& replier) {
    if (command.type == kNow) return replier.succeed(command.payload);
    const auto owed = std::make_shared<Replier>(std::move(replier));
    if (command.type == kNever) return never_.push_back(owed);
    later_.post(
        [owed, payload = std::vector(command.payload.begin(), command.payload.end())] { owed->succeed(payload); });
  }

  std::function<void()> at_first_;
  std::map<uint64_t, std::shared_ptr<CommandLog>> logs_;
  std::vector<std::shared_ptr<Replier>> never_;
  EventLoop later_{"later"};
  Signal ended_;
  std::optional<CommandServer> server_;
};

// A client's stream of commands, several at a time, awaited in any order.
class Stream {
 public:
  Stream(CommandClient& client, Journal& journal, std::mt19937_64& random)
      : client_(client), journal_(journal), random_(random) {}

  // Until `most` are done or the queue has ended.
  void run(uint64_t most) {
    for (uint64_t posted = 0; posted < most && client_.status().ok();) {
      for (uint64_t burst = 1 + random_() % 10; burst > 0 && posted < most; --burst, ++posted)
        if (!post(random_() % 4 == 0 ? kLater : kNow)) posted = most;
      while (calls_.size() > random_() % 8) take(random_() % calls_.size());
    }
    while (!calls_.empty()) take(0);
  }
  // Sleeps on a command that is never answered.
  void hang() {
    if (post(kNever)) take(0);
  }
  void repeat(uint64_t id) {
    calls_.push_back(client_.repeat(id, kNow, std::as_bytes(std::span(&id, 1)), deadline_));
    take(0);
  }

  const std::set<uint64_t>& unknown() const { return unknown_; }

 private:
  // False if the queue has ended.
  bool post(Type type) {
    const uint64_t id = client_.next_id();
    try {
      calls_.push_back(client_.post(type, std::as_bytes(std::span(&id, 1)), deadline_));
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPeerLost) throw;
      return false;
    }
  }
  void take(size_t at) {
    std::swap(calls_[at], calls_.back());
    CommandCall call = std::move(calls_.back());
    calls_.pop_back();
    try {
      const auto result = call.wait(deadline_);
      uint64_t echoed = 0;
      if (result.size() != sizeof echoed) fail_internal("a result of {} bytes", result.size());
      std::memcpy(&echoed, result.data(), sizeof echoed);
      if (echoed != call.id()) fail_internal("{} has the result of {}", call.id(), echoed);
      journal_.acknowledged[call.id()]++;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPeerLost) throw;
      unknown_.insert(call.id());
    }
  }

  CommandClient& client_;
  Journal& journal_;
  std::mt19937_64& random_;
  const Deadline deadline_ = Deadline::after(hang_limit());
  std::vector<CommandCall> calls_;
  std::set<uint64_t> unknown_;
};

size_t mapped_queues() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:tessera-commands") != std::string::npos;
  return count;
}

// `body` leaves no queues or descriptors behind in the process.
int without_leaks(const std::function<void()>& body) {
  const size_t fds = open_fds(), queues = mapped_queues();
  body();
  REQUIRE_HERE(open_fds() == fds);
  REQUIRE_HERE(mapped_queues() == queues);
  return 0;
}

void expect_sound(const Journal& journal) {
  for (uint64_t id = 0; id < kMostIds; ++id) {
    ASSERT_LE(journal.executed[id], 1) << "command " << id << " was executed again";
    ASSERT_LE(journal.acknowledged[id], journal.executed[id]) << "command " << id << " was acknowledged, not executed";
  }
}

uint64_t acknowledged(const Journal& journal) {
  uint64_t count = 0;
  for (const auto& of_one : journal.acknowledged) count += of_one;
  return count;
}

void expect_ends(ProcessGroup& group, const std::string& victim) {
  for (const Outcome& outcome : group.wait(2 * hang_limit()))
    EXPECT_EQ(outcome.status, outcome.name == victim ? -SIGKILL : 0) << outcome.name << ": " << outcome.output;
}

constexpr uint64_t kMany = kMostIds - 64;
constexpr uint64_t kSome = 200;

// The number of commands before the client waits for one that is never answered; in every other round it sleeps when
// death comes.
uint64_t length_of(uint64_t round, std::mt19937_64& random) {
  return round % 2 == 0 ? kMany : random() % kSome;
}

int serve_once(const Line& line) {
  return without_leaks([&] {
    Agent agent;
    agent.serve(line);
    agent.await_end();
  });
}

TEST(CommandDeath, AClientWhoseAgentIsKilledGoesOnWithAnother) {
  for (uint64_t seed = 1; seed <= kRounds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Line line(7), next(7);
    ProcessGroup group;
    std::mt19937_64 random(seed);
    const uint64_t length = length_of(seed, random);
    const pid_t agent = group.start("agent", [&] {
      Agent killed([&] { die_soon(random); });
      killed.serve(line);
      while (true) ::pause();
      return 0;
    });
    group.start("client", [&, agent] {
      return without_leaks([&] {
        std::optional<CommandClient> client(std::in_place, line.open(), "the agent");
        {
          const Watch watch(agent, [&] { client->close(kDied); });
          Stream stream(*client, line.journal(), random);
          stream.run(length);
          stream.hang();
        }
        const uint64_t first_id = client->next_id();
        client.emplace(next.open(), "the next agent", first_id);
        Stream(*client, next.journal(), random).run(kSome);
      });
    });
    group.start("next agent", [&] { return serve_once(next); });
    expect_ends(group, "agent");
    expect_sound(line.journal());
    expect_sound(next.journal());
    EXPECT_EQ(acknowledged(next.journal()), kSome);
  }
}

TEST(CommandDeath, AnAgentWhoseClientIsKilledServesTheNext) {
  for (uint64_t seed = 1; seed <= kRounds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Line line(7), next(8);
    ProcessGroup group;
    std::mt19937_64 random(seed);
    const uint64_t length = length_of(seed, random);
    const pid_t client = group.start("client", [&] {
      CommandClient killed(line.open(), "the agent");
      Stream stream(killed, line.journal(), random);
      stream.run(1);
      die_soon(random);
      stream.run(length);
      stream.hang();
      return 0;
    });
    group.start("agent", [&, client] {
      return without_leaks([&] {
        Agent agent;
        agent.serve(line);
        {
          const Watch watch(client, [&] { agent.server().close(kDied); });
          agent.await_end();
        }
        agent.serve(next);
        agent.await_end();
      });
    });
    group.start("next client", [&] {
      return without_leaks([&] {
        CommandClient client_of_next(next.open(), "the agent");
        Stream(client_of_next, next.journal(), random).run(kSome);
      });
    });
    expect_ends(group, "client");
    expect_sound(line.journal());
    expect_sound(next.journal());
    EXPECT_EQ(acknowledged(next.journal()), kSome);
  }
}

// Neither dies, but the queue is given up in the middle: the client repeats commands whose outcome it does not know.
TEST(CommandDeath, WhatIsRepeatedOverANewQueueIsExecutedOnce) {
  for (uint64_t seed = 1; seed <= kRounds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Line line(7), next(7, &line.journal());
    ProcessGroup group;
    std::mt19937_64 random(seed);
    group.start("agent", [&] {
      return without_leaks([&] {
        Agent agent;
        for (const Line* served : {&line, &next}) {
          agent.serve(*served);
          agent.await_end();
        }
      });
    });
    group.start("client", [&] {
      return without_leaks([&] {
        CommandClient client(line.open(), "the agent");
        Stream stream(client, line.journal(), random);
        {
          EventLoop loop("closer");
          loop.add_timer_after(std::chrono::microseconds(random() % 3000), [&] { client.close(kDied); });
          loop.start();
          stream.run(kMany);
        }
        CommandClient again(next.open(), "the agent", client.next_id());
        Stream repeats(again, line.journal(), random);
        for (const uint64_t id : stream.unknown()) repeats.repeat(id);
        repeats.run(kSome);
        const uint64_t posted = again.next_id() - 1;
        if (acknowledged(line.journal()) != posted)
          fail(ErrorCode::kDataLoss, "{} of {} were acknowledged"_message, acknowledged(line.journal()), posted);
      });
    });
    expect_ends(group, "nobody");
    expect_sound(line.journal());
  }
}

}  // namespace
}  // namespace tessera::test
