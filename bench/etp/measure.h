// What etp_bench measures with: the cost of a piece of work, ranks that are processes, and the table.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "tessera/etp.h"

namespace tessera::bench {

// Seconds.
struct Cost {
  double wall = 0;
  double cpu = 0;  // of the process: all of its threads
};

// Of this process, since it was made.
class Stopwatch {
 public:
  Stopwatch();
  Cost elapsed() const;

 private:
  TimePoint began_;
  double cpu_;
};

// Of the calling thread, in seconds.
double thread_cpu_seconds();

double median(std::vector<double> values);
Cost median(std::span<const Cost> costs);
// The median of a[i] / b[i]: of measurements that took turns.
Cost median_ratio(std::span<const Cost> a, std::span<const Cost> b);

// What a rank has measured, by name; goes over a pipe to the program that prints the table.
using Figures = std::map<std::string, std::vector<double>>;

// A rank of a case, in a process of its own.
class Rank {
 public:
  Rank(etp::ShardGroup group, std::function<void()> together)
      : group_(std::move(group)), together_(std::move(together)) {}

  int number() const { return group_.rank(); }
  int size() const { return group_.size(); }
  const etp::ShardGroup& shards() const { return group_; }
  collective::Group& group() const { return *group_.impl(); }
  // Returns once all ranks have called it.
  void together() const { together_(); }

 private:
  const etp::ShardGroup group_;
  const std::function<void()> together_;
};

using RankBody = std::function<void(const Rank&, Figures&)>;
// Forks `size` ranks, which form a group. Throws what a rank throws. REQUIRES: the calling process has one thread.
std::vector<Figures> run_ranks(int size, const RankBody& body);

// One of several kinds of work that take turns, so that a machine that others share is equally slow for each.
struct Work {
  std::string name;
  std::function<void()> run;
};
// Runs each `repeats` times after a warm-up, on all ranks at the same time, and notes what each took here.
void take_turns(const Rank& rank, Figures& figures, int repeats, std::span<const Work> works);
// Those costs of all ranks: the slowest one's wall time, the mean of their CPU time.
std::vector<Cost> costs_of(std::span<const Figures> ranks, const std::string& name);

// One line of the table. A figure that is a time itself has no `time`.
struct Row {
  std::string what;
  std::optional<Cost> time{};   // median seconds of one piece of work
  std::string figure;           // what the value is: "of the copy", "times as fast", "us"
  double wall = 0;              // the value by wall time
  std::optional<double> cpu{};  // and by CPU time, where that tells the same
  std::optional<double> target{};
  bool at_most = false;  // the target is a bound from above
};

// Prints each row as it comes.
class Table {
 public:
  // Prints the head: the machine, its load, what the columns are.
  Table();
  static void section(const std::string& name);
  void add(const Row& row);
  void foot() const;

 private:
  const bool busy_;  // CPU time decides, where a row has it
  int reached_ = 0;
  int missed_ = 0;
};

}  // namespace tessera::bench
