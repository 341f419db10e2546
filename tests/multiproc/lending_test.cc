// Tensors in private memory of workers with agent daemons: the workers serve them, and no second copy is kept.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "base/message.h"
#include "tests/support/fixture.h"
#include "tests/support/raw_rank.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Whether a thread of the process has that name.
bool has_thread(pid_t pid, const std::string& name) {
  for (const auto& thread : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid))) {
    std::string line;
    std::getline(std::ifstream(thread.path() / "comm"), line);
    if (line == name) return true;
  }
  return false;
}

void await_that(const std::function<bool()>& holds) {
  for (const Deadline deadline = Deadline::after(hang_limit()); !holds(); std::this_thread::yield())
    if (deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "what a test waits for does not come"_message);
}
void await_stop(pid_t pid) {
  await_that([&] {
    std::string stat;
    std::getline(std::ifstream(fmt::format("/proc/{}/stat", pid)), stat);
    return stat.find(") T ") != std::string::npos;
  });
}

// Shared memory that a process has mapped and touched.
size_t shared_bytes(pid_t pid) {
  std::ifstream smaps(fmt::format("/proc/{}/smaps", pid));
  if (!smaps) fail(ErrorCode::kUnavailable, "/proc/{}/smaps cannot be read"_message, pid);
  size_t bytes = 0;
  bool shared = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find('-') < line.find(' ')) shared = line.find("memfd:") != std::string::npos;
    if (shared && line.starts_with("Rss:")) bytes += std::stoull(line.substr(4)) << 10;
  }
  return bytes;
}

constexpr Index kRows = 4096;
constexpr Index kColumns = 2048;
constexpr size_t kTensorBytes = size_t{kRows * kColumns} * sizeof(float);  // 32 MiB

Side large(Side side, Mode mode) {
  side.shape = {kRows, kColumns};
  side.options.mode = mode;
  return with_agent(std::move(side));
}

class Lending : public JobsTest, public testing::WithParamInterface<std::pair<Mode, Mode>> {};

TEST_P(Lending, TakesTheMemoryOfSnapshotsAndStreamsAndNoMore) {
  const auto [sends, receives] = GetParam();
  const pid_t sender_agent = start_agent("trainer", 0);
  const pid_t receiver_agent = start_agent("inference", 0);
  // A staged sender has two snapshots, which a receiver maps, too; a staged receiver has its own.
  constexpr size_t kLittle = size_t{8} << 20;
  const size_t sender_most = (sends == Mode::kStaged ? 2 * kTensorBytes : 0) + kLittle;
  const size_t receiver_most = (receives == Mode::kStaged ? kTensorBytes : 0) + sender_most;
  // A lower bound shows that the memory is counted at all: the workers fill the snapshots.
  const size_t sender_least = sends == Mode::kStaged ? kTensorBytes : 0;
  const size_t receiver_least = receives == Mode::kStaged ? kTensorBytes : 0;
  Barrier taken;
  const Side sender = large(trainer(0, 1), sends);
  start(sender, [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 1; version <= 2; ++version) {
      fill(sender, tensor, version);
      batch.send(version).wait();
    }
    REQUIRE_HERE(shared_bytes(::getpid()) < sender_most);
    REQUIRE_HERE(shared_bytes(::getpid()) >= sender_least);
    REQUIRE_HERE(shared_bytes(sender_agent) < sender_most);
    taken.pass();
    return 0;
  });
  const Side receiver = large(inference(0, 1), receives);
  start(receiver, [&](Batch& batch, std::vector<float>& tensor) {
    for (int64_t version = 0; version < 2;) version = batch.recv(version + 1).wait();
    REQUIRE_HERE(holds(receiver, tensor, 2));
    REQUIRE_HERE(shared_bytes(::getpid()) < receiver_most);
    REQUIRE_HERE(shared_bytes(::getpid()) >= receiver_least);
    REQUIRE_HERE(shared_bytes(receiver_agent) < receiver_most);
    taken.pass();
    return 0;
  });
  taken.open();
  expect_all_well(3 * hang_limit());
}

INSTANTIATE_TEST_SUITE_P(Modes, Lending,
                         testing::Values(std::pair(Mode::kInPlace, Mode::kInPlace),
                                         std::pair(Mode::kInPlace, Mode::kStaged),
                                         std::pair(Mode::kStaged, Mode::kInPlace),
                                         std::pair(Mode::kStaged, Mode::kStaged)),
                         [](const auto& mode) {
                           const auto name = [](Mode one) { return one == Mode::kStaged ? "Staged" : "InPlace"; };
                           return fmt::format("{}To{}", name(mode.param.first), name(mode.param.second));
                         });

using LentMemory = JobsTest;

