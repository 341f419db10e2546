#include "device/record/order.h"

#include <algorithm>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera::device {

std::string OrderActor::to_string() const {
  if (number == 0) return fmt::format("the host of rank {}", rank);
  return fmt::format("stream {} of rank {}", printable(name), rank);
}

// --- what the logs are -----------------------------------------------------------------------------

ScheduleOrder::ScheduleOrder(std::span<const RankLog> logs) {
  if (logs.empty()) fail(ErrorCode::kInvalidArgument, "no logs to check"_message);
  for (const RankLog& log : logs) add_log(log, logs.front().head());
  std::vector<size_t> missing;
  for (size_t rank = 0; rank < logs_.size() && missing.size() < 8; ++rank)
    if (logs_[rank] == nullptr) missing.push_back(rank);
  if (!missing.empty())
    fail(ErrorCode::kMismatch, "the log of rank {} is missing: those of all {} ranks are checked together"_message,
         fmt::join(missing, ", "), logs_.size());
  read_.resize(logs_.size());
  streams_.resize(logs_.size());
  first_events_.resize(logs_.size(), UINT64_MAX);
  for (uint32_t host = 0; host < logs_.size(); ++host)
    states_.emplace_back().actor = {.rank = static_cast<int>(host), .number = 0, .name = "host", .host = host};
  for (const RankLog* log : logs_) find_streams(*log);
  if (states_.size() > kMostActors)
    fail(ErrorCode::kInvalidArgument, "logs of {} hosts and streams: at most {} can be checked"_message, states_.size(),
         kMostActors);
  for (State& state : states_) state.clock.resize(states_.size());
  for (const RankLog* log : logs_) find_waits(*log);
}

void ScheduleOrder::add_log(const RankLog& log, const LogHead& first) {
  const LogHead& head = log.head();
  if (head.run != first.run || head.ranks != first.ranks)
    fail(
        ErrorCode::kMismatch,
        "the logs of rank {} (run {:016x}, {} ranks) and of rank {} (run {:016x}, {} ranks) are of different runs"_message,
        first.rank, first.run, first.ranks, head.rank, head.run, head.ranks);
  logs_.resize(static_cast<size_t>(head.ranks));
  const RankLog*& place = logs_[static_cast<size_t>(head.rank)];
  if (place != nullptr) fail(ErrorCode::kMismatch, "two logs are of rank {}"_message, head.rank);
  place = &log;
}

void ScheduleOrder::find_streams(const RankLog& log) {
  const auto rank = static_cast<uint32_t>(log.head().rank);
  std::vector<uint32_t>& streams = streams_[rank];
  streams.push_back(rank);  // 0: the host
  for (const Record& record : log.records()) {
    if (record.kind == RecordKind::kEventRecord) first_events_[rank] = std::min(first_events_[rank], record.event);
    if (record.kind != RecordKind::kActor || states_.size() > kMostActors) continue;
    if (record.actor == 0 || record.actor > kMostActors) continue;
    if (record.actor >= streams.size()) streams.resize(record.actor + 1, kNone);
    if (streams[record.actor] != kNone) continue;
    streams[record.actor] = static_cast<uint32_t>(states_.size());
    states_.emplace_back().actor = {.rank = log.head().rank, .number = record.actor, .name = record.name, .host = rank};
  }
}

void ScheduleOrder::find_waits(const RankLog& log) {
  for (Position position = 0; position < log.records().size(); ++position) {
    const Record& record = log.records()[position];
    const bool waits = record.kind == RecordKind::kWordWait;
    if ((!waits && record.kind != RecordKind::kOperationAccess) || record.operation == 0) continue;
    const uint32_t actor = actor_of(record);
    if (actor == kNone) continue;
    State& state = states_[actor];
    (waits ? state.waits : state.accesses).emplace_back(record.operation, position);
  }
  for (const uint32_t actor : streams_[static_cast<size_t>(log.head().rank)]) {
    if (actor == kNone) continue;
    std::ranges::sort(states_[actor].waits);
    std::ranges::sort(states_[actor].accesses);
  }
}

