// The costs of the bus's modes between real processes, next to a plain copy on the same machine:
//
//   bus_bench [MIB [REPEAT]]     (bytes that the sender holds, 256; repetitions, 9)
//
// One sending rank, one thread at each end, shared memory, digests off. `send`: how long send() blocks the trainer;
// `all`: from the call of send() until the last receiver has the version; `share`: the rate of all bytes moved as a
// share of the streaming copy's, not counting the staged modes' copies. Medians.
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fail.h"
#include "bus/daemon/daemon.h"
#include "codec/simd/stream.h"
#include "tessera/bus.h"
#include "tessera/memory.h"
#include "tessera/store.h"
#include "tools/bench/processes.h"

namespace tessera::bench {
namespace {

constexpr Timeout kMeeting = std::chrono::seconds(60);
constexpr Duration kPatience = seconds(120);
constexpr int kMostReceivers = 8;
constexpr int kColumns = 8192;  // of the large tensor, bf16
const BatchOptions kInPlace{};
const BatchOptions kStaged{.mode = Mode::kStaged};

struct Scenario {
  std::string name;
  int64_t bytes = 0;  // of the sender's tensors
  int tensors = 1;
  int receivers = 1;
  BatchOptions sender{}, receiver{};
  std::string agent = "embedded";
  bool sharded = true;  // over the receivers; otherwise each gets everything
  bool shared = true;   // the tensors' memory
};

// Times of all processes of a scenario, in shared memory.
struct Times {
  std::atomic<int64_t> begin;
  std::array<std::atomic<int64_t>, kMostReceivers> end;
  std::atomic<int64_t> registered;  // by the slowest rank
};

int64_t now_ns() {
  return Clock::steady().now().time_since_epoch().count();
}

template <typename Number>
Number median(std::vector<Number> values) {
  std::ranges::sort(values);
  return values.at(values.size() / 2);
}

// GB/s of a streaming copy of that many bytes by one thread.
double streaming_rate(size_t bytes, int repeat) {
  const std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::byte> to(bytes, std::byte{2});
  std::vector<int64_t> times;
  for (int i = 0; i < repeat; ++i) {
    const int64_t begin = now_ns();
    copy_stream(to.data(), from.data(), bytes);
    stream_fence();
    times.push_back(now_ns() - begin);
  }
  return static_cast<double>(bytes) / static_cast<double>(median(times));
}

// One rank: its tensors, registered.
class Member {
 public:
  Member(const Scenario& scenario, const std::string& store, bool sends, Rank rank) {
    const int world = sends ? 1 : scenario.receivers;
    const Index columns = std::min<Index>(kColumns, scenario.bytes / 2 / scenario.tensors);
    const Shape shape{scenario.bytes / 2 / scenario.tensors / columns, columns};
    const Layout layout = Layout::parse(fmt::format("{}:{}", world, sends || !scenario.sharded ? "R" : "S1"));
    const auto bytes = static_cast<size_t>(layout.bind(shape).owned(shape, rank).size()) * 2;
    std::vector<TensorSpec> specs;
    for (int i = 0; i < scenario.tensors; ++i) {
      std::byte* const data = allocate(bytes, scenario.shared);
      std::fill_n(data, bytes, std::byte{1});
      specs.push_back(
          {.name = fmt::format("t{}", i), .data = data, .dtype = DType::kBF16, .shape = shape, .layout = layout});
    }
    bus_ = std::make_unique<Bus>(BusOptions{.job = sends ? "trainer" : "inference",
                                            .rank = rank,
                                            .world = world,
                                            .store = store,
                                            .name_space = "bench",
                                            .agent = scenario.agent,
                                            .threads = 1,
                                            .digest = false});
    pair_ = std::make_unique<Pair>(
        bus_->pair({.name = "weights", .peer = sends ? "inference" : "trainer", .timeout = kMeeting}));
    const int64_t begin = now_ns();
    batch_ = std::make_unique<Batch>(sends ? pair_->offer("policy", specs, kMeeting, scenario.sender)
                                           : pair_->accept("policy", specs, kMeeting, scenario.receiver));
    register_ns_ = now_ns() - begin;
  }
  Batch& batch() { return *batch_; }
  int64_t register_ns() const { return register_ns_; }

 private:
  std::byte* allocate(size_t bytes, bool shared) {
    if (shared) return memory_.emplace_back(SharedHeap::process().allocate(bytes)).data();
    return private_memory_.emplace_back(bytes).data();
  }

  std::vector<SharedBuffer> memory_;
  std::vector<std::vector<std::byte>> private_memory_;
  std::unique_ptr<Bus> bus_;
  std::unique_ptr<Pair> pair_;
  std::unique_ptr<Batch> batch_;
  int64_t register_ns_ = 0;
};

template <typename T>
class Shared {
 public:
  Shared()
      : value_(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (value_ == MAP_FAILED) fail_errno("mmap");
  }
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return value_; }

