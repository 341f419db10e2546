// The command queue between two processes, next to what the machine itself can do:
//
//   command_bench [SECONDS]     (how long the idle agent is watched; 5)
//
// Client and agent each have a CPU, the first two that this process may use, or share the only one. Round trips carry
// 32 bytes each way. `burst`: one after another; `asleep`: with pauses in which the agent falls asleep. The ceilings do
// the same with only a word of shared memory: spinning on it, or sleeping on it by futex.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "base/fail.h"
#include "base/futex.h"
#include "command/client.h"
#include "command/server.h"

namespace tessera::bus {
namespace {

constexpr int kWarmUp = 1000;
constexpr uint64_t kIncarnation = 1;

std::vector<int> usable() {
  cpu_set_t mask;
  ::sched_getaffinity(0, sizeof mask, &mask);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
  return cpus;
}

void pin(int cpu) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  ::sched_setaffinity(0, sizeof mask, &mask);
}

// A child process that runs `body` on the second CPU; killed in the end.
class Process {
 public:
  explicit Process(const std::function<void()>& body) {
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    ::_exit(0);
  }
  ~Process() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  double cpu_seconds() const {
    clockid_t clock{};
    timespec used{};
    ::clock_getcpuclockid(pid_, &clock);
    ::clock_gettime(clock, &used);
    return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
  }

 private:
  pid_t pid_;
};

void sleep_for(Duration length) {
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(length);
  const timespec time{.tv_sec = whole.count(), .tv_nsec = static_cast<long>((length - whole).count())};
  ::nanosleep(&time, nullptr);
}

struct Latency {
  double p50, p99;  // microseconds
};

Latency measure(int rounds, Duration pause, const std::function<void()>& round_trip) {
  std::vector<double> times;
  for (int i = -kWarmUp; i < rounds; ++i) {
    if (pause > Duration::zero()) sleep_for(pause);
    const auto begin = std::chrono::steady_clock::now();
    round_trip();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    if (i >= 0) times.push_back(time.count());
    if (pause > Duration::zero() && i < -100) i = -100;  // a shorter warm-up
  }
  std::ranges::sort(times);
  return {times[times.size() / 2], times[times.size() * 99 / 100]};
}

void print(const char* what, const Latency& latency) {
  std::printf("%-44s p50 %8.2f us   p99 %8.2f us\n", what, latency.p50, latency.p99);
  std::fflush(stdout);
}

// Two words: the client's message, and the other process's answer.
struct alignas(64) Line {
  std::atomic<uint32_t> word{0};
};

struct Ping {
  Line there, back;
};

Ping& shared_ping() {
  void* memory = ::mmap(nullptr, sizeof(Ping), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail_errno("mmap");
  return *new (memory) Ping;
}

void say(std::atomic<uint32_t>& word, uint32_t value, bool by_futex) {
  word.store(value);
  if (by_futex) futex_wake(word);
}

void await(const std::atomic<uint32_t>& word, uint32_t value, bool by_futex) {
  for (uint32_t seen = word.load(); seen != value; seen = word.load())
    if (by_futex) futex_wait(word, seen, Deadline::at(TimePoint::max()));
}

Latency measure_ping(const std::vector<int>& cpus, int rounds, Duration pause, bool by_futex) {
  Ping& ping = shared_ping();
  const Process answerer([&] {
    pin(cpus.back());
    for (uint32_t i = 1;; ++i) {
      await(ping.there.word, i, by_futex);
      say(ping.back.word, i, by_futex);
    }
  });
  uint32_t i = 0;
  return measure(rounds, pause, [&] {
    say(ping.there.word, ++i, by_futex);
    await(ping.back.word, i, by_futex);
  });
}

void run(double idle_seconds) {
  std::vector<int> cpus = usable();
  if (cpus.size() > 2) cpus.resize(2);
  double load = 0;
  ::getloadavg(&load, 1);
  std::printf("%zu CPUs used, load %.2f\n", cpus.size(), load);

  const auto memory = CommandMemory::create(kIncarnation);
  const Process agent([&] {
    const CommandServer server(memory, std::make_shared<CommandLog>(kIncarnation), "the client",
                               [&, pinned = false](const Command& command, Replier& replier) mutable {
                                 if (!std::exchange(pinned, true)) pin(cpus.back());
                                 replier.succeed(command.payload);
                               });
    while (true) ::pause();
  });
  CommandClient client(memory, "the agent");
  pin(cpus.front());
  const std::array<std::byte, 32> payload{};
  const auto soon = [] { return Deadline::after(std::chrono::seconds(10)); };
  const auto call = [&] { client.call(1, payload, soon()); };
  const Duration pause = std::chrono::milliseconds(1);

  if (cpus.size() == 2) print("ceiling: spinning on a word", measure_ping(cpus, 100'000, {}, false));
  print("ceiling: futex", measure_ping(cpus, 20'000, {}, true));
  print("round trip, burst", measure(100'000, {}, call));
  print("ceiling: futex, asleep", measure_ping(cpus, 2000, pause, true));
  print("round trip, agent asleep", measure(2000, pause, call));

  constexpr int kInFlight = 16, kBatches = 10'000;
  const auto begin = std::chrono::steady_clock::now();
  for (int batch = 0; batch < kBatches; ++batch) {
    std::vector<CommandCall> calls;
    for (int i = 0; i < kInFlight; ++i) calls.push_back(client.post(1, payload, soon()));
    for (CommandCall& each : calls) each.wait(soon());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%-44s %8.0f commands a second\n", "16 in flight", kInFlight * kBatches / took.count());

  sleep_for(seconds(0.1));  // until it sleeps, too, and the kernel has updated its counters
  const double before = agent.cpu_seconds();
  sleep_for(seconds(idle_seconds));
  std::printf("%-44s %8.4f %% of a core\n", "idle agent", 100 * (agent.cpu_seconds() - before) / idle_seconds);
}

}  // namespace
}  // namespace tessera::bus

int main(int argc, char** argv) {
  try {
    tessera::bus::run(argc > 1 ? std::max(1.0, std::atof(argv[1])) : 5);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "command_bench: %s\n", error.what());
    return 1;
  }
}