uint32_t ScheduleOrder::actor_of(const Record& record) {
  const std::vector<uint32_t>& streams = streams_[static_cast<size_t>(record.rank)];
  if (record.actor < streams.size() && streams[record.actor] != kNone) return streams[record.actor];
  add_fault(fmt::format("rank {}: record {} is of stream {}, which its log does not name"_message, record.rank,
                        record.sequence, record.actor));
  return kNone;
}

void ScheduleOrder::add_fault(std::string text) {
  if (faults_.size() < kMostFaults) faults_.push_back(std::move(text));
}

// --- clocks ----------------------------------------------------------------------------------------

ScheduleOrder::Stamp ScheduleOrder::stamp(uint32_t actor) {
  State& state = states_[actor];
  if (state.snapshot_changes != state.changes) {
    state.snapshot = static_cast<uint32_t>(snapshots_.size() / states_.size());
    state.snapshot_changes = state.changes;
    snapshots_.insert(snapshots_.end(), state.clock.begin(), state.clock.end());
  }
  return {{actor, state.clock[actor]}, state.snapshot};
}

// A clock that has a point also has what that point had.
void ScheduleOrder::join(uint32_t actor, const Stamp& stamp) {
  State& state = states_[actor];
  if (stamp.point.before(state.clock)) return;
  const uint32_t* const other = snapshots_.data() + size_t{stamp.snapshot} * states_.size();
  for (size_t i = 0; i < state.clock.size(); ++i) state.clock[i] = std::max(state.clock[i], other[i]);
  state.clock[stamp.point.actor] = stamp.point.epoch;
  ++state.changes;
}

// The same of the host's clock as it is now.
void ScheduleOrder::join_host(uint32_t stream) {
  State& state = states_[stream];
  const State& host = states_[state.actor.host];
  if (state.host_changes != host.changes) {
    for (size_t i = 0; i < state.clock.size(); ++i) state.clock[i] = std::max(state.clock[i], host.clock[i]);
    state.host_changes = host.changes;
  }
  state.clock[state.actor.host] = host.clock[state.actor.host];
  ++state.changes;
}

void ScheduleOrder::wake(std::vector<uint32_t>& waiters) {
  ready_.insert(ready_.end(), waiters.begin(), waiters.end());
  waiters.clear();
}

// --- what happens ----------------------------------------------------------------------------------

void ScheduleOrder::run(const Visit& visit) {
  visit_ = &visit;
  for (uint32_t host = 0; host < logs_.size(); ++host) ready_.push_back(host);
  while (!ready_.empty()) {
    const uint32_t actor = ready_.front();
    ready_.pop_front();
    advance(actor);
  }
  visit_ = nullptr;
  explain_rest();
}

void ScheduleOrder::advance(uint32_t actor) {
  if (states_[actor].actor.number == 0) return read_on(actor);
  std::deque<Pending>& queue = states_[actor].queue;
  while (!queue.empty()) {
    join(actor, queue.front().host);
    if (!happen(actor, at(actor, queue.front().position))) return;
    queue.pop_front();
  }
}

void ScheduleOrder::read_on(uint32_t host) {
  const std::vector<Record>& records = logs_[host]->records();
  for (Position& position = read_[host]; position < records.size(); ++position) {
    const Record& record = records[position];
    switch (record.kind) {
      case RecordKind::kActor:
      case RecordKind::kRegion:
      case RecordKind::kRegionEnd:
      case RecordKind::kRan:
      case RecordKind::kOperationAccess:
        continue;
      case RecordKind::kWordWait:
        if (record.operation != 0) continue;  // it is in front of its operation
        break;
      default:
        break;
    }
    const uint32_t actor = actor_of(record);
    if (actor == host && !happen(host, record)) return;
    if (actor != host && actor != kNone) enqueue(actor, position);
  }
}

void ScheduleOrder::enqueue(uint32_t stream, Position position) {
  State& state = states_[stream];
  if (state.queue.empty()) {
    join_host(stream);
    if (happen(stream, at(stream, position))) return;
  }
  state.queue.push_back({position, stamp(state.actor.host)});
}

