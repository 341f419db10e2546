#include "base/log.h"

#include <fmt/chrono.h>
#include <pthread.h>
#include <spdlog/formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <span>
#include <utility>

#include "base/config.h"
#include "base/escape.h"
#include "base/fail.h"

namespace tessera {
namespace {

struct NamedFields {
  std::string_view name;
  std::span<const LogField> fields;
};

// Carries the event to the formatter, which runs on the same thread, past spdlog's message.
thread_local const NamedFields* current_event = nullptr;
thread_local const LogScope* current_scope = nullptr;

// A logfmt value, quoted if it needs quotes.
void append_logfmt_value(std::string_view text, std::string& out) {
  const bool bare = !text.empty() && std::ranges::all_of(text, [](unsigned char c) {
    return c > ' ' && c < 0x7f && c != '"' && c != '=' && c != '\\';
  });
  if (bare)
    out += text;
  else
    append_json_string(text, out);
}

void append_value(const LogField::Value& value, LogFormat format, std::string& out) {
  if (const auto* text = std::get_if<std::string_view>(&value)) {
    format == LogFormat::kJson ? append_json_string(*text, out) : append_logfmt_value(*text, out);
  } else if (const auto* number = std::get_if<int64_t>(&value)) {
    fmt::format_to(std::back_inserter(out), "{}", *number);
  } else if (const double real = std::get<double>(value); std::isfinite(real)) {
    fmt::format_to(std::back_inserter(out), "{:.6g}", real);
  } else {
    out += format == LogFormat::kJson ? "null" : "nan";
  }
}

std::string_view name_of(LogLevel level) {
  return level == LogLevel::warn  ? "warn"
         : level == LogLevel::err ? "error"
                                  : spdlog::level::to_string_view(level).data();
}

}  // namespace

class LineFormatter final : public spdlog::formatter {
 public:
  explicit LineFormatter(LogFormat format) : format_(format) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    std::string line;
    format_ == LogFormat::kText ? write_text(message, line) : write_pairs(message, line);
    line += '\n';
    out.append(line.data(), line.data() + line.size());
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<LineFormatter>(format_); }

 private:
  static std::string time_of(const spdlog::details::log_msg& message) {
    const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(message.time.time_since_epoch()).count();
    return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:06}", fmt::gmtime(static_cast<std::time_t>(micros / 1'000'000)),
                       micros % 1'000'000);
  }

  static std::string thread_name() {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof(name));
    return name;
  }

  // Calls `write` with the event's fields, then with those of the scopes from the inside out; once for each key.
  template <typename Write>
  static void for_each_field(Write write) {
    std::array<std::string_view, 32> seen;
    size_t count = 0;
    const auto visit = [&](std::span<const LogField> fields) {
      for (const LogField& field : fields) {
        if (count == seen.size() || std::find(seen.begin(), seen.begin() + count, field.key) != seen.begin() + count)
          continue;
        seen[count++] = field.key;
        write(field);
      }
    };
    if (current_event != nullptr) visit(current_event->fields);
    for (const LogScope* scope = current_scope; scope != nullptr; scope = scope->outer_)
      visit(std::span(scope->fields_).first(scope->count_));
  }

  static std::string_view payload_of(const spdlog::details::log_msg& message) {
    return {message.payload.data(), message.payload.size()};
  }

  void write_text(const spdlog::details::log_msg& message, std::string& line) const {
    fmt::format_to(std::back_inserter(line), "{} {}/{} {} {}:", time_of(message), ::getpid(), message.thread_id,
                   printable(thread_name()), name_of(message.level));
    const size_t head = line.size();
    if (current_event != nullptr) fmt::format_to(std::back_inserter(line), " {}", current_event->name);
    for_each_field([&](const LogField& field) {
      fmt::format_to(std::back_inserter(line), " {}=", field.key);
      append_value(field.value, format_, line);
    });
    if (payload_of(message).empty()) return;
    if (line.size() > head) line += ':';
    line += ' ';
    line += printable(payload_of(message));
  }

  void write_pairs(const spdlog::details::log_msg& message, std::string& line) const {
    const bool json = format_ == LogFormat::kJson;
    bool first = true;
    const auto add = [&](const LogField& field) {
      if (json)
        fmt::format_to(std::back_inserter(line), "{}\"{}\":", first ? "{" : ",", field.key);
      else
        fmt::format_to(std::back_inserter(line), "{}{}=", first ? "" : " ", field.key);
      first = false;
      append_value(field.value, format_, line);
    };
    const std::string time = time_of(message) + "Z";
    const std::string thread = thread_name();
    add({"ts", time});
    add({"level", name_of(message.level)});
    add({"pid", ::getpid()});
    add({"tid", message.thread_id});
    add({"thread", thread});
    if (current_event != nullptr) add({"event", current_event->name});
    for_each_field(add);
    if (!payload_of(message).empty()) add({"msg", payload_of(message)});
    if (json) line += '}';
  }

  const LogFormat format_;
};

LogScope::LogScope(std::span<const LogField> fields)
    : count_(std::min(fields.size(), kMostFields)), outer_(current_scope) {
  std::copy_n(fields.begin(), count_, fields_.begin());
  current_scope = this;
}

LogScope::~LogScope() {
  current_scope = outer_;
}

std::unique_ptr<spdlog::formatter> make_log_formatter(LogFormat format) {
  return std::make_unique<LineFormatter>(format);
}

spdlog::logger& log() {
  // Leaked on purpose: a thread may log while the process destroys its statics.
  static spdlog::logger* const logger = [] {
    const std::string& format = Config::get().log_format;
    const std::string& level = Config::get().log_level;
    auto* made = new spdlog::logger("tessera", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_formatter(make_log_formatter(format == "json"     ? LogFormat::kJson
                                           : format == "logfmt" ? LogFormat::kLogfmt
                                                                : LogFormat::kText));
    // What is neither is refused by Config::require_valid().
    const LogLevel wanted = spdlog::level::from_str(level);  // off if spdlog does not know the level
    const bool known = wanted != LogLevel::off || level == "off";
    made->set_level(known ? wanted : LogLevel::warn);
    return made;
  }();
  return *logger;
}

LogLimits& LogLimits::process() {
  static auto* const limits = new LogLimits;  // leaked on purpose: a thread may log while statics are destroyed
  return *limits;
}

std::optional<int64_t> LogLimits::admit(std::string_view event) {
  const TimePoint now = clock_.now();
  const MutexLock lock(mutex_);
  auto count = counts_.find(event);
  if (count == counts_.end()) count = counts_.emplace(event, Count{.begin = now}).first;
  Count& lines = count->second;
  if (now - lines.begin >= kPeriod) {
    lines.begin = now;
    lines.written = 0;
  }
  if (lines.written == kMost) {
    ++lines.withheld;
    return std::nullopt;
  }
  ++lines.written;
  return std::exchange(lines.withheld, 0);
}

void write_event(LogLevel level, std::string_view name, std::initializer_list<LogField> fields,
                 std::string_view message) {
  const NamedFields event{.name = name, .fields = fields};
  current_event = &event;
  log().log(level, spdlog::string_view_t(message.data(), message.size()));
  current_event = nullptr;
}

}  // namespace tessera
