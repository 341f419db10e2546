#include "tools/bench/run.h"

#include <re2/re2.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>

#include "base/escape.h"
#include "base/fail.h"
#include "tessera/store.h"
#include "tools/bench/ceilings.h"
#include "tools/bench/processes.h"

namespace tessera::bench {
namespace {

constexpr Duration kStoreTimeout = std::chrono::seconds(10);
constexpr int kCeilingRepeat = 5;  // before and after each case

struct Selection {
  std::vector<Case> cases;
  std::vector<Crowd> crowds;
  std::vector<Victim> victims;
};

Selection select(const RunOptions& options) {
  const RE2 only(options.only, RE2::Quiet);
  if (!only.ok()) fail(ErrorCode::kInvalidArgument, "--only {}: {}"_message, in_quotes(options.only), only.error());
  Selection selection{.cases = select_cases(all_cases(options.bytes), [&](const Case& c) {
                        return RE2::PartialMatch(c.name, only) && (c.quick || !options.quick);
                      })};
  for (const Crowd& crowd : all_crowds())
    if (RE2::PartialMatch(crowd.name, only)) selection.crowds.push_back(crowd);
  for (const Victim victim : {Victim::kSource, Victim::kDestination})
    if (RE2::PartialMatch(std::string(to_string(victim)), only)) selection.victims.push_back(victim);
  if (selection.cases.empty() && selection.crowds.empty() && selection.victims.empty())
    fail(ErrorCode::kInvalidArgument,
         "--only {} matches no case; names look like rows-to-columns/8192/shared/digest"_message,
         in_quotes(options.only));
  return selection;
}

// Pins this process, and all that it will fork, to the first `count` CPUs that it may use, or to all if there are
// fewer. Returns their numbers.
std::vector<int> pin_to_first_cpus(int count) {
  cpu_set_t usable, chosen;
  if (::sched_getaffinity(0, sizeof usable, &usable) != 0) fail_errno("sched_getaffinity");
  CPU_ZERO(&chosen);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && std::ssize(cpus) < count; ++cpu) {
    if (!CPU_ISSET(cpu, &usable)) continue;
    CPU_SET(cpu, &chosen);
    cpus.push_back(cpu);
  }
  if (::sched_setaffinity(0, sizeof chosen, &chosen) != 0) fail_errno("sched_setaffinity");
  return cpus;
}

// A store in a separate process.
class StoreProcess {
 public:
  StoreProcess()
      : process_(Process::start("store",
                                [](const Process::Say& say) {
                                  const auto server = serve_store("tcp://127.0.0.1:0");
                                  say(server->address());
                                  ::pause();  // until it is killed
                                })),
        url_(process_.hear(Deadline::after(kStoreTimeout))) {}

  // Each call returns another namespace.
  Meeting new_meeting() { return {url_, fmt::format("bench-{}", ++meetings_)}; }

 private:
  Process process_;
  std::string url_;
  int meetings_ = 0;
};

class Runner {
 public:
  Runner(const RunOptions& options, const OnStep& on_step)
      : selection_(select(options)),
        on_step_(on_step),
        report_{.machine = this_machine(),
                .cpus = pin_to_first_cpus(kCpus),
                .bytes = options.bytes,
                .repeat = options.repeat} {
    steps_ = static_cast<int>(selection_.cases.size() + selection_.crowds.size() + selection_.victims.size());
  }

  Report run() {
    for (const Case& c : selection_.cases) measure(c);
    for (const Crowd& crowd : selection_.crowds) measure(crowd);
    for (const Victim victim : selection_.victims) measure(victim);
    return std::move(report_);
  }

 private:
  void begin_step(const std::string& name) { on_step_(++step_, steps_, name); }

  // Seconds that copies of the same bytes take now; empty if the kernel refuses them.
  std::vector<double> measure_ceiling(Memory memory) {
    const int repeat = std::min(report_.repeat, kCeilingRepeat);
    if (memory == Memory::kShared) return append(report_.streaming_copy, time_streaming_copy(report_.bytes, repeat));
    try {
      return append(report_.process_vm_readv, time_process_vm_readv(report_.bytes, repeat));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPermissionDenied) throw;
      return {};
    }
  }

  // Measures a case between two ceilings, since a shared machine changes speed. The second is the next case's first.
  void measure(const Case& c) {
    begin_step(c.name);
    CaseResult result{.what = c};
    if (ceiling_of_ != c.memory) ceiling_ = measure_ceiling(c.memory);
    result.ceiling = ceiling_;
    try {
      result.times = run_transfer(c, report_.repeat, store_.new_meeting());
    } catch (const Error& error) {
      result.status = Status(error.code(), error.what());
    }
    ceiling_ = measure_ceiling(c.memory);
    ceiling_of_ = c.memory;
    append(result.ceiling, ceiling_);
    report_.cases.push_back(std::move(result));
  }

  void measure(const Crowd& crowd) {
    begin_step(crowd.name);
    CrowdResult result{.crowd = crowd};
    try {
      for (int i = 0; i < report_.repeat; ++i) time_crowd(crowd, store_.new_meeting(), result.times);
    } catch (const Error& error) {
      result.status = Status(error.code(), error.what());
    }
    report_.crowds.push_back(std::move(result));
  }

  void measure(Victim victim) {
    begin_step(std::string(to_string(victim)));
    DeathResult result{.victim = victim};
    try {
      for (int i = 0; i < report_.repeat; ++i) result.seconds.push_back(time_death(victim, store_.new_meeting()));
    } catch (const Error& error) {
      result.status = Status(error.code(), error.what());
    }
    report_.deaths.push_back(std::move(result));
  }

  static std::vector<double> append(std::vector<double>& to, std::vector<double> from) {
    to.insert(to.end(), from.begin(), from.end());
    return from;
  }

  const Selection selection_;
  const OnStep& on_step_;
  Report report_;
  StoreProcess store_;
  std::vector<double> ceiling_;  // the last one measured
  std::optional<Memory> ceiling_of_;
  int step_ = 0;
  int steps_ = 0;
};

}  // namespace

Report run(const RunOptions& options, const OnStep& on_step) {
  return Runner(options, on_step).run();
}

}  // namespace tessera::bench