bool ScheduleOrder::happen(uint32_t actor, const Record& record) {
  State& state = states_[actor];
  switch (record.kind) {
    case RecordKind::kOperation:
      return happen_operation(actor, record);
    case RecordKind::kHostAccess:
      tick(actor);
      (*visit_)(record, {actor, state.clock[actor]}, state.clock);
      return true;
    case RecordKind::kEventRecord:
      record_event(actor, record);
      return true;
    case RecordKind::kEventWait:
      return wait_event(actor, record);
    case RecordKind::kWordWrite:
      tick(actor);
      write_words(actor, record);
      return true;
    case RecordKind::kWordWait:
      if (!wait_words(actor, record, 0)) return false;
      state.words_seen = 0;
      tick(actor);
      return true;
    case RecordKind::kCollective:
      return meet(actor, record);
    default:
      return true;
  }
}

// Waits that name an operation before the first one recorded began before the recording.
size_t ScheduleOrder::waits_of(State& state, const Record& record) {
  auto first = state.waits.begin() + static_cast<std::ptrdiff_t>(state.next_wait);
  for (; first != state.waits.end() && first->first < record.operation; ++first) {
    if (state.last_operation != 0)
      add_fault(fmt::format("rank {}: record {} waits for operation {} of {}, which its log does not have"_message,
                            record.rank, first->second + 1, first->first, state.actor.to_string()));
    ++state.next_wait;
  }
  const auto end =
      std::find_if(first, state.waits.end(), [&](const auto& wait) { return wait.first != record.operation; });
  return static_cast<size_t>(end - first);
}

bool ScheduleOrder::happen_operation(uint32_t actor, const Record& record) {
  State& state = states_[actor];
  if (state.actor.number != 0 && record.operation <= state.last_operation) {
    add_fault(fmt::format("rank {}: record {} is operation {} of {}, after operation {}"_message, record.rank,
                          record.sequence, record.operation, state.actor.to_string(), state.last_operation));
    return true;
  }
  const size_t waits = waits_of(state, record);
  if (waits < record.waits) return false;
  size_t first = 0;
  for (size_t i = 0; i < waits; ++i) {
    const Record& wait = at(actor, state.waits[state.next_wait + i].second);
    if (!wait_words(actor, wait, first)) return false;
    first += wait.words.size();
  }
  state.next_wait += waits;
  state.words_seen = 0;
  state.last_operation = record.operation;
  tick(actor);
  visit_accesses(actor, record);
  write_words(actor, record);
  return true;
}

void ScheduleOrder::visit_accesses(uint32_t actor, const Record& operation) {
  State& state = states_[actor];
  const OrderPoint point{actor, state.clock[actor]};
  if (!operation.accesses.empty()) (*visit_)(operation, point, state.clock);
  for (; state.next_access < state.accesses.size(); ++state.next_access) {
    const auto& [number, position] = state.accesses[state.next_access];
    if (number > operation.operation) return;
    if (number == operation.operation) (*visit_)(at(actor, position), point, state.clock);
  }
}

void ScheduleOrder::record_event(uint32_t actor, const Record& record) {
  EventState& event = events_[{record.rank, record.event}];
  tick(actor);
  if (event.recorded)
    return add_fault(fmt::format("rank {}: record {} records event {} a second time"_message, record.rank,
                                 record.sequence, record.event));
  event.recorded = true;
  event.stamp = stamp(actor);
  states_[actor].events.push_back({event.stamp, {&record, {}, actor}});
  wake(event.waiters);
}

bool ScheduleOrder::wait_event(uint32_t actor, const Record& record) {
  if (record.event >= first_events_[static_cast<size_t>(record.rank)]) {  // others are older than the log
    EventState& event = events_[{record.rank, record.event}];
    if (!event.recorded) {
      event.waiters.push_back(actor);
      return false;
    }
    join(actor, event.stamp);
  } else if (first_events_[static_cast<size_t>(record.rank)] == UINT64_MAX) {
    return false;
  }
  tick(actor);
  return true;
}

bool ScheduleOrder::wait_words(uint32_t actor, const Record& record, size_t first) {
  State& state = states_[actor];
  for (size_t i = 0; i < record.words.size(); ++i) {
    if (first + i < state.words_seen) continue;
    const WordEdge& wanted = record.words[i];
    Word& word = words_[{wanted.rank, wanted.word}];
    const auto write = std::ranges::lower_bound(word.writes, wanted.value, {}, [](const auto& w) { return w.first; });
    if (write == word.writes.end()) {
      word.waiters.push_back(actor);
      return false;
    }
    join(actor, write->second);
    ++state.words_seen;
  }
  return true;
}

