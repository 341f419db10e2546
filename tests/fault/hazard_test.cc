// One fault at a time: the store is restarted, memory or descriptors are refused, a peer is not what it should be. No
// call hangs, no staged version is mixed, nothing is left, and once the fault is over the transfer completes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/framing.h"
#include "base/runtime_dir.h"
#include "tessera/memory.h"
#include "tests/fault/wall_clock.h"
#include "tests/support/agents.h"
#include "tests/support/jobs.h"
#include "tests/support/raw_rank.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kVersion = 7;
constexpr Timeout kShort = std::chrono::seconds(2);

// Takes and sends whole versions, staged on both sides: a sender keeps its snapshot on offer.
class Hazard : public testing::Test {
 protected:
  void start(const Side& side, const std::function<int(Batch&, std::vector<float>&)>& body) {
    group_.start(side.job + "/" + std::to_string(side.rank), [=, this] { return with_batch(side, store_, body); });
  }
  // Offers kVersion until it is told that all is over, to one receiver after the other.
  void start_trainer(const Signal& over) {
    const Side side = staged(trainer(0, 1));
    start(side, [=, &over](Batch& batch, std::vector<float>& tensor) {
      fill(side, tensor, kVersion);
      batch.send(kVersion).wait();
      over.wait();
      return 0;
    });
  }
  static int take(const std::string& store, Timeout timeout = kPatience, const std::string& agent = "") {
    const Side side = staged(inference(0, 1));
    Bus bus({.job = side.job, .store = store, .agent = agent, .threads = 1, .timeout = timeout});
    Pair pair = bus.pair({.name = "weights", .peer = side.peer, .timeout = timeout});
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor);
    Batch batch = pair.accept("policy", {&spec, 1}, timeout, side.options);
    batch.recv({}, timeout).wait();
    return holds(side, tensor, kVersion) && !batch.torn() ? 0 : 5;
  }
  static void give(const std::string& store, Timeout timeout) {
    const Side side = trainer(0, 1);
    Bus bus({.job = side.job, .store = store, .threads = 1, .timeout = timeout});
    Pair pair = bus.pair({.name = "weights", .peer = side.peer, .timeout = timeout});
    std::vector<float> tensor = local_tensor(side);
    fill(side, tensor, kVersion);
    const TensorSpec spec = spec_of(side, tensor);
    pair.offer("policy", {&spec, 1}, timeout).send(kVersion, timeout).wait();
  }
  void take_whole(Timeout timeout, const std::string& agent = "") const {
    if (take(store_, timeout, agent) != 0) throw std::logic_error("another version, or a torn one");
  }
  static TensorSpec spec_of(const Side& side, std::vector<float>& tensor) {
    return {.name = side.name, .data = tensor.data(), .shape = side.shape, .layout = Layout::parse(side.layout)};
  }
  // What a sender sends once all is well again is taken by whom an earlier one has failed.
  void start_trainer_after(const Signal& failed) {
    failed.wait();
    start(trainer(0, 1), [](Batch& batch, std::vector<float>& tensor) {
      fill(trainer(0, 1), tensor, kVersion);
      batch.send(kVersion, kPatience).wait();
      return 0;
    });
  }
  // A process takes what is on offer before `faulty` runs, and another one afterwards.
  void expect_taken_after(const std::string& faulty, const std::function<int()>& body) {
    const Signal over;
    start_trainer(over);
    const auto run = [this](const std::string& name, const std::function<int()>& what) {
      const Outcome outcome = group_.wait_for(group_.start(name, what), 3 * hang_limit());
      EXPECT_EQ(outcome.status, 0) << name << ": " << outcome.output;
    };
    run("inference/0 before", [this] { return take(store_); });
    run(faulty, body);
    run("inference/0 afterwards", [this] { return take(store_); });
    over.raise();
    expect_all_well(group_);
  }

  ProcessGroup group_;
  std::string store_ = group_.start_store();
};

