#include "bus/registration/pair_records.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/fail.h"

namespace tessera::bus {

PairRecords::PairRecords(std::string prefix, std::string failures, uint64_t self, int64_t joined)
    : prefix_(std::move(prefix)), failures_(std::move(failures)), self_(self), joined_(joined) {}

void PairRecords::read(const StoreView& items) {
  auto known = known_.begin();
  const auto forget_below = [&](const std::string* key) {  // both are sorted by key
    while (known != known_.end() && (key == nullptr || known->first < *key)) {
      forget(known->second);
      known = known_.erase(known);
    }
  };
  for (const auto& [key, item] : items) {
    forget_below(&key);
    if (known != known_.end() && known->first == key) {
      if (std::exchange(known->second.revision, item.mod_revision) != item.mod_revision) {
        forget(known->second);
        read(key, item);
      }
      ++known;
    } else {
      read(key, item);
    }
  }
  forget_below(nullptr);
}

void PairRecords::read(const std::string& key, const KeyValue& item) {
  Known& known = known_[key];
  known.revision = item.mod_revision;
  if (key.starts_with(failures_)) {
    const FailureRecord record = read_record<FailureRecord>(key, item.value);
    const bool told = std::ranges::find(record.seen, self_, &Seen::speaker) != record.seen.end();
    if (told && item.mod_revision > joined_) failed_[parse_pair_key(failures_, key).job] = record.status;
    return;
  }
  const JobRank who = parse_pair_key(prefix_, key);
  known.who = who;
  PairRecord record = read_record<PairRecord>(key, item.value);
  // The record of a dead process stays until its lease ends or its successor comes, perhaps with another world.
  if (liveness_of(record.rank.incarnation) == Liveness::kDead)
    dead_.emplace(who.job, who.rank);
  else
    jobs_[who.job].emplace(who.rank, std::move(record));
}

void PairRecords::forget(const Known& known) {
  if (!known.who) return;
  const auto& [job, rank] = *known.who;
  dead_.erase({job, rank});
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) return;
  it->second.erase(rank);
  if (it->second.empty()) jobs_.erase(it);
}

void PairRecords::look_for_dead() {
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    std::erase_if(job->second, [&](const auto& entry) {
      const bool dead = liveness_of(entry.second.rank.incarnation) == Liveness::kDead;
      if (dead) dead_.emplace(job->first, entry.first);
      return dead;
    });
    job = job->second.empty() ? jobs_.erase(job) : std::next(job);
  }
}

bool PairRecords::has_dead(std::string_view job) const {
  return std::ranges::any_of(dead_, [job](const auto& dead) { return dead.first == job; });
}

void PairRecords::throw_if_failed(const std::string& job) const {
  if (const auto it = failed_.find(job); it != failed_.end()) it->second.throw_if_error();
}

bool PairRecords::complete(const std::string& job) const {
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) return false;
  const auto& [first_rank, first] = *it->second.begin();
  for (const auto& [rank, record] : it->second) {
    if (record.rank.world != first.rank.world)
      fail(ErrorCode::kMismatch, "world: {} says {}, {} says {}"_message, rank_name(job, rank), record.rank.world,
           rank_name(job, first_rank), first.rank.world);
    if (rank >= record.rank.world)
      fail(ErrorCode::kMismatch, "rank: {} is not below its world of {}"_message, rank_name(job, rank),
           record.rank.world);
  }
  return it->second.size() == static_cast<size_t>(first.rank.world) && divided(job).empty();
}

void PairRecords::throw_if_divided(const std::string& job, Duration patience) {
  const std::string ranks = divided(job);
  if (ranks.empty())
    divided_.erase(job);
  else if (divided_.try_emplace(job, Deadline::after(patience)).first->second.passed())
    throw Error(ErrorCode::kMismatch, ranks);
}

std::string PairRecords::divided(const std::string& job) const {
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) return {};
  const auto& [first_rank, first] = *it->second.begin();
  for (const auto& [rank, record] : it->second)
    // One of them may yet join the further jobs that the other one names.
    if (record.peers != first.peers && !std::ranges::includes(record.peers, first.peers) &&
        !std::ranges::includes(first.peers, record.peers))
      return fmt::format("{} joins a pair with job {}, but {} with {}"_message, rank_name(job, rank),
                         fmt::join(record.peers, " and "), rank_name(job, first_rank), fmt::join(first.peers, " and "));
  return {};
}

std::string PairRecords::missing(const std::string& job) const {
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) {
    std::string others;
    for (const auto& [name, ranks] : jobs_)
      others += fmt::format("{}{} ({})", others.empty() ? "" : ", ", name, ranks.size());
    return fmt::format("all of job {} ({}here: {})", job, has_dead(job) ? "its processes have ended; " : "",
                       others.empty() ? "nobody" : others);
  }
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < it->second.begin()->second.rank.world; ++rank)
    if (!it->second.contains(rank)) ranks.push_back(rank);
  return ranks.empty() ? divided(job) : rank_list(job, ranks);
}

std::vector<Seen> PairRecords::seen(const std::function<bool(const std::string&)>& of_job) const {
  std::vector<Seen> all;
  for (const auto& [job, ranks] : jobs_)
    for (const auto& [rank, record] : ranks)
      if (!of_job || of_job(job)) all.push_back({.speaker = speaker_of(record.rank.incarnation, job, rank)});
  return all;
}

std::vector<RankRecord> PairRecords::take(const std::string& job) {
  std::vector<RankRecord> ranks;
  for (auto& [rank, record] : jobs_.at(job)) ranks.push_back(std::move(record.rank));
  return ranks;
}

}  // namespace tessera::bus
