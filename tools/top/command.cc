#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/config.h"
#include "base/fail.h"
#include "base/folder_watch.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "peer/stop_detector.h"
#include "store/auto_host.h"
#include "tools/commands.h"
#include "tools/interrupt.h"
#include "tools/option_checks.h"
#include "tools/top/view.h"

namespace tessera::tools {
namespace {

constexpr char kTopExamples[] = R"(Examples:
  tessera top
  tessera top --store tcp://127.0.0.1:7070 --namespace run-17 --interval 5
  tessera top --once --json

It asks the agents of this machine; of others it shows what the store knows. Rates cover the time since the last look.)";

constexpr Duration kConnectTimeout = seconds(5);
constexpr Duration kHandOver = seconds(0.5);  // from one host of the "auto" store to the next

struct TopOptions {
  std::string store;
  std::string name_space;
  double interval_s = 1;
  bool once = false;
  bool json = false;
};

// Where the "auto" store is: whoever looks must not become its host.
class AutoSocket {
 public:
  AutoSocket() : root_(RuntimeDir::prepare_root()), path_(store::AutoHost::socket_path(root_)) {}

  // Throws where nobody listens, or who does is stopped.
  std::string url() const {
    const pid_t host = find_host();
    if (stays_stopped(host))
      fail(ErrorCode::kUnavailable,
           "store auto: its host (pid {}) is stopped: continue it (kill -CONT {}) or end it"_message, host, host);
    return "unix://" + path_;
  }

 private:
  // A host's death leaves its socket, at which the next one listens in a moment.
  pid_t find_host() const {
    const Deadline deadline = Deadline::after(kHandOver);
    FolderWatch appears;
    appears.add(root_);
    while (true) {
      try {
        return require_same_user(connect_unix(path_, Deadline::after(kConnectTimeout)).get());
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kUnavailable) throw;
        if (std::filesystem::exists(path_) && appears.wait(deadline)) continue;
        fail(
            ErrorCode::kUnavailable,
            "store auto: nobody hosts it in {}: no process of this user is on the bus there; --store names another"_message,
            root_);
      }
    }
  }

  // One look would not do: a tracer stops a process for a moment at every system call.
  static bool stays_stopped(pid_t host) {
    if (!is_stopped(host)) return false;
    std::this_thread::sleep_for(kStopPeriod);
    return is_stopped(host);
  }

  const std::string root_;
  const std::string path_;
};

void show(const TopOptions& options, const TopLook& now, const TopLook* before) {
  const bool clears = !options.once && !options.json && ::isatty(STDOUT_FILENO) != 0;
  if (options.json)
    fmt::print("{}\n", top_json(now, before));
  else
    fmt::print("{}{}{}", clears ? "\x1b[H\x1b[2J" : "", top_text(now, before), clears || options.once ? "" : "\n");
  std::fflush(stdout);
}

ExitStatus run_top(const TopOptions& options, Interrupt& interrupt) {
  const std::optional<AutoSocket> found =
      options.store == "auto" ? std::optional<AutoSocket>(std::in_place) : std::nullopt;
  const std::unique_ptr<Store> store = open_store(found ? found->url() : options.store,
                                                  {.connect_timeout = kConnectTimeout, .stop = interrupt.stop_token()});
  Mutex mutex;
  StoppableCondVar stopped;
  std::optional<TopLook> before;
  while (true) {
    interrupt.check();
    TopLook now;
    try {
      now = look_around(*store, options.name_space);
    } catch (const Error&) {
      interrupt.check();
      if (found) static_cast<void>(found->url());  // it says what is wrong with the host, if that is it
      throw;
    }
    show(options, now, before ? &*before : nullptr);
    if (options.once) return ExitStatus::kOk;
    before = std::move(now);
    const MutexLock lock(mutex);
    stopped.wait_until(mutex, interrupt.stop_token(), Deadline::after(seconds(options.interval_s)),
                       [] { return false; });
  }
}

}  // namespace

void add_top_command(CLI::App& app, Run& run) {
  CLI::App& command = *app.add_subcommand("top", "Show jobs, batches, versions, rates and who waits for whom, live")
                           ->footer(kTopExamples);
  const auto options = std::make_shared<TopOptions>();
  options->store = Config::get().store;
  options->name_space = Config::get().name_space;
  command
      .add_option("--store", options->store,
                  "Store where the jobs meet: auto or tcp://HOST:PORT (default: TESSERA_STORE)")
      ->check(not_empty());
  command.add_option("--namespace", options->name_space, "Namespace of the jobs to show (default: TESSERA_NAMESPACE)")
      ->check(not_empty());
  command.add_option("--interval", options->interval_s, "Seconds between two looks")
      ->check(seconds_between(0.1, 3600))
      ->capture_default_str();
  command.add_flag("--once", options->once, "Look once and exit");
  command.add_flag("--json", options->json, "Print one JSON object a line for each look");
  command.callback([options, &run] { run = [options](Interrupt& interrupt) { return run_top(*options, interrupt); }; });
}

}  // namespace tessera::tools
