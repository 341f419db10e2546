#include "tools/top/view.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/escape.h"
#include "tools/progress_bar.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::ordered_json;

double seconds_of(int64_t microseconds) {
  return static_cast<double>(microseconds) * 1e-6;
}

// Bytes per second of one batch at one rank since `before`; nothing if that process or batch was not seen then.
std::optional<double> rate_of(const TopLook& now, const TopLook* before, const TopRank& rank,
                              const BatchReport& batch) {
  if (before == nullptr || rank.state != TopRank::State::kSeen) return std::nullopt;
  const double passed = to_seconds(now.when - before->when);
  const auto then = std::ranges::find_if(before->ranks, [&](const TopRank& one) {
    return one.state == TopRank::State::kSeen && one.incarnation == rank.incarnation && one.job == rank.job &&
           one.rank == rank.rank;
  });
  if (then == before->ranks.end() || passed <= 0) return std::nullopt;
  const auto known = std::ranges::find_if(
      then->report.batches, [&](const auto& one) { return one.pair == batch.pair && one.id == batch.id; });
  if (known == then->report.batches.end() || known->bytes > batch.bytes) return std::nullopt;
  return static_cast<double>(batch.bytes - known->bytes) / passed;
}

std::string peers_text(const BatchReport& batch) {
  std::string text;
  for (const auto& peer : batch.peers) text += (text.empty() ? "" : ",") + peer.job + (peer.attached ? "" : "?");
  return text.empty() ? "-" : text;
}

std::string doing_text(const BatchReport& batch) {
  std::string text;
  if (!batch.operation.empty()) {
    text = batch.operation;
    if (batch.operation_version != 0) text += fmt::format(" of {}", batch.operation_version);
    if (!batch.phase.empty()) text += ": " + batch.phase;
    text += fmt::format(", {:.1f} s", seconds_of(batch.operation_microseconds));
    if (batch.bytes_done > 0 && batch.bytes_done < batch.bytes_total)
      text += fmt::format(", {} of {}", format_bytes(batch.bytes_done), format_bytes(batch.bytes_total));
  }
  if (batch.torn) text += text.empty() ? "torn" : "; torn";
  if (batch.undecided) text += text.empty() ? "undecided" : "; undecided";
  return text.empty() ? "idle" : text;
}

std::string state_text(const TopRank& rank) {
  if (rank.state == TopRank::State::kSeen) return "no batch";
  if (rank.state == TopRank::State::kStopped) return fmt::format("stopped (pid {})", rank.incarnation.pid);
  return std::string(to_string(rank.state));
}

class Lines {
 public:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    text_ += printable(fmt::format(format, std::forward<Args>(args)...)) + '\n';  // another rank has said it
  }
  void add_waits(const std::vector<Wait>& waits) {
    for (const Wait& wait : waits) add("  waits for {}, {:.1f} s", wait.text, seconds_of(wait.microseconds));
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

Json queue_json(const CommandQueueReport& queue) {
  if (queue.capacity == 0) return nullptr;
  return {{"queued", queue.queued}, {"capacity", queue.capacity}};
}

Json waits_json(const std::vector<Wait>& waits) {
  Json json = Json::array();
  for (const Wait& wait : waits) json.push_back({{"for", wait.text}, {"seconds", seconds_of(wait.microseconds)}});
  return json;
}

Json batch_json(const BatchReport& batch, std::optional<double> rate) {
  Json json{{"pair", batch.pair},
            {"batch", batch.id},
            {"side", batch.sends ? "send" : "receive"},
            {"mode", batch.staged ? "staged" : "in place"},
            {"version", batch.version},
            {"newest", batch.newest},
            {"torn", batch.torn},
            {"undecided", batch.undecided},
            {"transfers", batch.transfers},
            {"bytes", batch.bytes},
            {"bytes_per_second", nullptr},
            {"peers", Json::array()},
            {"operation", nullptr},
            {"waits", waits_json(batch.waits)}};
  if (rate) json["bytes_per_second"] = *rate;
  for (const auto& peer : batch.peers)
    json["peers"].push_back({{"job", peer.job}, {"world", peer.world}, {"attached", peer.attached}});
  if (!batch.operation.empty())
    json["operation"] = {{"name", batch.operation},
                         {"phase", batch.phase},
                         {"version", batch.operation_version},
                         {"seconds", seconds_of(batch.operation_microseconds)},
                         {"bytes_done", batch.bytes_done},
                         {"bytes_total", batch.bytes_total}};
  return json;
}

}  // namespace

