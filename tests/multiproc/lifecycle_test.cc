// Batches that come and go: ranks of the same job that finish early, ids used twice, objects in a forked child.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/testing.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;

// The same CPU for all callers.
void run_on_one_cpu() {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  ::sched_getaffinity(0, sizeof(usable), &usable);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &usable)) CPU_SET(cpu, &one);
  ::sched_setaffinity(0, sizeof(one), &one);
}

using Lifecycle = JobsTest;

// On one CPU a rank may well have received all and closed before the other rank of its job has woken from accept().
TEST_F(Lifecycle, AnOwnRankThatIsDoneEarlyTakesNothingAwayFromTheOthers) {
  constexpr int kRounds = 30;
  const auto rounds = [store = store_](const std::string& job, Rank rank, int world) {
    run_on_one_cpu();
    const bool sends = job == "trainer";
    Bus bus({.job = job, .rank = rank, .world = world, .store = store, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = sends ? "inference" : "trainer"});
    std::vector<float> data(16);
    const TensorSpec tensor{.name = "t", .data = data.data(), .shape = {16}};
    for (int round = 0; round < kRounds; ++round) {
      const std::string id = "round-" + std::to_string(round);
      Batch batch = sends ? pair.offer(id, {&tensor, 1}) : pair.accept(id, {&tensor, 1});
      if (rank == 1) batch.wait_version(1);
      (sends ? batch.send() : batch.recv()).wait();
    }
    return 0;
  };
  start("trainer/0", [=] { return rounds("trainer", 0, 1); });
  for (const Rank rank : {0, 1, 2})
    start("inference/" + std::to_string(rank), [=] { return rounds("inference", rank, 3); });
  expect_all_well();
}

TEST_F(Lifecycle, RegisteringALiveBatchAgainIsRefusedAndHarmsNothing) {
  start(trainer(0, 1), [](Pair& pair) {
    std::vector<float> data(16);
    const TensorSpec tensor{.name = "t", .data = data.data(), .shape = {16}};
    Batch batch = pair.offer("policy", {&tensor, 1});
    const std::string error = error_of([&] { (void)pair.offer("policy", {&tensor, 1}); });
    if (error.find("close that one first") == std::string::npos) return 1;
    batch.send().wait();
    batch.send().wait();
    return 0;
  });
  start(inference(0, 1), [](Pair& pair) {
    std::vector<float> data(16);
    const TensorSpec tensor{.name = "t", .data = data.data(), .shape = {16}};
    Batch batch = pair.accept("policy", {&tensor, 1});
    batch.recv().wait();
    if (pair.manifest("policy").size() != 1) return 1;  // what it published is still there
    batch.recv().wait();
    return 0;
  });
  expect_all_well();
}

// Both sides learn of the mismatch, and it does not harm the next attempt.
TEST_F(Lifecycle, AFailedRegistrationCanBeMendedAndTriedAgain) {
  const auto retry = [store = store_](const std::string& job, Rank rank) {
    const bool sends = job == "trainer";
    Bus bus({.job = job, .rank = rank, .world = 2, .store = store, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = sends ? "inference" : "trainer"});
    std::vector<float> data(32);
    TensorSpec tensor{.name = "t", .data = data.data(), .shape = {sends ? 32 : 16}};
    const auto register_it = [&] {
      return sends ? pair.offer("policy", {&tensor, 1}, soon().left())
                   : pair.accept("policy", {&tensor, 1}, soon().left());
    };
    const std::string error = error_of([&] { (void)register_it(); });
    if (error.find("shape") == std::string::npos) throw Error(ErrorCode::kInternal, "first attempt: " + error);
    tensor.shape = {16};
    Batch batch = register_it();
    (sends ? batch.send() : batch.recv()).wait();
    return 0;
  };
  for (const char* job : {"trainer", "inference"})
    for (const Rank rank : {0, 1})
      start(std::string(job) + "/" + std::to_string(rank), [=] { return retry(job, rank); });
  expect_all_well();
}

// The second attempt fails before it has published anything: the others learn of that one, too.
TEST_F(Lifecycle, AnAttemptThatFailsAtOnceAfterAnotherIsHeard) {
  const Signal heard;
  start(trainer(0, 1), [&heard](Pair& pair) {
    std::vector<float> data(32);
    TensorSpec tensor{.name = "t", .data = data.data(), .shape = {32}};
    const auto error = [&] { return error_of([&] { (void)pair.offer("policy", {&tensor, 1}, soon().left()); }); };
    REQUIRE_HERE(error().find("shape") != std::string::npos);
    heard.raise();
    tensor.shape = {16};
    REQUIRE_HERE(error().find("inference/0 gave up: ") != std::string::npos);
    return 0;
  });
  start(inference(0, 1), [&heard](Pair& pair) {
    std::vector<float> data(32);
    std::vector<TensorSpec> tensors{{.name = "t", .data = data.data(), .shape = {16}}};
    const auto error = [&] { return error_of([&] { (void)pair.accept("policy", tensors, soon().left()); }); };
    REQUIRE_HERE(error().find("shape") != std::string::npos);
    heard.wait();  // or the second failure would be the only one that it hears of
    tensors.push_back({.name = "u", .data = data.data() + 1, .shape = {16}});
    REQUIRE_HERE(error().find("overlap") != std::string::npos);
    return 0;
  });
  expect_all_well();
}

