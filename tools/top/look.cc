#include "tools/top/look.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>

#include "base/fail.h"
#include "bus/registration/records.h"
#include "peer/inspection.h"

namespace tessera::tools {
namespace {

constexpr Duration kStoreTimeout = seconds(5);
constexpr Duration kAnswerTimeout = seconds(1);  // an agent answers quickly unless it is stopped

// Calls `read` with each item below NS/COMPONENT/; counts those that it cannot read.
template <typename Read>
void read_records(Store& store, TopLook& look, std::string_view component, const Read& read) {
  const std::string prefix = fmt::format("{}/{}/", look.name_space, component);
  const StoreView items = store.range(prefix, kStoreTimeout).items;
  for (const auto& [key, item] : items) {
    try {
      read(prefix, key, item.value);
    } catch (const Error&) {
      ++look.unreadable;
    }
  }
}

void read_ranks(Store& store, TopLook& look) {
  read_records(store, look, "rank", [&](const std::string& prefix, const std::string& key, const std::string& value) {
    const JobRank who = parse_pair_key(prefix, key);
    bus::RankRecord record = bus::read_record<bus::RankRecord>(key, value);
    TopRank& rank = look.ranks.emplace_back();
    rank.job = who.job;
    rank.rank = who.rank;
    rank.world = record.world;
    rank.incarnation = std::move(record.incarnation);
    rank.address = std::move(record.address);
    rank.report.release = std::move(record.release);
  });
  std::ranges::sort(look.ranks, {}, [](const TopRank& rank) { return std::pair(rank.job, rank.rank); });
}

void read_pairs(Store& store, TopLook& look) {
  std::map<std::pair<std::string, std::string>, TopPair> pairs;  // by name and job
  read_records(store, look, "pair", [&](const std::string& prefix, const std::string& key, const std::string& value) {
    const std::string name(bus::parts_of_key(std::string_view(key).substr(prefix.size())).front());
    if (key.starts_with(bus::pair_failure_prefix(look.name_space, name))) return;
    const JobRank who = parse_pair_key(bus::pair_prefix(look.name_space, name), key);
    const bus::PairRecord record = bus::read_record<bus::PairRecord>(key, value);
    TopPair& pair = pairs[{name, who.job}];
    pair = {.name = name,
            .job = who.job,
            .peer = fmt::format("{}", fmt::join(record.peers, "+")),
            .ranks = pair.ranks + 1,
            .world = record.rank.world};
  });
  for (auto& [key, pair] : pairs) look.pairs.push_back(std::move(pair));
}

void ask_agents(TopLook& look) {
  const Deadline deadline = Deadline::after(kAnswerTimeout);
  std::vector<std::optional<Inspection>> asked(look.ranks.size());
  const auto try_to = [](TopRank& rank, const auto& task) {
    try {
      task();
    } catch (const Error& error) {
      const bool stopped = is_stopped(rank.incarnation);
      rank.state = stopped ? TopRank::State::kStopped : TopRank::State::kSilent;
      rank.why =
          stopped ? fmt::format("continue it (kill -CONT {}) or end it"_message, rank.incarnation.pid) : error.what();
    }
  };
  for (size_t i = 0; i < look.ranks.size(); ++i) {
    TopRank& rank = look.ranks[i];
    const Liveness liveness = liveness_of(rank.incarnation);
    if (liveness == Liveness::kDead) rank.state = TopRank::State::kDead;
    if (liveness == Liveness::kAlive) try_to(rank, [&] { asked[i].emplace(rank.address, deadline); });
  }
  for (size_t i = 0; i < look.ranks.size(); ++i) {
    TopRank& rank = look.ranks[i];
    if (!asked[i]) continue;
    try_to(rank, [&] {
      Report report = asked[i]->answer(deadline);
      if (report.incarnation != rank.incarnation || report.job != rank.job || report.rank != rank.rank)
        fail(ErrorCode::kMismatch, "{} answers there"_message, rank_name(report.job, report.rank));
      rank.report = std::move(report);
      rank.state = TopRank::State::kSeen;
    });
  }
}

// Reads what ranks have registered that did not answer.
void read_batches(Store& store, TopLook& look) {
  read_records(store, look, "batch", [&](const std::string& prefix, const std::string& key, const std::string& value) {
    const std::vector<std::string_view> parts = bus::parts_of_key(std::string_view(key).substr(prefix.size()));
    if (parts.size() != 6 || parts[4] != "rank") return;  // PAIR/BATCH/JOBS/JOB/rank/RANK
    const auto rank = std::ranges::find_if(
        look.ranks, [&](const TopRank& one) { return one.job == parts[3] && std::to_string(one.rank) == parts[5]; });
    if (rank == look.ranks.end() || rank->state == TopRank::State::kSeen) return;
    const bus::BatchRecord record = bus::read_record<bus::BatchRecord>(key, value);
    const std::string_view jobs = parts[2];
    const size_t plus = jobs.find('+');
    if (plus == std::string_view::npos) return;
    const std::string_view first = jobs.substr(0, plus);
    const std::string peer(first == rank->job ? jobs.substr(plus + 1) : first);
    BatchReport& batch = rank->report.batches.emplace_back();
    batch.pair = parts[0];
    batch.id = parts[1];
    batch.sends = record.sends;
    batch.version = record.version;
    batch.peers.push_back({.job = peer});
  });
}

}  // namespace

TopLook look_around(Store& store, const std::string& name_space) {
  TopLook look{.store = store.url(), .name_space = name_space};
  read_ranks(store, look);
  read_pairs(store, look);
  ask_agents(look);
  look.when = Clock::steady().now();
  const auto seen = [](const TopRank& rank) { return rank.state == TopRank::State::kSeen; };
  if (!std::ranges::all_of(look.ranks, seen)) read_batches(store, look);
  return look;
}

}  // namespace tessera::tools