std::string_view to_string(TopRank::State state) {
  switch (state) {
    case TopRank::State::kSeen:
      return "seen";
    case TopRank::State::kSilent:
      return "silent";
    case TopRank::State::kStopped:
      return "stopped";
    case TopRank::State::kElsewhere:
      return "elsewhere";
    case TopRank::State::kDead:
      return "dead";
  }
  return "?";
}

std::string top_text(const TopLook& now, const TopLook* before) {
  std::set<std::string> jobs;
  for (const TopRank& rank : now.ranks) jobs.insert(rank.job);
  Lines lines;
  lines.add("namespace {} at {}: {} ranks of {} jobs", now.name_space, now.store, now.ranks.size(), jobs.size());
  for (const TopPair& pair : now.pairs)
    lines.add("pair {}: {} of {} ranks of {} have joined, with {}", pair.name, pair.ranks, pair.world, pair.job,
              pair.peer);
  if (now.unreadable > 0) lines.add("{} records of another release cannot be read", now.unreadable);
  if (now.ranks.empty()) return lines.take();
  lines.add("{:<16} {:>8} {:<20} {:<7} {:<16} {:>8} {:>8} {:>6} {:>9} {:>11}  {}", "RANK", "PID", "PAIR/BATCH", "SIDE",
            "WITH", "VERSION", "NEWEST", "DONE", "BYTES", "RATE", "NOW");
  for (const TopRank& rank : now.ranks) {
    const std::string name = fmt::format("{}/{}", rank.job, rank.rank);
    const bool seen = rank.state == TopRank::State::kSeen;
    if (!seen || rank.report.batches.empty())
      lines.add("{:<16} {:>8} {}{}{}", name, rank.incarnation.pid, state_text(rank), rank.why.empty() ? "" : ": ",
                rank.why);
    for (const BatchReport& batch : rank.report.batches) {
      const std::optional<double> rate = rate_of(now, before, rank, batch);
      lines.add("{:<16} {:>8} {:<20} {:<7} {:<16} {:>8} {:>8} {:>6} {:>9} {:>11}  {}", name, rank.incarnation.pid,
                batch.pair + "/" + batch.id, batch.sends ? "send" : "receive", peers_text(batch), batch.version,
                batch.newest, batch.transfers, format_bytes(batch.bytes),
                rate ? format_bytes(static_cast<int64_t>(*rate)) + "/s" : "-",
                seen ? doing_text(batch) : "as registered");
      lines.add_waits(batch.waits);
    }
    if (const CommandQueueReport& queue = rank.report.commands; queue.capacity > 0)
      lines.add("  command queue of its agent: {} of {}", queue.queued, queue.capacity);
    lines.add_waits(rank.report.waits);
  }
  return lines.take();
}

std::string top_json(const TopLook& now, const TopLook* before) {
  Json json{{"store", now.store}, {"namespace", now.name_space}, {"pairs", Json::array()}, {"ranks", Json::array()}};
  for (const TopPair& pair : now.pairs)
    json["pairs"].push_back(
        {{"pair", pair.name}, {"job", pair.job}, {"peer", pair.peer}, {"ranks", pair.ranks}, {"world", pair.world}});
  for (const TopRank& rank : now.ranks) {
    Json one{{"job", rank.job},
             {"rank", rank.rank},
             {"world", rank.world},
             {"pid", rank.incarnation.pid},
             {"release", rank.report.release},
             {"state", to_string(rank.state)},
             {"why", rank.why},
             {"command_queue", queue_json(rank.report.commands)},
             {"waits", waits_json(rank.report.waits)},
             {"batches", Json::array()}};
    for (const BatchReport& batch : rank.report.batches)
      one["batches"].push_back(batch_json(batch, rate_of(now, before, rank, batch)));
    json["ranks"].push_back(std::move(one));
  }
  json["unreadable"] = now.unreadable;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tessera::tools
