#include "device/record/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <utility>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera::device {
namespace {

struct Drawn {
  const Record* operation;
  const Record* ran;
};

// The operations of one log whose times are known, in the order in which they ended.
std::vector<Drawn> drawn_operations(const RankLog& log) {
  std::map<std::pair<uint32_t, uint64_t>, const Record*> given;
  const Record* last_of_host = nullptr;
  std::vector<Drawn> drawn;
  for (const Record& record : log.records()) {
    if (record.kind == RecordKind::kOperation) {
      if (record.actor == 0)
        last_of_host = &record;
      else
        given[{record.actor, record.operation}] = &record;
    }
    if (record.kind != RecordKind::kRan || record.end < record.begin) continue;
    if (record.actor == 0) {
      if (last_of_host != nullptr) drawn.push_back({last_of_host, &record});
      continue;
    }
    const auto operation = given.find({record.actor, record.operation});
    if (operation == given.end()) continue;  // given before the recording began
    drawn.push_back({operation->second, &record});
    given.erase(operation);
  }
  return drawn;
}

class TimelineWriter {
 public:
  explicit TimelineWriter(std::ostream& out) : out_(out) { out_ << "{\"displayTimeUnit\":\"ns\",\"traceEvents\":["; }

  void name(std::string_view what, int rank, uint32_t actor, std::string_view name) {
    begin();
    fmt::format_to(std::back_inserter(text_),
                   "{{\"ph\":\"M\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":", what, rank, actor);
    append_json_string(name, text_);
    text_ += "}}";
    write();
  }

  void operation(const Drawn& drawn, int64_t zero) {
    const Record& record = *drawn.operation;
    const auto start = static_cast<uint64_t>(drawn.ran->begin) - static_cast<uint64_t>(zero);
    const auto length = static_cast<uint64_t>(drawn.ran->end) - static_cast<uint64_t>(drawn.ran->begin);
    begin();
    text_ += "{\"ph\":\"X\",\"cat\":\"etp\",\"name\":";
    append_json_string(record.name, text_);
    fmt::format_to(std::back_inserter(text_),
                   ",\"pid\":{},\"tid\":{},\"ts\":{}.{:03},\"dur\":{}.{:03},\"args\":{{\"subject\":", record.rank,
                   record.actor, start / 1000, start % 1000, length / 1000, length % 1000);
    append_json_string(record.subject, text_);
    uint64_t read = 0;
    uint64_t written = 0;
    for (const RecordedAccess& access : record.accesses) (access.write ? written : read) += access.bytes;
    fmt::format_to(std::back_inserter(text_), ",\"record\":{},\"read\":{},\"written\":{}}}}}", record.sequence, read,
                   written);
    write();
  }

  void end(int64_t zero) { out_ << fmt::format("\n],\"otherData\":{{\"zero_ns\":\"{}\"}}}}\n", zero); }

 private:
  void begin() {
    text_ = first_ ? "\n" : ",\n";
    first_ = false;
  }
  void write() { out_.write(text_.data(), static_cast<std::streamsize>(text_.size())); }

  std::ostream& out_;
  std::string text_;
  bool first_ = true;
};

void check_ranks(std::span<const RankLog> logs) {
  std::set<int> ranks;
  for (const RankLog& log : logs) {
    if (log.head().run != logs.front().head().run)
      fail(ErrorCode::kMismatch, "the logs of rank {} and rank {} are of different runs"_message,
           logs.front().head().rank, log.head().rank);
    if (!ranks.insert(log.head().rank).second)
      fail(ErrorCode::kMismatch, "two logs are of rank {}"_message, log.head().rank);
  }
}

}  // namespace

TimelineFigures write_timeline(std::span<const RankLog> logs, std::ostream& out) {
  check_ranks(logs);
  TimelineFigures figures;
  std::vector<std::vector<Drawn>> drawn;
  int64_t zero = INT64_MAX;
  for (const RankLog& log : logs) {
    for (const Drawn& one : drawn.emplace_back(drawn_operations(log))) zero = std::min(zero, one.ran->begin);
    figures.operations += drawn.back().size();
  }
  if (figures.operations == 0)
    fail(ErrorCode::kNotFound, "no log tells when an operation ran: nothing to draw"_message);
  TimelineWriter writer(out);
  for (size_t i = 0; i < logs.size(); ++i) {
    const int rank = logs[i].head().rank;
    writer.name("process_name", rank, 0, fmt::format("rank {}", rank));
    std::map<uint32_t, std::string_view> lines;
    for (const Drawn& one : drawn[i]) lines.try_emplace(one.operation->actor, "host");
    for (const Record& record : logs[i].records())
      if (record.kind == RecordKind::kActor && lines.contains(record.actor)) lines[record.actor] = record.name;
    for (const auto& [actor, name] : lines) writer.name("thread_name", rank, actor, name);
    figures.streams += lines.size();
    for (const Drawn& one : drawn[i]) writer.operation(one, zero);
  }
  writer.end(zero);
  return figures;
}

}  // namespace tessera::device