// What a worker lends goes with it: nobody waits for a send from there.
TEST_F(LentMemory, FailsWhatADeadWorkerHadPosted) {
  start_agent("trainer", 0);
  const pid_t worker = start(with_agent(trainer(0, 1)), [](Batch& batch, std::vector<float>&) {
    Handle handle = batch.send(7, std::chrono::hours(1));
    REQUIRE_HERE(handle.version() == 7);
    ::kill(::getpid(), SIGKILL);
    return 1;
  });
  const pid_t receiver = start(inference(0, 1), [&](Batch& batch, std::vector<float>&) {
    await_end(worker);
    batch.recv().wait();
    return 1;
  });
  EXPECT_EQ(of(receiver).status, kPeerLost);
  EXPECT_EQ(of(worker).status, -SIGKILL);
  expect_all_well();
}

// An agent that is about to end tells its worker the outcome of what it began: until then the memory is in use.
TEST_F(LentMemory, AnAgentThatEndsTellsTheOutcomeFirst) {
  const Signal begun, ending;
  const pid_t agent = start_agent("trainer", 0);
  start("trainer/0", [&] {
    const Side side = with_agent(trainer(0, 1));
    return with_batch(side, store_, [&](Batch& batch, std::vector<float>& tensor) {
      fill(side, tensor, 7);
      Handle handle = batch.send(7);
      REQUIRE_HERE(fails_with([&] { handle.wait(); }, ErrorCode::kDataLoss, ""));
      REQUIRE_HERE(fails_with([&] { batch.send(8).wait(); }, ErrorCode::kPeerLost, ""));
      return 0;
    });
  });
  start(inference(0, 1), [&](RawRank& raw) {
    const Side side = inference(0, 1);
    std::vector<float> tensor = local_tensor(side);
    const TensorSpec spec = spec_of(side, tensor.data());
    raw.exchange({&spec, 1}, false);
    raw.attach_to(0, true);
    REQUIRE_HERE(raw.next<bus::Offer>().version == 7);
    raw.send(bus::Take{.version = 7, .epoch = 1});
    (void)raw.next<bus::Grant>();
    begun.raise();
    ending.wait();
    raw.send(bus::Done{7, 0, Status(ErrorCode::kDataLoss, "a digest differs")});
    (void)raw.until<Detach>();
    return 0;
  });
  begun.wait();
  ::kill(agent, SIGTERM);
  await_that([&] { return !has_thread(agent, "tessera-daemon"); });  // the session is being ended
  ending.raise();
  expect_all_well();
}

// The receiver learns who is at fault and, once it continues, the worker learns that it was given up.
TEST_F(LentMemory, AStoppedWorkerIsNamed) {
  start_agent("trainer", 0);
  const pid_t worker = start(with_agent(trainer(0, 1)), [](Batch& batch, std::vector<float>&) {
    Handle handle = batch.send(7);
    REQUIRE_HERE(handle.version() == 7);
    const Deadline soon = Deadline::after(hang_limit() / 2);
    ::raise(SIGSTOP);
    const std::string error = error_of([&] { handle.wait(); });
    std::fprintf(stderr, "%s\n", error.c_str());
    REQUIRE_HERE(error.starts_with("peer-lost: ") && !soon.passed());
    return 0;
  });
  const pid_t receiver = start(inference(0, 1), [&](Batch& batch, std::vector<float>& tensor) {
    await_stop(worker);
    return receive_once(batch, tensor);
  });
  const Outcome received = of(receiver);
  EXPECT_EQ(received.status, kPeerLost) << received.output;
  EXPECT_THAT(received.output, AllOf(HasSubstr("trainer/0"), HasSubstr(fmt::format("(pid {}) is stopped", worker))));
  ::kill(worker, SIGCONT);
  const Outcome sent = of(worker);
  EXPECT_EQ(sent.status, 0) << sent.output;
  EXPECT_THAT(sent.output, HasSubstr("is stopped"));
  expect_all_well();
}

// Each rank of the job with the memory reports it, and the other job learns of it.
TEST_F(LentMemory, NoSliceIsTakenOfIt) {
  start_agent("trainer", 0);
  const pid_t sender = start(with_agent(trainer(0, 1)), [](Batch&, std::vector<float>&) { return 1; });
  const pid_t receiver = start(inference(0, 1), [](Pair& pair) {
    const Side side = inference(0, 1);
    std::vector<float> half(32 * 48);
    const TensorSpec spec{.name = "half",
                          .data = half.data(),
                          .dtype = DType::kF32,
                          .shape = {32, 48},
                          .layout = Layout::parse("1:R"),
                          .strides = {},
                          .source = {.name = "weight", .slices = {{0, 32, 1}, {0, 48, 1}}}};
    pair.accept("policy", {&spec, 1}, side.rendezvous);
    return 1;
  });
  for (const pid_t rank : {sender, receiver}) {
    const Outcome outcome = of(rank);
    EXPECT_EQ(outcome.status, status_of(ErrorCode::kUnimplemented)) << outcome.name << ": " << outcome.output;
    EXPECT_THAT(outcome.output,
                HasSubstr("batch policy of pair weights: tensor half is to be filled with a slice of weight, which is "
                          "not supported for tensors in private memory behind an agent: move them into shared "
                          "memory, or do without the agent or the slice"))
        << outcome.name;
  }
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
