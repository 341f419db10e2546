// A peer misbehaves: it shrinks its memory, sends garbage, belongs to another user, or has left its sockets to a fork.
// No call hangs, no staged version is mixed, nothing is left behind, and the next transfer completes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <random>

#include "base/framing.h"
#include "base/runtime_dir.h"
#include "peer/raw_link_testing.h"
#include "tests/fault/hazard.h"
#include "tests/support/raw_rank.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// A fork without fork handlers keeps everything open that its parent had: sockets, and the lock of the runtime folder.
TEST_F(Hazard, ASenderDiesThoughAForkHoldsItsSockets) {
  const Shared<std::atomic<pid_t>> orphan;
  const Signal died;
  const pid_t first = start(trainer(0, 1), [&](Batch&, std::vector<float>&) {
    const auto child = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
    if (child == 0)
      while (true) ::pause();
    *orphan = child;
    return ::kill(::getpid(), SIGKILL);
  });
  start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    const std::string error = error_of([&] { batch.recv().wait(); });
    died.raise();
    std::fprintf(stderr, "%s\n", error.c_str());
    REQUIRE_HERE(error.find("trainer/0") != std::string::npos && error.find("died") != std::string::npos);
    batch.recv({}, kPatience).wait();
    return holds(inference(0, 1), tensor, kVersion) ? 0 : 5;
  });
  EXPECT_EQ(of(first).status, -SIGKILL);
  start_trainer_after(died);
  expect_all_well();
  EXPECT_EQ(::kill(*orphan, SIGKILL), 0);
  await_end(*orphan);
  start("the next process", [] {
    RuntimeDir::open();
    return 0;
  });
  expect_all_well();
  EXPECT_EQ(left_folders(), 0);
}

// Lends the caller an arena that is not sealed, with the tensor in it. Returns once the caller has mapped it.
UniqueFd lend_arena(RawRank& raw) {
  constexpr size_t kBytes = 64 * 48 * sizeof(float);
  UniqueFd arena(::memfd_create("lent", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (::ftruncate(arena.get(), kBytes) != 0) throw Error(ErrorCode::kInternal, "ftruncate");
  Attached attached;
  ByteWriter key;
  key.put(uint8_t{1});  // an arena
  key.put(uint32_t{1});
  key.put(uint64_t{kBytes});
  attached.keys.push_back({.transport = "shm", .device = DeviceKind::kHost, .bytes = key.take(), .fds = {}});
  attached.keys.back().fds.resize(1);
  attached.places.push_back({.memory = {.key = 0, .offset = 0, .bytes = kBytes},
                             .origin = 0,
                             .strides = {48 * sizeof(float), sizeof(float)}});
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(arena.get()));
  raw.send(attached, std::move(fds));
  (void)raw.next<Prepare>();
  return arena;
}

// It does so while it is read.
TEST_F(Hazard, ASenderShrinksItsMemory) {
  const Signal failed;
  const pid_t liar = start(trainer(0, 1), [&](RawRank& raw) {
    std::vector<float> tensor = local_tensor(trainer(0, 1));
    const TensorSpec spec = spec_of(trainer(0, 1), tensor.data());
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
    while (!went_well([&] { batch.recv({}, kAttempt).wait(); })) continue;
    return holds(inference(0, 1), tensor, kVersion) ? 0 : 5;
  });
  EXPECT_EQ(of(liar).status, 0) << of(liar).output;
  start_trainer_after(failed);
  expect_all_well();
}

// A puller whose messages the test writes: it can send anything at any step.
class Puller {
 public:
  static constexpr int kSteps = 5;
  explicit Puller(const RawRank& raw) : raw_(raw), link_(connect_unix(raw.peer(0).address, soon()), kLimits) {}
  void go_to(int step) {
    if (step > 0) ask(raw_.hello(), kCode<Welcome>);
    if (step > 1) {
      link_.set_stream(1);
      ask(Attach{.pair = "weights", .batch = "policy", .purpose = Attach::Purpose::kPull, .session = raw_.session()},
          kCode<Attached>);
    }
    if (step > 2) ask(Prepare{.stream = false, .skipped = {}}, kCode<Prepared>);
    if (step > 3) link_.await(kCode<bus::Offer>);
    if (step > 4) ask(bus::Take{.version = kVersion, .epoch = 1}, kCode<bus::Grant>);
  }
  RawLink& link() { return link_; }
  // Waits for the end of the link, or of the connection.
  void await_end() {
    try {
      while (link_.next_frame().type != kCode<Reject>) continue;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDeadlineExceeded) throw;
    }
  }

 private:
  template <typename Message>
  void ask(const Message& message, uint16_t answer) {
    link_.send(message);
    link_.await(answer);
  }

  static constexpr FrameLimits kLimits{.payload_bytes = kMaxMessageBytes, .fds = kMaxFdsPerMessage};
  const RawRank& raw_;
  RawLink link_;
};

