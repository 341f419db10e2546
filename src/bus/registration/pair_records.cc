#include "bus/registration/pair_records.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::bus {

PairRecords::PairRecords(const StoreView& items, std::string_view prefix, std::string_view failures, uint64_t self,
                         int64_t joined) {
  for (const auto& [key, item] : items) {
    if (key.starts_with(failures)) {
      const FailureRecord record = read_record<FailureRecord>(key, item.value);
      const bool told = std::ranges::find(record.seen, self, &Seen::speaker) != record.seen.end();
      if (told && item.mod_revision > joined) failure_ = record.status;
      continue;
    }
    const JobRank who = parse_pair_key(prefix, key);
    PairRecord record = read_record<PairRecord>(key, item.value);
    // One of a process that is dead stays until its lease ends or its successor comes, perhaps with another world.
    if (liveness_of(record.rank.incarnation) == Liveness::kDead)
      dead_.insert(who.job);
    else
      jobs_[who.job].emplace(who.rank, std::move(record));
  }
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
    if (record.peer != first.peer)
      fail(ErrorCode::kMismatch, "peer: {} wants to be joined with job {}, {} with {}"_message, rank_name(job, rank),
           record.peer, rank_name(job, first_rank), first.peer);
  }
  return it->second.size() == static_cast<size_t>(first.rank.world);
}

std::string PairRecords::missing(const std::string& job) const {
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) {
    std::string others;
    for (const auto& [name, ranks] : jobs_)
      others += fmt::format("{}{} ({})", others.empty() ? "" : ", ", name, ranks.size());
    return fmt::format("all of job {} ({}here: {})", job, dead_.contains(job) ? "its processes have ended; " : "",
                       others.empty() ? "nobody" : others);
  }
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < it->second.begin()->second.rank.world; ++rank)
    if (!it->second.contains(rank)) ranks.push_back(rank);
  return rank_list(job, ranks);
}

std::vector<Seen> PairRecords::seen() const {
  std::vector<Seen> all;
  for (const auto& [job, ranks] : jobs_)
    for (const auto& [rank, record] : ranks) all.push_back({.speaker = speaker_of(record.rank.incarnation, job, rank)});
  return all;
}

std::vector<RankRecord> PairRecords::take(const std::string& job) {
  std::vector<RankRecord> ranks;
  for (auto& [rank, record] : jobs_.at(job)) ranks.push_back(std::move(record.rank));
  return ranks;
}

}  // namespace tessera::bus