// By days, to and fro, for all processes and the store: no deadline, lease or order of versions goes by it.
TEST(WallClockJumps, AndTheTransfersGoOn) {
  constexpr int64_t kTransfers = 100;
  const WallClock clock;
  ProcessGroup group;
  const std::string store = group.start_store();
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
  for (const Side& side : {trainer(0), trainer(1), inference(0), inference(1)})
    group.start(fmt::format("{}/{}", side.job, side.rank), [=] { return with_batch(side, store, transfer(side)); });
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
  expect_all_well(group);
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
  group_.start("watcher", [&] {
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
  expect_all_well(group_);
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
  expect_all_well(group_);
}

TEST_F(Hazard, AStoreThatStandsStillKeepsNobodyFromStopping) {
  const Signal open, hangs;
  const pid_t trainer_0 = group_.start("trainer/0", [&] {
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
  const Outcome outcome = group_.wait_for(trainer_0, hang_limit());
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  ::kill(group_.store_pid(), SIGCONT);
}

// --- what the machine refuses --------------------------------------------------------------------

TEST_F(Hazard, MemoryThatIsRefusedEndsTheRegistrationWithALine) {
  expect_taken_after("inference/0 without memory", [this] {
    REQUIRE_HERE(forbid_system_call(SYS_fallocate, ENOSPC));  // as a full machine does
    const std::string error = error_of([&] { take(store_); });
    std::fprintf(stderr, "%s\n", error.c_str());
    REQUIRE_HERE(error.starts_with("resource-exhausted: ") && error.find("bytes") != std::string::npos);
    return 0;
  });
}

// Runs `call` with no more descriptors than `pid` has and, at each try, one more, until there are enough for all. What
// it fails with must say what the matter is, or be one of `others`.
int with_few_descriptors(pid_t pid, const std::function<void()>& call, const std::vector<std::string>& others) {
  rlimit limit{};
  ::prlimit(pid, RLIMIT_NOFILE, nullptr, &limit);
  const auto open_files = [=] { return Footprint::of(pid).fds; };
  const size_t before = open_files();  // or a few more than it keeps, if it is still ending something
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
    SharedHeap::process().allocate(1);  // which keeps an arena
    return with_few_descriptors(::getpid(), [this] { take_whole(kShort); }, {"waited"});
  });
}

// A caller that it cannot accept waits for it, and it for the caller.
TEST_F(Hazard, DescriptorsThatRunOutAtASenderEndTheCallWithALine) {
  if (kNeedsDescriptors) GTEST_SKIP() << kNeedsDescriptors;
  const Shared<std::atomic<bool>> sent;
  const pid_t sender = group_.start("trainer/0 with few descriptors", [&] {
    SharedHeap::process().allocate(1);
    const int outcome = with_few_descriptors(::getpid(), [this] { give(store_, kShort); }, {"inference/0", "waited"});
    *sent = true;
    return outcome;
  });
  group_.start("inference/0", [&] {
    bool taken = false;
    while (!*sent) {  // also after it has taken one whose sender has failed with it
      try {
        taken = take(store_, kShort) == 0 || taken;
      } catch (const Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
    }
    return taken ? 0 : 6;
  });
  const Outcome outcome = group_.wait_for(sender, 6 * hang_limit());
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  expect_all_well(group_);
}

TEST_F(Hazard, DescriptorsThatRunOutAtAnAgentEndTheCallWithALine) {
  if (kNeedsDescriptors) GTEST_SKIP() << kNeedsDescriptors;
  const Shared<std::atomic<bool>> over;
  AgentGroup agents(group_);
  const pid_t agent = agents.start_agent("inference", 0);
  const Side offers = staged(trainer(0, 1));
  const pid_t trainer_0 = group_.start("trainer/0", [&] {
    return with_batch(offers, store_, [&](Batch& batch, std::vector<float>& tensor) {
      fill(offers, tensor, kVersion);
      batch.send(kVersion).wait();
      while (!*over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return 0;
    });
  });
  const pid_t worker = group_.start("the worker of inference/0", [&] {
    take_whole(kPatience, "daemon");  // the agent keeps what it has made once
    return with_few_descriptors(agent, [&] { take_whole(kShort, "daemon"); }, {"the agent", "trainer/0", "waited"});
  });
  const Outcome taken = group_.wait_for(worker, 12 * hang_limit());
  EXPECT_EQ(taken.status, 0) << taken.output;
  *over = true;
  const Outcome sent = group_.wait_for(trainer_0, hang_limit());
  EXPECT_EQ(sent.status, 0) << sent.output;
  agents.wait(2 * hang_limit());
}

// --- peers ---------------------------------------------------------------------------------------

// A fork without fork handlers keeps what its parent had open: its sockets, and the lock of its runtime folder.
TEST_F(Hazard, ASenderDiesThoughAForkHoldsItsSockets) {
  const Shared<std::atomic<pid_t>> orphan;
  const Signal died;
  const pid_t first = group_.start("first", [&] {
    return with_batch(trainer(0, 1), store_, [&](Batch&, std::vector<float>&) {
      const auto child = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
      if (child == 0)
        while (true) ::pause();
      *orphan = child;
      return ::kill(::getpid(), SIGKILL);
    });
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    const std::string error = error_of([&] { batch.recv().wait(); });
    died.raise();
    std::fprintf(stderr, "%s\n", error.c_str());
    REQUIRE_HERE(error.find("trainer/0") != std::string::npos && error.find("died") != std::string::npos);
    batch.recv({}, kPatience).wait();
    return holds(inference(0, 1), tensor, kVersion) ? 0 : 5;
  });
  EXPECT_EQ(group_.wait_for(first, hang_limit()).status, -SIGKILL);
  start_trainer_after(died);
  for (const Outcome& outcome : group_.wait(2 * hang_limit()))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  EXPECT_EQ(::kill(*orphan, SIGKILL), 0);
  await_end(*orphan);
  group_.start("the next process", [] {
    RuntimeDir::open();
    return 0;
  });
  expect_all_well(group_);
}

// To whom has come to read: an arena, which is not sealed, with the tensor in it. Returns once it is mapped.
UniqueFd lend_arena(RawRank& raw) {
  constexpr size_t kBytes = 64 * 48 * sizeof(float);
  UniqueFd arena(::memfd_create("lent", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (::ftruncate(arena.get(), kBytes) != 0) throw Error(ErrorCode::kInternal, "ftruncate");
  Attached attached;
  attached.arenas.push_back({.id = 1, .bytes = kBytes});
  attached.places.push_back({.memory = {.kind = MemoryDesc::Kind::kShared, .arena = 1, .offset = 0, .bytes = kBytes},
                             .origin = 0,
                             .strides = {48 * sizeof(float), sizeof(float)}});
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(arena.get()));
  raw.send(attached, std::move(fds));
  (void)raw.next<Prepare>();
  return arena;
}

// While it is read.
TEST_F(Hazard, ASenderShrinksItsMemory) {
  const Signal failed;
  const pid_t liar = group_.start("trainer/0 that shrinks", [&] {
    const Side side = trainer(0, 1);
    RawRank raw(store_, side.job, side.peer, 0, 1);
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor);
    raw.exchange({&spec, 1}, true);
    raw.serve(true);
    raw.await_caller();
    const UniqueFd arena = lend_arena(raw);
    raw.send(Prepared{});
    raw.send(bus::Offer{.version = 1});
    const auto hold = raw.next<bus::Hold>();
    raw.send(bus::Held{.version = 1, .epoch = hold.epoch});
    const auto take = raw.next<bus::Take>();
    REQUIRE_HERE(::ftruncate(arena.get(), 0) == 0);
    raw.send(bus::Grant{.version = 1, .epoch = take.epoch});
    const auto done = raw.until<bus::Done>();
    REQUIRE_HERE(!done.status.ok());
    return 0;
  });
  start(staged(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    const std::string error = error_of([&] { batch.recv({}, kPatience).wait(); });
    std::fprintf(stderr, "%s\n", error.c_str());
    REQUIRE_HERE(error.find("trainer/0") != std::string::npos);
    REQUIRE_HERE(batch.version() == 0 && !batch.torn());
    REQUIRE_HERE(std::ranges::count(tensor, 0.0f) == std::ssize(tensor));
    failed.raise();
    while (!went_well([&] { batch.recv({}, kPatience).wait(); })) continue;
    return holds(inference(0, 1), tensor, kVersion) ? 0 : 5;
  });
  EXPECT_EQ(group_.wait_for(liar, 2 * hang_limit()).status, 0);
  start_trainer_after(failed);
  expect_all_well(group_);
}

// A puller by hand, which can say anything at any step.
class Puller {
 public:
  static constexpr int kSteps = 5;
  explicit Puller(const RawRank& raw) : raw_(raw), socket_(connect_unix(raw.peer(0).address, soon())) {}
  void go_to(int step) {
    if (step > 0) ask(raw_.hello(), kCode<Welcome>);
    if (step > 1) {
      reader_.set_limits({.payload_bytes = kMaxMessageBytes, .fds = kMaxFdsPerMessage});
      ask(Attach{.pair = "weights", .batch = "policy", .purpose = Attach::Purpose::kPull, .session = raw_.session()},
          kCode<Attached>);
    }
    if (step > 2) ask(Prepare{.ring = false, .skipped = {}}, kCode<Prepared>);
    if (step > 3) await(kCode<bus::Offer>);
    if (step > 4) ask(bus::Take{.version = kVersion, .epoch = 1}, kCode<bus::Grant>);
  }
  void say(uint16_t type, std::span<const std::byte> payload) {
    writer_.push(type, payload);
    writer_.flush(socket_.get(), soon());
  }
  void say_raw(std::span<const std::byte> bytes) { send_some(socket_.get(), bytes); }
  void await_end() {
    try {
      while (true) wait_frame(socket_.get(), reader_, soon());
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDeadlineExceeded) throw;
    }
  }

 private:
  template <typename Message>
  void ask(const Message& message, uint16_t answer) {
    say(kCode<Message>, message_bytes(message));
    await(answer);
  }
  void await(uint16_t type) {
    while (wait_frame(socket_.get(), reader_, soon()).type != type) continue;
  }

  const RawRank& raw_;
  UniqueFd socket_;
  FrameReader reader_{kBusMagic, {.payload_bytes = kMaxHelloBytes, .fds = 0}};
  FrameWriter writer_{kBusMagic, kProtocolMax, 1 << 20};
};

TEST_F(Hazard, AReceiverSendsGarbageAtEveryStep) {
  expect_taken_after("inference/0 that talks nonsense", [this] {
    std::mt19937_64 random(1);
    std::vector<std::byte> noise(200);
    std::ranges::generate(noise, [&] { return static_cast<std::byte>(random()); });
    const std::vector<std::function<void(Puller&)>> garbage{
        [&](Puller& puller) { puller.say_raw(noise); },
        [&](Puller& puller) { puller.say(999, noise); },
        [&](Puller& puller) { puller.say(kCode<bus::Take>, std::span(noise).first(3)); },
        [&](Puller& puller) { puller.say(kCode<Hello>, noise); },
    };
    const Side side = staged(inference(0, 1));
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor);
    RawRank raw(store_, side.job, side.peer, 0, 1);
    for (int step = 0; step <= Puller::kSteps; ++step)
      for (const auto& say : garbage) {
        raw.exchange({&spec, 1}, false);
        Puller puller(raw);
        puller.go_to(step);
        say(puller);
        puller.await_end();
        raw.give_up();
      }
    return 0;
  });
}

// Bytes that are no message of that type.
template <auto type>
struct Nonsense {
  static constexpr auto kType = type;
  std::span<const std::byte> payload;
  static void fields(auto& f, auto& self) {
    for (const std::byte byte : self.payload) f({}, std::to_integer<uint8_t>(byte));
  }
};

// Does what a sender has to do up to that step.
void serve_up_to(int step, RawRank& raw) {
  raw.serve(true);
  raw.await_caller();
  if (step == 0) return;
  (void)lend_arena(raw);
  if (step == 1) return;
  raw.send(Prepared{});
  if (step == 2) return;
  raw.send(bus::Offer{.version = 1});
  const auto hold = raw.next<bus::Hold>();
  if (step == 3) return;
  raw.send(bus::Held{.version = 1, .epoch = hold.epoch});
  const auto take = raw.next<bus::Take>();
  if (step == 4) return;
  raw.send(bus::Grant{.version = 1, .epoch = take.epoch});
}

TEST_F(Hazard, ASenderSendsGarbageAtEveryStep) {
  constexpr int kSteps = 6;
  using Say = std::function<void(RawRank&)>;
  std::mt19937_64 random(1);
  std::vector<std::byte> noise(200);
  std::ranges::generate(noise, [&] { return static_cast<std::byte>(random()); });
  const std::vector<Say> garbage{
      [&](RawRank& raw) { raw.send(Nonsense<static_cast<bus::VersionMessage>(999)>{noise}); },
      [&](RawRank& raw) { raw.send(Nonsense<Attached::kType>{noise}); },
      [&](RawRank& raw) { raw.send(Nonsense<bus::Offer::kType>{std::span(noise).first(3)}); },
      [&](RawRank& raw) { raw.send(Nonsense<bus::Digests::kType>{noise}); },
      [&](RawRank& raw) { raw.send(bus::Offer{.version = 1, .epoch = 77}); },  // in a slot that there is not
  };
  const size_t kCases = kSteps * garbage.size();
  const Signal failed;
  const Signal next;
  const pid_t liar = group_.start("trainer/0 that talks nonsense", [&] {
    const Side side = trainer(0, 1);
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor);
    for (size_t i = 0; i < kCases; ++i) {
      {
        RawRank raw(store_, side.job, side.peer, 0, 1);
        raw.exchange({&spec, 1}, true);
        serve_up_to(static_cast<int>(i / garbage.size()), raw);
        garbage[i % garbage.size()](raw);
        failed.wait();
      }
      next.raise();
    }
    return 0;
  });
  const pid_t victim = group_.start("inference/0", [&] {
    for (size_t i = 0; i < kCases; ++i) {
      const std::string error = error_of([&] { take(store_); });
      failed.raise();
      if (error.find("trainer/0") == std::string::npos) {
        std::fprintf(stderr, "case %zu: %s\n", i, error.c_str());
        return 6;
      }
      next.wait();
    }
    return 0;
  });
  for (const pid_t pid : {liar, victim}) {
    const Outcome outcome = group_.wait_for(pid, 3 * hang_limit());
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  }
  const Signal over;
  start_trainer(over);
  const Outcome outcome = group_.wait_for(group_.start("inference/0", [this] { return take(store_); }), hang_limit());
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  over.raise();
  expect_all_well(group_);
}

// Root may open the other's socket, and is told by whom it is answered; the other may not open root's.
class OtherUser : public Hazard, public testing::WithParamInterface<const char*> {};

TEST_P(OtherUser, IsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start another user's process";
  const std::string other = GetParam();
  constexpr uid_t kNobody = 65534;
  const TemporaryFolder folder;
  ASSERT_EQ(::chown(folder.path().c_str(), kNobody, kNobody), 0);
  const auto run = [&](const Side& side) {
    return group_.start(side.job, [=, this, &folder] {
      if (side.job == other) {
        ::setenv("TESSERA_RUNTIME_DIR", folder.path().c_str(), 1);
        if (::setresuid(kNobody, kNobody, kNobody) != 0) return 6;
      }
      return with_batch(side, store_, [&](Batch& batch, std::vector<float>&) {
        (side.sends ? batch.send() : batch.recv()).wait();
        return 0;
      });
    });
  };
  const pid_t sender = run(trainer(0, 1));
  const Outcome receives = group_.wait_for(run(inference(0, 1)), hang_limit());
  EXPECT_EQ(receives.status, status_of(ErrorCode::kUnavailable)) << receives.output;
  EXPECT_THAT(receives.output, AllOf(HasSubstr("trainer/0"), HasSubstr("run both jobs as one user")));
  const Outcome sends = group_.wait_for(sender, hang_limit());
  EXPECT_NE(sends.status, 0);
  EXPECT_THAT(sends.output, HasSubstr("inference/0"));
  const Signal over;
  start_trainer(over);
  const Outcome taken = group_.wait_for(group_.start("inference/0", [this] { return take(store_); }), hang_limit());
  EXPECT_EQ(taken.status, 0) << taken.output;
  over.raise();
  expect_all_well(group_);
}
INSTANTIATE_TEST_SUITE_P(, OtherUser, testing::Values("trainer", "inference"),
                         [](const auto& job) { return std::string(job.param); });

}  // namespace
}  // namespace tessera::test
