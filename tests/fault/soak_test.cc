// Thousands of transfers between the same processes. At the end each of them uses no more resources than after a
// warm-up.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include "base/fail.h"
#include "base/futex.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // a sanitizer's memory grows, and the few transfers are not enough to warm up
constexpr int kSanitizers = 10;
#else
constexpr bool kSanitized = false;
constexpr int kSanitizers = 1;
#endif
#ifdef TESSERA_SLOW_LANE
constexpr int kTransfers = 10'000 / kSanitizers;
#else
constexpr int kTransfers = 500 / kSanitizers;
#endif
constexpr int kPhases = 5;  // the first is the warm-up
constexpr int kBatches = 3;
constexpr int kRounds = (kTransfers + kPhases * kBatches - 1) / (kPhases * kBatches);  // in each phase
constexpr uint64_t kRssSlack = uint64_t{2} << 20;
constexpr uint64_t kSeed = 1;

const BatchOptions kInPlace{};
const BatchOptions kStaged{.mode = Mode::kStaged};

struct Kind {
  const char* id;
  BatchOptions sender, receiver;
};
const Kind kKinds[kBatches] = {{"in-place", kInPlace, kInPlace},
                               {"staged", kStaged, kStaged},
                               {"staged-to-in-place", {.mode = Mode::kStaged, .snapshots = 3}, kInPlace}};

uint64_t resident_bytes(pid_t pid) {
  if (pid == ::getpid()) ::malloc_trim(0);
  uint64_t pages = 0;
  std::ifstream(fmt::format("/proc/{}/statm", pid)) >> pages >> pages;
  return pages * static_cast<uint64_t>(::getpagesize());
}

// All processes of the soak wait here for each other between the phases.
struct Phases {
  std::atomic<uint32_t> word;  // a futex: the number of arrivals
  std::atomic<bool> over;      // the visitor may end this phase

  void meet(uint32_t parties) {
    const uint32_t turn = word.fetch_add(1) / parties;
    futex_wake(word);
    const Deadline deadline = Deadline::after(6 * hang_limit());
    for (uint32_t now = word; now / parties == turn; now = word) {
      if (deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "not all have come to the end of the phase"_message);
      futex_wait(word, now, deadline);
    }
  }
};

constexpr int kRanks = 2;
constexpr uint32_t kProcesses = 2 * kRanks + 1;
const Side kVisitor{.job = "evaluation", .peer = "trainer", .rank = 0, .world = 1, .layout = "1:R"};

// A rank's batches, one of each kind.
struct Member {
  Member(const Side& side, const std::string& store, pid_t agent)
      : bus({.job = side.job,
             .rank = side.rank,
             .world = side.world,
             .store = store,
             .agent = agent > 0 ? "daemon" : "embedded",
             .threads = 1}),
        pair(bus.pair({.name = "weights", .peer = side.peer, .timeout = side.rendezvous})) {}
  Batch open(const Side& side, const Kind& kind, std::vector<float>& tensor) {
    const TensorSpec spec{
        .name = side.name, .data = tensor.data(), .shape = side.shape, .layout = Layout::parse(side.layout)};
    return side.sends ? pair.offer(kind.id, {&spec, 1}, side.rendezvous, kind.sender)
                      : pair.accept(kind.id, {&spec, 1}, side.rendezvous, kind.receiver);
  }
  Bus bus;
  Pair pair;
};

// A process that must not use more resources at the end than after its warm-up.
class Subject {
 public:
  explicit Subject(pid_t pid) : pid_(pid) {}
  void look(int phase) {
    // The process hears a little later that the last peer has left a batch, and nothing tells when it has.
    const Deadline deadline = Deadline::after(hang_limit());
    Footprint print = Footprint::of(pid_);
    while (!kSanitized && phase > 0 && !print.within(bound_) && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      print = Footprint::of(pid_);
    }
    const uint64_t bytes = resident_bytes(pid_);
    std::fprintf(stderr, "phase %d of %d: %s, %lu KiB\n", phase, pid_, print.to_string().c_str(),
                 static_cast<unsigned long>(bytes >> 10));
    if (phase == 0) {
      bound_ = print;
      bound_.threads += kBatches;  // once a batch has lost a job, it keeps a thread that registers again
      warm_bytes_ = bytes;
    } else if (!kSanitized && (!print.within(bound_) || bytes > warm_bytes_ + kRssSlack)) {
      fail_internal("at most {} and {} bytes were to be had after the warm-up, {} and {} bytes in phase {}",
                    bound_.to_string(), warm_bytes_ + kRssSlack, print.to_string(), bytes, phase);
    }
  }

 private:
  pid_t pid_;
  Footprint bound_;
  uint64_t warm_bytes_ = 0;
};

