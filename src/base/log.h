// The project's logger: one line for each event on standard error. Thread-safe.
//
// TESSERA_LOG sets the level (trace, debug, info, warn, error, off; default warn):
//
//   error  an invariant of Tessera or a callback failed, and nobody else is told
//   warn   work goes on, but a person should look: a peer refused, a late rank, a lease lost
//   info   once for each process, connection, pair or batch
//   debug  once for each version
//   trace  once for each message
//
// Errors that a caller gets as an exception are not logged as well.
//
// TESSERA_LOG_FORMAT sets the form (text, logfmt, json; default text). A line has the time, the level, process and
// thread, the event's name and fields if it has any, and the message:
//
//   2026-01-31T12:00:00.000000 4711/4712 tessera-agent info: batch.registered job=trainer rank=0: 2 tensors
//
//   ts=2026-01-31T12:00:00.000000Z level=info pid=4711 tid=4712 thread=tessera-agent event=batch.registered job=...
//
//   {"ts":"2026-01-31T12:00:00.000000Z","level":"info","pid":4711,"tid":4712,"thread":"tessera-agent","event":...}
//
// Times are UTC. Fields and messages may hold what a peer sent: nothing in them can end the line or control a terminal
// (base/escape.h).
#pragma once

#include <fmt/format.h>
#include <spdlog/logger.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "base/clock.h"
#include "base/mutex.h"

namespace tessera {

// The logger behind log_event(), through which every line goes.
spdlog::logger& log();

using LogLevel = spdlog::level::level_enum;

// A key (letters, digits, '_'; none of the line's own keys) and its value, which must live as long as the call or
// LogScope that takes it; floats are shown with six digits. These keys mean the same everywhere: job, rank, peer
// ("JOB/RANK"), pair, batch, version, bytes, seconds.
struct LogField {
  using Value = std::variant<int64_t, double, std::string_view>;

  LogField() = default;
  template <std::integral T>
  LogField(std::string_view field, T number) : key(field), value(static_cast<int64_t>(number)) {}
  LogField(std::string_view field, double number) : key(field), value(number) {}
  LogField(std::string_view field, std::string_view text) : key(field), value(text) {}
  LogField(std::string_view field, const std::string& text) : key(field), value(std::string_view(text)) {}
  LogField(std::string_view field, const char* text) : key(field), value(std::string_view(text)) {}

  std::string_view key{};
  Value value{};
};

void write_event(LogLevel level, std::string_view name, std::initializer_list<LogField> fields,
                 std::string_view message);

// Logs an event: a stable name ("batch.registered"), fields, and a text for people.
template <typename... Args>
void log_event(LogLevel level, std::string_view name, std::initializer_list<LogField> fields,
               fmt::format_string<Args...> format, Args&&... args) {
  if (log().should_log(level)) write_event(level, name, fields, fmt::format(format, std::forward<Args>(args)...));
}
inline void log_event(LogLevel level, std::string_view name, std::initializer_list<LogField> fields) {
  if (log().should_log(level)) write_event(level, name, fields, {});
}

// While it lives, every line that this thread logs also carries these fields. If scopes nest and share a key, the inner
// one wins. Costs a few stores.
class LogScope {
 public:
  static constexpr size_t kMostFields = 6;

  LogScope(std::initializer_list<LogField> fields) : LogScope(std::span(fields)) {}
  explicit LogScope(std::span<const LogField> fields);
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;

 private:
  friend class LineFormatter;
  std::array<LogField, kMostFields> fields_{};
  size_t count_;
  const LogScope* const outer_;
};

// How many lines of an event may be written: the first kMost in each period. Thread-safe.
class LogLimits {
 public:
  static constexpr int kMost = 20;
  static constexpr Duration kPeriod = seconds(10);

  explicit LogLimits(const Clock& clock = Clock::steady()) : clock_(clock) {}
  static LogLimits& process();
  // Returns how many lines were withheld since the last one that was written, or nothing: then this one is withheld,
  // too.
  std::optional<int64_t> admit(std::string_view event);

 private:
  struct Count {
    TimePoint begin = {};  // of the period
    int written = 0;       // in it
    int64_t withheld = 0;
  };

  const Clock& clock_;
  Mutex mutex_;
  std::map<std::string, Count, std::less<>> counts_ GUARDED_BY(mutex_);
};

// log_event() for what a stranger can cause at any rate. The field `withheld` counts the lines of this event that were
// left out since the last one.
template <typename... Args>
void log_limited_event(LogLevel level, std::string_view name, std::initializer_list<LogField> fields,
                       fmt::format_string<Args...> format, Args&&... args) {
  if (!log().should_log(level)) return;
  const std::optional<int64_t> withheld = LogLimits::process().admit(name);
  if (!withheld) return;
  std::optional<LogScope> scope;
  if (*withheld > 0) scope.emplace(std::initializer_list<LogField>{{"withheld", *withheld}});
  write_event(level, name, fields, fmt::format(format, std::forward<Args>(args)...));
}

enum class LogFormat { kText, kLogfmt, kJson };

// The formatter that log() uses; for tests.
std::unique_ptr<spdlog::formatter> make_log_formatter(LogFormat format);

}  // namespace tessera
