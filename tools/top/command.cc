#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/escape.h"
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

It asks the agents of this machine; of others it shows what the store knows. Rates cover the time since the last look.

It may be started before anything else. Where there is no store yet it says so on stderr and waits, also with --json, and
again when the store has ended. With --once it does not wait: if there is no store, it exits with status 2.)";

constexpr Duration kConnectTimeout = seconds(5);
constexpr Duration kHandOver = seconds(0.5);  // between two hosts of the "auto" store

struct TopOptions {
  std::string store;
  std::string name_space;
  double interval_s = 1;
  bool once = false;
  bool json = false;
};

// Finds the "auto" store without becoming its host.
class AutoSocket {
 public:
  AutoSocket() : root_(RuntimeDir::prepare_root()), path_(store::AutoHost::socket_path(root_)) {}

  // Nothing if nobody listens. Throws if the listening process is stopped.
  std::optional<std::string> url() const {
    // A dead host leaves its socket, at which the next one will listen in a moment.
    const bool left = std::filesystem::exists(path_);
    return await_url(Deadline::after(left ? kHandOver : Duration::zero()), {});
  }
  // The same, but waits for a host until the deadline.
  std::optional<std::string> await_url(const Deadline& deadline, const std::stop_token& stop) const {
    FolderWatch appears;
    appears.add(root_);
    while (true) {
      if (const std::optional<pid_t> host = find_host()) {
        require_running(*host);
        return "unix://" + path_;
      }
      if (!appears.wait(deadline, stop)) return std::nullopt;
    }
  }
  std::string nobody() const {
    return fmt::format(
        "store auto: nobody hosts it in {}: no process of this user is on the bus there; --store names another"_message,
        root_);
  }

 private:
  std::optional<pid_t> find_host() const {
    try {
      return require_same_user(connect_unix(path_, Deadline::after(kConnectTimeout)).get());
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnavailable) throw;
      return std::nullopt;
    }
  }

  static void require_running(pid_t host) {
    if (stays_stopped(host))
      fail(ErrorCode::kUnavailable,
           "store auto: its host (pid {}) is stopped: continue it (kill -CONT {}) or end it"_message, host, host);
  }

  // One check would not do: a tracer stops a process for a moment at every system call.
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

// The store to look into, if there is one; otherwise says once on stderr what it waits for.
class TopStore {
 public:
  TopStore(const TopOptions& options, Interrupt& interrupt) : options_(options), interrupt_(interrupt) {
    if (options.store == "auto") auto_.emplace();
  }

  // Waits for the store. Throws instead with --once, after a signal, and if the store's host is stopped.
  Store& open() {
    while (store_ == nullptr) {
      interrupt_.check();
      const std::string url = auto_ ? auto_url() : options_.store;
      try {
        store_ = open_store(url, {.connect_timeout = kConnectTimeout, .stop = interrupt_.stop_token()});
      } catch (const Error& error) {
        interrupt_.check();
        if (auto_) (void)auto_->url();  // throws if the host was stopped in the meantime: that is the cause
        if (!is_waited_for(error)) throw;
        say_waiting(error.what());
      }
    }
    waiting_ = false;
    return *store_;
  }

  // After a failed look: whether the next open() waits for another store. Throws if the host is the cause.
  bool has_ended(const Error& error) {
    interrupt_.check();
    store_.reset();
    if (auto_ && !auto_->url() && options_.once) throw Error(ErrorCode::kUnavailable, auto_->nobody());
    return is_waited_for(error);
  }

 private:
  std::string auto_url() {
    if (std::optional<std::string> url = auto_->url()) return *std::move(url);
    if (options_.once) throw Error(ErrorCode::kUnavailable, auto_->nobody());
    say_waiting(auto_->nobody());
    std::optional<std::string> url = auto_->await_url(Deadline::after(Duration::max()), interrupt_.stop_token());
    interrupt_.check();
    return *std::move(url);
  }
  bool is_waited_for(const Error& error) const { return !options_.once && error.code() == ErrorCode::kUnavailable; }
  void say_waiting(std::string_view for_what) {
    if (!std::exchange(waiting_, true)) fmt::print(stderr, "tessera: waiting for a store: {}\n", printable(for_what));
  }

  const TopOptions& options_;
  Interrupt& interrupt_;
  std::optional<AutoSocket> auto_;
  std::unique_ptr<Store> store_;
  bool waiting_ = false;
};

ExitStatus run_top(const TopOptions& options, Interrupt& interrupt) {
  TopStore store(options, interrupt);
  Mutex mutex;
  StoppableCondVar stopped;
  std::optional<TopLook> before;
  while (true) {
    Store& opened = store.open();
    TopLook now;
    try {
      now = look_around(opened, options.name_space);
    } catch (const Error& error) {
      if (!store.has_ended(error)) throw;
      before.reset();
      continue;
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
