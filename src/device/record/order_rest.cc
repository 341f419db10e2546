// What ScheduleOrder says of the records that it could not come to.
#include <algorithm>

#include "base/escape.h"
#include "base/fail.h"
#include "device/record/order.h"

namespace tessera::device {
namespace {

constexpr size_t kMostListed = 8;

std::string torn_text(const RankLog& log) {
  return log.torn_bytes() == 0 ? "" : fmt::format(" (of which the last {} B were not written whole)", log.torn_bytes());
}

}  // namespace

ScheduleOrder::Held ScheduleOrder::all_held() const {
  Held held;
  for (const RankLog* log : logs_)
    for (const Record& record : log->records()) {
      if (record.kind == RecordKind::kEventRecord) held.events.emplace(record.rank, record.event);
      if (record.kind == RecordKind::kCollective) held.meetings.insert({{record.subject, record.number}, record.rank});
      if (record.kind != RecordKind::kOperation && record.kind != RecordKind::kWordWrite) continue;
      for (const WordEdge& word : record.words) {
        uint64_t& highest = held.words[{word.rank, word.word}];
        highest = std::max(highest, word.value);
      }
    }
  return held;
}

void ScheduleOrder::explain_rest() {
  std::vector<std::pair<uint32_t, const Record*>> waiting;
  for (uint32_t actor = 0; actor < states_.size(); ++actor) {
    const State& state = states_[actor];
    if (!state.queue.empty()) {
      waiting.emplace_back(actor, &at(actor, state.queue.front().position));
      unreached_ += state.queue.size();
    } else if (state.actor.number == 0 && read_[actor] < logs_[actor]->records().size()) {
      waiting.emplace_back(actor, &at(actor, read_[actor]));
      unreached_ += logs_[actor]->records().size() - read_[actor];
    }
  }
  if (waiting.empty()) return;
  const Held in_logs = all_held();
  bool explained = false;
  for (const auto& [actor, record] : waiting) explained |= explain(actor, *record, in_logs);
  if (explained) return;
  std::vector<std::string> circle;
  for (const auto& [actor, record] : std::span(waiting).first(std::min(waiting.size(), kMostListed)))
    circle.push_back(fmt::format("{} in record {} ({})", states_[actor].actor.to_string(), record->sequence,
                                 device::to_string(record->kind)));
  add_fault(fmt::format("the logs wait in a circle: {}"_message, fmt::join(circle, ", ")));
}

bool ScheduleOrder::explain(uint32_t actor, const Record& record, const Held& held) {
  State& state = states_[actor];
  switch (record.kind) {
    case RecordKind::kOperation: {
      const size_t waits = waits_of(state, record);
      if (waits < record.waits) {
        unfinished_.push_back(fmt::format("{}: operation {} ({} {}) had not begun when the recording ended",
                                          state.actor.to_string(), record.operation, printable(record.name),
                                          printable(record.subject)));
        return true;
      }
      bool explained = false;
      for (size_t i = 0; i < waits; ++i)
        explained |= explain_words(actor, at(actor, state.waits[state.next_wait + i].second), held);
      return explained;
    }
    case RecordKind::kEventWait:
      if (held.events.contains({record.rank, record.event})) return false;
      add_fault(fmt::format("rank {}: record {}: {} waits for event {}, which its log does not record"_message,
                            record.rank, record.sequence, state.actor.to_string(), record.event));
      return true;
    case RecordKind::kWordWait:
      return explain_words(actor, record, held);
    case RecordKind::kCollective:
      return explain_meeting(record, held);
    default:
      return false;
  }
}

bool ScheduleOrder::explain_words(uint32_t actor, const Record& record, const Held& held) {
  bool explained = false;
  for (const WordEdge& word : record.words) {
    const auto highest = held.words.find({word.rank, word.word});
    if (highest != held.words.end() && highest->second >= word.value) continue;
    const bool known = word.rank >= 0 && static_cast<size_t>(word.rank) < logs_.size();
    const std::string reached =
        highest == held.words.end() ? "is not written" : fmt::format("reaches {}", highest->second);
    add_fault(
        fmt::format("rank {}: record {}: {} waits for word {} of rank {} >= {}, which {} in that rank's log{}"_message,
                    record.rank, record.sequence, states_[actor].actor.to_string(), word.word, word.rank, word.value,
                    reached, known ? torn_text(*logs_[static_cast<size_t>(word.rank)]) : ""));
    explained = true;
  }
  return explained;
}

bool ScheduleOrder::explain_meeting(const Record& record, const Held& held) {
  const MeetingKey key{record.subject, record.number};
  std::vector<int> present;
  for (auto it = held.meetings.lower_bound({key, 0}); it != held.meetings.end() && it->first == key; ++it)
    present.push_back(it->second);
  if (present.size() >= record.ranks) return false;
  add_fault(fmt::format(
      "rank {}: record {}: collective {} of group {} ({}) takes {} ranks, and is in the logs of {} only: "
      "rank {}"_message,
      record.rank, record.sequence, record.number, printable(record.subject), printable(record.name), record.ranks,
      present.size(), fmt::join(std::span(present).first(std::min(present.size(), kMostListed)), ", ")));
  return true;
}

}  // namespace tessera::device