void ScheduleOrder::write_words(uint32_t actor, const Record& record) {
  for (const WordEdge& written : record.words) {
    if (written.rank != record.rank) {
      add_fault(fmt::format("rank {}: record {} writes word {} of rank {}, which only that rank may"_message,
                            record.rank, record.sequence, written.word, written.rank));
      continue;
    }
    Word& word = words_[{written.rank, written.word}];
    const Stamp now = stamp(actor);
    if (!word.writes.empty()) {
      const auto& [value, then] = word.writes.back();
      if (!then.point.before(states_[actor].clock))
        add_fault(
            fmt::format("rank {}: record {} sets word {} to {}, and nothing orders it after the write of {}"_message,
                        record.rank, record.sequence, written.word, written.value, value));
      if (written.value < value) {
        add_fault(fmt::format("rank {}: record {} sets word {} to {}, after {}: words only grow"_message, record.rank,
                              record.sequence, written.word, written.value, value));
        continue;
      }
    }
    word.writes.emplace_back(written.value, now);
    states_[actor].words.push_back({now, {&record, written, actor}});
    wake(word.waiters);
  }
}

bool ScheduleOrder::meet(uint32_t actor, const Record& record) {
  Meeting& meeting = meetings_[{record.subject, record.number}];
  if (meeting.first == nullptr) meeting.first = &record;
  const Record& first = *meeting.first;
  const auto mine = std::ranges::find_if(meeting.arrived, [&](const Stamp& s) { return s.point.actor == actor; });
  if (mine == meeting.arrived.end()) {
    if (meeting.arrived.size() == first.ranks)
      add_fault(fmt::format("collective {} of group {} takes {} ranks, and rank {} is one more"_message, record.number,
                            printable(record.subject), first.ranks, record.rank));
    if (first.name != record.name || first.ranks != record.ranks)
      add_fault(
          fmt::format("collective {} of group {} is {} of {} ranks at rank {}, and {} of {} ranks at rank {}"_message,
                      record.number, printable(record.subject), printable(first.name), first.ranks, first.rank,
                      printable(record.name), record.ranks, record.rank));
    tick(actor);
    meeting.arrived.push_back(stamp(actor));
    if (meeting.arrived.size() < first.ranks) return false;
    for (const Stamp& other : meeting.arrived)
      if (other.point.actor != actor) ready_.push_back(other.point.actor);
  } else if (mine->point.epoch != states_[actor].clock[actor]) {
    add_fault(fmt::format("rank {}: record {} is collective {} of group {} a second time"_message, record.rank,
                          record.sequence, record.number, printable(record.subject)));
    return true;
  }
  if (meeting.arrived.size() < first.ranks) return false;
  for (const Stamp& other : meeting.arrived) join(actor, other);
  tick(actor);
  return true;
}

// --- signals ---------------------------------------------------------------------------------------

const Record* ScheduleOrder::event_after(OrderPoint from) const {
  const std::vector<Signal>& events = states_[from.actor].events;
  const auto found =
      std::ranges::lower_bound(events, from.epoch, {}, [](const Signal& s) { return s.stamp.point.epoch; });
  return found == events.end() ? nullptr : found->written.record;
}

const ScheduleOrder::WordWritten* ScheduleOrder::word_after(OrderPoint from) const {
  const WordWritten* earliest = nullptr;
  for (const State& state : states_) {
    if (state.actor.rank != states_[from.actor].actor.rank) continue;
    const auto found = std::ranges::partition_point(state.words, [&](const Signal& signal) {
      const uint32_t* const clock = snapshots_.data() + size_t{signal.stamp.snapshot} * states_.size();
      return (signal.stamp.point.actor == from.actor ? signal.stamp.point.epoch : clock[from.actor]) < from.epoch;
    });
    if (found != state.words.end() &&
        (earliest == nullptr || found->written.record->sequence < earliest->record->sequence))
      earliest = &found->written;
  }
  return earliest;
}

}  // namespace tessera::device