 private:
  T* value_;
};

Process start_daemon(const char* job, Rank rank) {
  return Process::start(fmt::format("agent of {}/{}", job, rank), [job, rank](const Process::Say& say) {
    const bus::Daemon daemon({.name_space = "bench", .job = job, .rank = rank});
    say("ready");
    ::pause();
  });
}

std::vector<Process> start_daemons(const Scenario& scenario) {
  std::vector<Process> daemons;
  if (scenario.agent == "embedded") return daemons;
  daemons.push_back(start_daemon("trainer", 0));
  for (Rank rank = 0; rank < scenario.receivers; ++rank) daemons.push_back(start_daemon("inference", rank));
  hear_all(daemons, Deadline::after(kPatience));
  return daemons;
}

struct Figures {
  double register_s = 0, first_s = 0, send_s = 0, all_s = 0;
};

Figures run(const Scenario& scenario, const std::string& store, int repeat) {
  const Shared<Times> times;
  Barrier barrier(static_cast<uint32_t>(1 + scenario.receivers + 1));  // and for this process
  const int transfers = repeat + 2;                                    // the first, and one to warm up
  const std::vector<Process> daemons = start_daemons(scenario);
  std::vector<Process> ranks;
  const auto registered = [&](const Member& member) {
    int64_t slowest = times->registered;
    while (slowest < member.register_ns() && !times->registered.compare_exchange_weak(slowest, member.register_ns())) {
    }
  };
  ranks.push_back(Process::start("trainer/0", [&](const Process::Say& say) {
    Member member(scenario, store, true, 0);
    registered(member);
    std::string waits;
    for (int i = 0; i < transfers; ++i) {
      barrier.arrive_and_wait(Deadline::after(kPatience));
      times->begin = now_ns();
      member.batch().send().wait();
      waits += fmt::format("{} ", now_ns() - times->begin);
      barrier.arrive_and_wait(Deadline::after(kPatience));
    }
    say(waits);
    barrier.arrive_and_wait(Deadline::after(kPatience));
  }));
  for (Rank rank = 0; rank < scenario.receivers; ++rank)
    ranks.push_back(Process::start(fmt::format("inference/{}", rank), [&, rank](const Process::Say& say) {
      Member member(scenario, store, false, rank);
      registered(member);
      for (int i = 0; i < transfers; ++i) {
        barrier.arrive_and_wait(Deadline::after(kPatience));
        member.batch().recv().wait();
        times->end[static_cast<size_t>(rank)] = now_ns();
        barrier.arrive_and_wait(Deadline::after(kPatience));
      }
      say("done");
      barrier.arrive_and_wait(Deadline::after(kPatience));
    }));
  std::vector<int64_t> all;
  for (int i = 0; i < transfers; ++i) {
    barrier.arrive_and_wait(Deadline::after(kPatience));
    barrier.arrive_and_wait(Deadline::after(kPatience));
    int64_t end = 0;
    for (int rank = 0; rank < scenario.receivers; ++rank)
      end = std::max(end, times->end[static_cast<size_t>(rank)].load());
    all.push_back(end - times->begin);
  }
  std::vector<int64_t> waits;
  const std::string said = hear_all(ranks, Deadline::after(kPatience)).front();
  for (char* at = const_cast<char*>(said.c_str()); *at != '\0';) {
    waits.push_back(std::strtoll(at, &at, 10));
    while (*at == ' ') ++at;
  }
  barrier.arrive_and_wait(Deadline::after(kPatience));
  Figures figures{.register_s = static_cast<double>(times->registered) * 1e-9,
                  .first_s = static_cast<double>(all.front()) * 1e-9};
  all.erase(all.begin(), all.begin() + 2);
  waits.erase(waits.begin(), waits.begin() + 2);
  figures.all_s = static_cast<double>(median(all)) * 1e-9;
  figures.send_s = static_cast<double>(median(waits)) * 1e-9;
  return figures;
}

// Time from the SIGKILL of a receiver, or of its agent, until its successor has a version; the sender never stops.
double recovery(const std::string& store, const std::string& agent, bool kill_agent) {
  const Scenario scenario{.name = "recovery", .bytes = int64_t{1} << 20, .agent = agent};
  std::vector<Process> daemons = start_daemons(scenario);
  Process sender = Process::start("trainer/0", [&](const Process::Say&) {
    Member member(scenario, store, true, 0);
    while (true) {
      try {
        member.batch().send().wait();
      } catch (const Error&) {
      }
    }
  });
  const auto receiver = [&] {
    return Process::start("inference/0", [&](const Process::Say& say) {
      Member member(scenario, store, false, 0);
      member.batch().recv().wait();
      say("received");
      while (true) member.batch().recv().wait();
    });
  };
  Process first = receiver();
  first.hear(Deadline::after(kPatience));
  const int64_t begin = now_ns();
  if (kill_agent) {
    daemons.pop_back();  // killed
    daemons.push_back(start_daemon("inference", 0));
  }
  first.kill();
  Process second = receiver();
  second.hear(Deadline::after(kPatience));
  return static_cast<double>(now_ns() - begin) * 1e-9;
}

void measure(int64_t bytes, int repeat, const std::string& store) {
  const double ceiling = streaming_rate(static_cast<size_t>(bytes), repeat);
  fmt::print("{} MiB, {} repetitions; streaming copy {:.1f} GB/s\n\n", bytes >> 20, repeat, ceiling);
  fmt::print("{:<44} {:>10} {:>10} {:>10} {:>10} {:>7}\n", "", "regist. s", "first ms", "send ms", "all ms", "share");
  std::vector<Scenario> scenarios;
  for (const char* agent : {"embedded", "daemon"}) {
    for (const auto& [name, sender, receiver] : {std::tuple{"in place -> in place", kInPlace, kInPlace},
                                                 {"staged -> in place", kStaged, kInPlace},
                                                 {"in place -> staged", kInPlace, kStaged},
                                                 {"staged -> staged", kStaged, kStaged}})
      scenarios.push_back({.name = fmt::format("{}, {}", agent, name),
                           .bytes = bytes,
                           .sender = sender,
                           .receiver = receiver,
                           .agent = agent});
    for (const auto& [name, mode] : {std::pair{"in place", kInPlace}, {"staged", kStaged}})
      scenarios.push_back({.name = fmt::format("{}, private memory, {}", agent, name),
                           .bytes = bytes,
                           .sender = mode,
                           .receiver = mode,
                           .agent = agent,
                           .shared = false});
    scenarios.push_back({.name = fmt::format("{}, 4 KiB", agent), .bytes = 4096, .agent = agent});
    scenarios.push_back({.name = fmt::format("{}, 10,000 x 4 KiB", agent),
                         .bytes = int64_t{10'000} * 4096,
                         .tensors = 10'000,
                         .agent = agent});
  }
  for (int receivers = 1; receivers <= kMostReceivers; receivers *= 2)
    for (const bool sharded : {true, false})
      scenarios.push_back(
          {.name = fmt::format("{} receivers, {}", receivers, sharded ? "a shard each" : "all of it each"),
           .bytes = bytes,
           .receivers = receivers,
           .sharded = sharded});
  for (const Scenario& scenario : scenarios) {
    const Figures figures = run(scenario, store, repeat);
    const double moved = static_cast<double>(scenario.bytes) * (scenario.sharded ? 1 : scenario.receivers);
    fmt::print("{:<44} {:>10.3f} {:>10.2f} {:>10.3f} {:>10.3f} {:>7.2f}\n", scenario.name, figures.register_s,
               1e3 * figures.first_s, 1e3 * figures.send_s, 1e3 * figures.all_s,
               moved / figures.all_s * 1e-9 / ceiling);
    std::fflush(stdout);
  }
  fmt::print("\nfrom a SIGKILL until the next version is received, median of 5:\n");
  for (const auto& [name, agent, kill_agent] : {std::tuple{"a receiver, embedded agent", "embedded", false},
                                                {"a receiver whose daemon lives", "daemon", false},
                                                {"a receiver and its daemon", "daemon", true}}) {
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) times.push_back(recovery(store, agent, kill_agent));
    fmt::print("{:<44} {:>10.3f} s\n", name, median(times));
  }
}

void main_in(const std::string& folder, int64_t bytes, int repeat) {
  ::setenv("TESSERA_RUNTIME_DIR", folder.c_str(), 1);
  ::setenv("TESSERA_LOG", "error", 1);
  Process store = Process::start("store", [](const Process::Say& say) {
    const std::unique_ptr<StoreServer> server = serve_store("127.0.0.1:0");
    say(server->address());
    ::pause();
  });
  measure(bytes, repeat, store.hear(Deadline::after(kPatience)));
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  const int64_t mib = argc > 1 ? std::atoll(argv[1]) : 256;
  const int repeat = argc > 2 ? std::atoi(argv[2]) : 9;
  if (argc > 3 || mib < 1 || repeat < 1) {
    fmt::print(stderr, "usage: bus_bench [MIB [REPEAT]], both at least 1\n");
    return 2;
  }
  std::string folder = std::filesystem::temp_directory_path() / "tessera-bench-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return 1;
  int status = 0;
  try {
    tessera::bench::main_in(folder, mib << 20, repeat);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bus_bench: {}\n", error.what());
    status = 1;
  }
  std::filesystem::remove_all(folder);
  return status;
}