TEST_F(Hazard, AReceiverSendsGarbageAtEveryStep) {
  expect_taken_after("inference/0 that talks nonsense", [this] {
    std::mt19937_64 random(1);
    std::vector<std::byte> noise(200);
    std::ranges::generate(noise, [&] { return static_cast<std::byte>(random()); });
    const std::vector<std::function<void(Puller&)>> garbage{
        [&](Puller& puller) { puller.link().send_raw(noise); },
        [&](Puller& puller) { puller.link().send(999, noise); },
        [&](Puller& puller) { puller.link().send(kCode<bus::Take>, std::span(noise).first(3)); },
        [&](Puller& puller) { puller.link().send(kCode<Hello>, noise); },
    };
    const Side side = staged(inference(0, 1));
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor.data());
    RawRank raw(store_, side);
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

// Bytes that are not a message of that type.
template <auto type>
struct Nonsense {
  static constexpr auto kType = type;
  std::span<const std::byte> payload;
  static void fields(auto& f, auto& self) {
    for (const std::byte byte : self.payload) f({}, std::to_integer<uint8_t>(byte));
  }
};

// Does what a sender must do up to that step.
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
      [&](RawRank& raw) { raw.send(bus::Offer{.version = 1, .slot = 77}); },  // in a slot that does not exist
  };
  const size_t kCases = kSteps * garbage.size();
  const Signal failed;
  const Signal next;
  const pid_t liar = start("trainer/0 that talks nonsense", [&] {
    const Side side = trainer(0, 1);
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor.data());
    for (size_t i = 0; i < kCases; ++i) {
      {
        RawRank raw(store_, side);
        raw.exchange({&spec, 1}, true);
        serve_up_to(static_cast<int>(i / garbage.size()), raw);
        garbage[i % garbage.size()](raw);
        failed.wait();
      }
      next.raise();
    }
    return 0;
  });
  const pid_t victim = start("inference/0", [&] {
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
  for (const pid_t pid : {liar, victim})
    EXPECT_EQ(of(pid, 3 * hang_limit()).status, 0) << of(pid).name << ": " << of(pid).output;
  const Signal over;
  start_trainer(over);
  const Outcome& outcome = of(start("inference/0", [this] { return take(store_); }));
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  over.raise();
  expect_all_well();
}

// Root may open the other user's socket, and then learns who answers. The other user may not open root's.
class OtherUser : public Hazard, public testing::WithParamInterface<const char*> {};

TEST_P(OtherUser, IsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start another user's process";
  const std::string other = GetParam();
  constexpr uid_t kNobody = 65534;
  const TemporaryFolder folder;
  ASSERT_EQ(::chown(folder.path().c_str(), kNobody, kNobody), 0);
  const auto run = [&](const Side& side) {
    return start(side.job, [=, this, &folder] {
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
  const Outcome& receives = of(run(inference(0, 1)));
  EXPECT_EQ(receives.status, status_of(ErrorCode::kUnavailable)) << receives.output;
  EXPECT_THAT(receives.output, AllOf(HasSubstr("trainer/0"), HasSubstr("run both jobs as one user")));
  const Outcome& sends = of(sender);
  EXPECT_NE(sends.status, 0);
  EXPECT_THAT(sends.output, HasSubstr("inference/0"));
  const Signal over;
  start_trainer(over);
  const Outcome& taken = of(start("inference/0", [this] { return take(store_); }));
  EXPECT_EQ(taken.status, 0) << taken.output;
  over.raise();
  expect_all_well();
}
INSTANTIATE_TEST_SUITE_P(, OtherUser, testing::Values("trainer", "inference"),
                         [](const auto& job) { return std::string(job.param); });

}  // namespace
}  // namespace tessera::test
