#include "bench/etp/measure.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/fail.h"
#include "base/process.h"
#include "codec/simd/kernel.h"
#include "tools/bench/processes.h"

namespace tessera::bench {
namespace {

constexpr Duration kPatience = std::chrono::seconds(300);
constexpr size_t kMostBlobBytes = 4096;

double seconds_of(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Where ranks, forked while it exists, leave their blobs for each other.
class Blackboard {
 public:
  explicit Blackboard(int ranks) : ranks_(static_cast<size_t>(ranks)), barrier_(static_cast<uint32_t>(ranks)) {
    void* const memory =
        ::mmap(nullptr, ranks_ * sizeof(Blob), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail_errno("mmap");
    blobs_ = static_cast<Blob*>(memory);
  }
  ~Blackboard() { ::munmap(blobs_, ranks_ * sizeof(Blob)); }
  Blackboard(const Blackboard&) = delete;
  Blackboard& operator=(const Blackboard&) = delete;

  void together() { barrier_.arrive_and_wait(Deadline::after(kPatience)); }
  std::vector<std::string> exchange(size_t rank, const std::string& blob) {
    TESSERA_CHECK(blob.size() <= kMostBlobBytes);
    blobs_[rank].bytes = blob.size();
    std::memcpy(blobs_[rank].data.data(), blob.data(), blob.size());
    together();
    std::vector<std::string> all;
    for (size_t q = 0; q < ranks_; ++q) all.emplace_back(blobs_[q].data.data(), blobs_[q].bytes);
    together();
    return all;
  }

 private:
  struct Blob {
    size_t bytes;
    std::array<char, kMostBlobBytes> data;
  };

  const size_t ranks_;
  Barrier barrier_;
  Blob* blobs_ = nullptr;
};

double load_of_last_minute() {
  double load = 0;
  ::getloadavg(&load, 1);
  return load;
}

std::string bound_of(const Row& row) {
  return row.target ? fmt::format("{} {:.4g}", row.at_most ? "<=" : ">=", *row.target) : "";
}

}  // namespace

Stopwatch::Stopwatch() : began_(Clock::steady().now()), cpu_(seconds_of(CLOCK_PROCESS_CPUTIME_ID)) {}

Cost Stopwatch::elapsed() const {
  return {.wall = to_seconds(Clock::steady().now() - began_), .cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu_};
}

double thread_cpu_seconds() {
  return seconds_of(CLOCK_THREAD_CPUTIME_ID);
}

double median(std::vector<double> values) {
  TESSERA_CHECK(!values.empty());
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Cost median(std::span<const Cost> costs) {
  std::vector<double> wall, cpu;
  for (const Cost& cost : costs) {
    wall.push_back(cost.wall);
    cpu.push_back(cost.cpu);
  }
  return {.wall = median(std::move(wall)), .cpu = median(std::move(cpu))};
}

Cost median_ratio(std::span<const Cost> a, std::span<const Cost> b) {
  TESSERA_CHECK_EQ(a.size(), b.size());
  std::vector<Cost> ratios;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back({.wall = a[i].wall / b[i].wall, .cpu = a[i].cpu / b[i].cpu});
  return median(ratios);
}

std::vector<Figures> run_ranks(int size, const RankBody& body) {
  const auto board = std::make_shared<Blackboard>(size);
  std::vector<Process> processes;
  for (int number = 0; number < size; ++number)
    processes.push_back(Process::start(fmt::format("rank {}", number), [&, number](const Process::Say& say) {
      Figures figures;
      etp::ShardGroup group = etp::ShardGroup::over(
          [&](const std::string& blob) { return board->exchange(static_cast<size_t>(number), blob); }, number, size,
          {});
      body(Rank(group, [&] { board->together(); }), figures);
      group.close();
      say(nlohmann::json(figures).dump());
    }));
  std::vector<Figures> all;
  for (const std::string& said : hear_all(processes, Deadline::after(kPatience)))
    all.push_back(nlohmann::json::parse(said).get<Figures>());
  return all;
}

void take_turns(const Rank& rank, Figures& figures, int repeats, std::span<const Work> works) {
  for (int turn = -1; turn < repeats; ++turn) {
    for (const Work& work : works) {
      rank.together();
      const Stopwatch watch;
      work.run();
      const Cost cost = watch.elapsed();
      if (turn < 0) continue;
      figures[work.name + ", wall"].push_back(cost.wall);
      figures[work.name + ", CPU"].push_back(cost.cpu);
    }
  }
}

std::vector<Cost> costs_of(std::span<const Figures> ranks, const std::string& name) {
  std::vector<Cost> costs(ranks.front().at(name + ", wall").size());
  for (const Figures& rank : ranks)
    for (size_t i = 0; i < costs.size(); ++i) {
      costs[i].wall = std::max(costs[i].wall, rank.at(name + ", wall")[i]);
      costs[i].cpu += rank.at(name + ", CPU")[i] / static_cast<double>(ranks.size());
    }
  return costs;
}

Table::Table() : busy_(load_of_last_minute() > usable_cpus()) {
  fmt::print("{} CPUs, load {:.1f}, kernels {}\n", usable_cpus(), load_of_last_minute(), active_kernel());
  fmt::print(
      "ms: medians of a piece of work, wall time of the slowest rank and CPU time of a rank. Values by wall time and,\n"
      "where it tells the same, by CPU time, which counts where the machine has more to do than it has CPUs, as {}.\n"
      "Ranks are processes.\n\n",
      busy_ ? "now" : "not now");
  fmt::print("{:<52}{:>10}{:>10}  {:<16}{:>10}{:>10}  {:<12}\n", "", "wall ms", "CPU ms", "", "by wall", "by CPU",
             "target");
}

void Table::section(const std::string& name) {
  fmt::print("{}\n", name);
}

void Table::add(const Row& row) {
  std::string verdict;
  if (row.target) {
    const double value = busy_ && row.cpu ? *row.cpu : row.wall;
    const bool reached = row.at_most ? value <= *row.target : value >= *row.target;
    verdict = reached ? "reached" : "MISSED";
    ++(reached ? reached_ : missed_);
  }
  const std::string times =
      row.time ? fmt::format("{:10.3f}{:10.3f}", row.time->wall * 1e3, row.time->cpu * 1e3) : std::string(20, ' ');
  fmt::print("  {:<50}{}  {:<16}{:10.3f}{:>10}  {:<11}{}\n", row.what, times, row.figure, row.wall,
             row.cpu ? fmt::format("{:.3f}", *row.cpu) : "", bound_of(row), verdict);
  std::fflush(stdout);
}

void Table::foot() const {
  fmt::print("\n{} targets reached, {} missed; load at the end {:.1f}\n", reached_, missed_, load_of_last_minute());
}

}  // namespace tessera::bench
