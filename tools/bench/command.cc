#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "base/fail.h"
#include "tools/bench/processes.h"
#include "tools/bench/run.h"
#include "tools/commands.h"
#include "tools/interrupt.h"

namespace tessera::tools {
namespace {

using bench::Process;

constexpr char kBenchExamples[] = R"(Examples:
  tessera bench                                  # everything: some minutes, up to 5 GiB of memory
  tessera bench --quick                          # a few cases of 64 MiB
  tessera bench --only 'columns/8192/shared' --json

See bench/README.md for what is measured and how.)";

constexpr Duration kPatience = std::chrono::hours(1);
constexpr int64_t kQuickBytes = int64_t{64} << 20;
constexpr int64_t kLeastBytes = int64_t{1} << 20, kMostBytes = int64_t{64} << 30;
constexpr int kQuickRepeat = 3, kMostRepeat = 1000;

struct Options {
  std::optional<uint64_t> bytes;
  std::optional<int> repeat;
  std::string only;
  bool quick = false;
  bool json = false;

  bench::RunOptions run_options() const {
    bench::RunOptions run{.only = only, .quick = quick};
    if (quick) run.bytes = kQuickBytes, run.repeat = kQuickRepeat;
    if (bytes) run.bytes = static_cast<int64_t>(std::min(*bytes, static_cast<uint64_t>(kMostBytes) + 1));
    if (repeat) run.repeat = *repeat;
    if (run.bytes < kLeastBytes || run.bytes > kMostBytes)
      fail(ErrorCode::kInvalidArgument, "--size is {} B, not from 1 MiB to 64 GiB"_message, *bytes);
    if (run.repeat < 1 || run.repeat > kMostRepeat)
      fail(ErrorCode::kInvalidArgument, "--repeat is {}, not from 1 to {}"_message, run.repeat, kMostRepeat);
    return run;
  }
};

void show_step(int step, int steps, const std::string& name) {
  if (::isatty(STDERR_FILENO) == 0) return;
  fmt::print(stderr, "\r\033[K{}/{} {}", step, steps, name);
  if (step == steps) fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

// The benchmark in a separate process, which forks every rank. Such a process must have only one thread, but a running
// command has its Interrupt's thread, too. So this process is started before that, when the options are parsed.
class Benchmark {
 public:
  explicit Benchmark(const Options& options)
      : process_(Process::start("bench", [&](const Process::Say& say) {
          const bench::Report report = bench::run(options.run_options(), show_step);
          say(options.json ? bench::to_json(report) + "\n" : bench::to_table(report));
          report.status().throw_if_error();
          say("");
        })) {}

  void print_report(Interrupt& interrupt) {
    const Interrupt::Scope scope(interrupt, [this] { process_.kill(); });
    try {
      fmt::print("{}", process_.hear(Deadline::after(kPatience)));
      std::fflush(stdout);
      process_.hear(Deadline::after(kPatience));
    } catch (const Error&) {
      interrupt.check();
      throw;
    }
  }

 private:
  Process process_;
};

}  // namespace

void add_bench_command(CLI::App& app, Run& run) {
  CLI::App& command = *app.add_subcommand("bench", "Measure this machine's ceilings and Tessera's share of them")
                           ->footer(kBenchExamples);
  const auto options = std::make_shared<Options>();
  command.add_option("--size", options->bytes, "Size of the tensors in a large case, such as 256MiB (default: 1GiB)")
      ->transform(CLI::AsSizeValue(false));
  command.add_option("--repeat", options->repeat, "Repetitions that count, after one warm-up (default: 5)");
  command.add_option("--only", options->only, "Only cases whose name contains this regex (RE2)");
  command.add_flag("--quick", options->quick, "A few cases of 64 MiB, 3 repetitions");
  command.add_flag("--json", options->json, "Print one JSON object");
  command.callback([options, &run] {
    const auto benchmark = std::make_shared<Benchmark>(*options);
    run = [benchmark](Interrupt& interrupt) {
      benchmark->print_report(interrupt);
      return ExitStatus::kOk;
    };
  });
}

}  // namespace tessera::tools