// Runs the phases of one process, and checks it and its agent.
void soak(Phases& phases, pid_t agent, const std::function<void()>& phase) {
  std::vector<Subject> subjects{Subject(::getpid())};
  if (agent > 0) subjects.emplace_back(agent);
  for (int i = 0; i < kPhases; ++i) {
    phase();
    phases.meet(kProcesses);
    for (Subject& subject : subjects) subject.look(i);
    phases.over = false;
    phases.meet(kProcesses);
  }
}

// Both ranks make the same choices.
int send_all(Phases& phases, const Side& side, const std::string& store, pid_t agent) {
  Member member(side, store, agent);
  std::vector<std::vector<float>> tensors(kBatches, local_tensor(side));
  std::vector<Batch> batches;
  for (size_t i = 0; i < kBatches; ++i) batches.push_back(member.open(side, kKinds[i], tensors[i]));
  std::mt19937_64 random(kSeed);
  int64_t version = 0;
  soak(phases, agent, [&] {
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < kBatches; ++i) {
        fill(side, tensors[i], ++version);
        Handle handle = batches[i].send(version);
        const bool withdraws = i > 0 && random() % 3 == 0;
        handle.wait();
        if (!withdraws || !handle.withdraw()) continue;
        fill(side, tensors[i], ++version);
        batches[i].send(version).wait();
      }
    }
    if (side.rank == 0) phases.over = true;
  });
  return 0;
}

int receive_all(Phases& phases, const Side& side, const std::string& store, pid_t agent) {
  Member member(side, store, agent);
  std::vector<std::vector<float>> tensors(kBatches, local_tensor(side));
  std::vector<Batch> batches;
  for (size_t i = 0; i < kBatches; ++i) batches.push_back(member.open(side, kKinds[i], tensors[i]));
  soak(phases, agent, [&] {
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < kBatches; ++i) {
        Batch& batch = batches[i];
        if (i == 1 && round % 2 == 0) {
          batch.stage().wait();
          batch.commit();
        } else {
          batch.recv().wait();
        }
        if (batch.torn() || !holds(side, tensors[i], batch.version()))
          fail_internal("version {} of batch {} is not whole", batch.version(), kKinds[i].id);
      }
    }
  });
  return 0;
}

// Another job, which again and again registers, takes what is on offer, and leaves.
int visit(Phases& phases, const std::string& store, pid_t agent) {
  Member member(kVisitor, store, agent);
  std::vector<float> tensor = local_tensor(kVisitor);
  std::mt19937_64 random(kSeed);
  int visits = 0;
  soak(phases, agent, [&] {
    // First visits every kind in both modes, so that the warm-up includes them.
    for (uint64_t visit = 0; visit < 2 * kBatches || !phases.over; ++visit) {
      const uint64_t choice = visit < 2 * kBatches ? visit : random();
      const Kind& kind = kKinds[choice / 2 % kBatches];
      Batch batch = member.open(kVisitor, {kind.id, {}, choice % 2 == 0 ? kInPlace : kStaged}, tensor);
      ++visits;
      for (uint64_t i = random() % 3; i > 0 && !phases.over; --i)
        if (went_well([&] { batch.recv({}, std::chrono::milliseconds(100)).wait(); }) &&
            !holds(kVisitor, tensor, batch.version()))
          fail_internal("version {} of batch {} is not whole", batch.version(), kind.id);
    }
  });
  std::fprintf(stderr, "%d visits\n", visits);
  return 0;
}

void soak_all(const std::set<std::string>& with_agents) {
  const Shared<Phases> phases;
  TestJobs jobs;
  const std::string store = jobs.store();
  const auto agent_of = [&](const std::string& job, Rank rank) {
    return with_agents.contains(fmt::format("{}/{}", job, rank)) ? jobs.start_agent(job, rank) : 0;
  };
  std::vector<pid_t> pids;
  const auto start = [&](const Side& side, const auto& part) {
    const pid_t agent = agent_of(side.job, side.rank);
    pids.push_back(jobs.start(side.who(), [=] { return part(agent); }));
  };
  for (Rank rank = 0; rank < kRanks; ++rank) {
    start(trainer(rank), [&, rank](pid_t agent) { return send_all(*phases, trainer(rank), store, agent); });
    start(inference(rank), [&, rank](pid_t agent) { return receive_all(*phases, inference(rank), store, agent); });
  }
  start(kVisitor, [&](pid_t agent) { return visit(*phases, store, agent); });
  for (const pid_t pid : pids) {
    const Outcome& outcome = jobs.of(pid, std::chrono::seconds(kTransfers / 10) + 6 * hang_limit());
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    std::printf("%s:\n%s", outcome.name.c_str(), outcome.output.c_str());
  }
  jobs.expect_all_well();
}

TEST(Soak, TransfersTakeNothingThatTheyDoNotGiveBack) {
  soak_all({});
}

TEST(Soak, NorDoTheyWhereAgentsMoveTheData) {
  soak_all({"trainer/1", "inference/0", "evaluation/0"});
}

}  // namespace
}  // namespace tessera::test