// The receiver is back before the sender has closed: it waits for the new registration and leaves the old one alone.
TEST_F(Lifecycle, AnIdCanBeRegisteredAgainWhoeverComesFirst) {
  const Signal closed;
  const auto twice = [&](const std::string& job) {
    const bool sends = job == "trainer";
    Bus bus({.job = job, .store = store_, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = sends ? "inference" : "trainer"});
    std::vector<float> data(16);
    const TensorSpec tensor{.name = "t", .data = data.data(), .shape = {16}};
    std::thread late;
    for (int round = 0; round < 2; ++round) {
      Batch batch = sends ? pair.offer("policy", {&tensor, 1}) : pair.accept("policy", {&tensor, 1});
      if (sends || round == 0) {
        (sends ? batch.send() : batch.recv()).wait();
      } else if (error_of([&] { batch.recv().wait(); }).find("has closed the batch") != std::string::npos) {
        batch.recv().wait();  // it had registered for the old offer; the new one needs no accept()
      }
      if (sends && round == 0) closed.wait();
      if (!sends && round == 0) {
        batch.close();
        late = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(200));  // by when accept() is likely to wait
          closed.raise();
        });
      }
    }
    if (late.joinable()) late.join();
    return 0;
  };
  start("trainer/0", [=] { return twice("trainer"); });
  start("inference/0", [=] { return twice("inference"); });
  expect_all_well();
}

TEST_F(Lifecycle, ARankThatGivesUpAtItsOwnDeadlineIsHeardByTheOthers) {
  const Signal heard;
  const auto error_of_offer = [](Pair& pair, Timeout timeout) {
    std::vector<float> data(16);
    const TensorSpec tensor{.name = "t", .data = data.data(), .shape = {16}};
    return error_of([&] { (void)pair.offer("policy", {&tensor, 1}, timeout); });
  };
  start(trainer(0), [=](Pair& pair) {
    const std::string error = error_of_offer(pair, std::chrono::milliseconds(300));
    return error.find("deadline-exceeded") != std::string::npos ? 0 : 1;
  });
  start(trainer(1), [=, &heard](Pair& pair) {
    const std::string error = error_of_offer(pair, soon().left());
    heard.raise();
    std::fprintf(stderr, "%s\n", error.c_str());
    return error.find("peer-lost: trainer/0 gave up: ") != std::string::npos ? 0 : 1;
  });
  start(inference(0, 1), [&heard](Pair&) {
    heard.wait();
    return 0;
  });
  expect_all_well();
}

TEST_F(Lifecycle, AHandleInAForkedChildSaysSoInsteadOfWaiting) {
  start(trainer(0, 1), [](Batch& batch, std::vector<float>&) {
    Handle handle = batch.send();
    const pid_t child = ::fork();
    if (child == 0) {
      const auto forked = [](const std::string& error) { return error.find("forked child") != std::string::npos; };
      const bool all = forked(error_of([&] { handle.wait(); })) &&
                       forked(error_of([&] { (void)handle.wait_for(std::chrono::hours(1)); })) &&
                       forked(error_of([&] { (void)handle.done(); })) &&
                       forked(error_of([&] { (void)handle.progress(); }));
      ::_exit(all ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    handle.wait();
    return status;
  });
  start(inference(0, 1), receive_once);
  expect_all_well();
}

// Dense weights on one mesh, experts on another: both have the same version, or neither arrives.
TEST_F(Lifecycle, ABatchOverSeveralPairsIsTransferredAsOne) {
  const auto run = [store = store_](const std::string& job, Rank rank) {
    const bool sends = job == "trainer";
    Bus bus({.job = job, .rank = rank, .world = 2, .store = store, .threads = 1});
    const std::string peer = sends ? "inference" : "trainer";
    const Pair dense = bus.pair({.name = "dense", .peer = peer, .layout = Layout::parse(sends ? "2:S0" : "2:R")});
    const Pair experts = bus.pair({.name = "experts", .peer = peer, .layout = Layout::parse(sends ? "2:R" : "2:S0")});
    std::vector<float> a(sends ? 8 : 16), b(sends ? 16 : 8);
    const TensorSpec in_dense{.name = "w", .data = a.data(), .shape = {16}};
    const TensorSpec in_experts{.name = "w", .data = b.data(), .shape = {16}};
    std::vector<BatchPart> parts{{.pair = &experts, .tensors = {&in_experts, 1}},
                                 {.pair = &dense, .tensors = {&in_dense, 1}}};
    if (sends) std::ranges::reverse(parts);  // the order does not matter
    const BatchOptions options{.mode = sends ? Mode::kInPlace : Mode::kStaged};
    Batch batch =
        sends ? bus.offer("policy", parts, soon().left()) : bus.accept("policy", parts, soon().left(), options);
    for (int64_t version = 1; version <= 3; ++version) {
      if (sends) {
        std::ranges::fill(a, static_cast<float>(version));
        std::ranges::fill(b, static_cast<float>(10 * version));
        batch.send(version).wait();
      } else {
        if (batch.recv().wait() != version) return 1;
        const auto all = [](const std::vector<float>& tensor, int64_t value) {
          return std::ranges::count(tensor, static_cast<float>(value)) == std::ssize(tensor);
        };
        if (!all(a, version) || !all(b, 10 * version)) return 2;
      }
    }
    const std::vector<TensorDigest> digests = batch.digests();
    return digests.size() == 2 && digests[0].name == "dense/w" && digests[1].name == "experts/w" ? 0 : 3;
  };
  for (const char* job : {"trainer", "inference"})
    for (const Rank rank : {0, 1}) start(std::string(job) + "/" + std::to_string(rank), [=] { return run(job, rank); });
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
