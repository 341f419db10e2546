#include "bus/registration/wait_hints.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "bus/registration/records.h"

namespace tessera::bus {
namespace {

constexpr size_t kMostClauses = 3;
constexpr size_t kMostNames = 3;  // in one clause
constexpr size_t kMostPairs = 4;  // whose batches are listed: their manifests may be large

using RecordsByRank = std::map<Rank, PairRecord>;

// One batch of two jobs.
struct JointBatch {
  std::string pair, batch;
  std::array<std::string, 2> jobs;
  std::map<std::string, std::set<Rank>> ranks = {};  // by job: those that register it
  const std::string& other(const std::string& job) const { return jobs[0] == job ? jobs[1] : jobs[0]; }
  bool has(const std::string& job, Rank rank) const {
    const auto it = ranks.find(job);
    return it != ranks.end() && it->second.contains(rank);
  }
};

// "pair wieghts", "batches d1 and d2".
std::string list_names(std::string_view one, std::string_view several, std::vector<std::string> names) {
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (names.size() == 1) return fmt::format("{} {}", one, names.front());
  const size_t more = names.size() > kMostNames ? names.size() - kMostNames : 0;
  names.resize(names.size() - more);
  return more > 0 ? fmt::format("{} {} and {} more", several, fmt::join(names, ", "), more)
                  : fmt::format("{} {}", several, fmt::join(names, " and "));
}

class StoreRecords {
 public:
  StoreRecords(Store& store, const Identity& self, Duration timeout)
      : store_(store), self_(self), deadline_(Deadline::after(timeout)) {}

  void read_pairs() {
    const std::string prefix = self_.name_space + "/pair/";
    for (const auto& [key, item] : store_.range(prefix, deadline_.left()).items)
      skip_bad([&] {
        const std::string_view rest = std::string_view(key).substr(prefix.size());
        const std::string_view pair = rest.substr(0, rest.find('/'));
        check_name("pair", pair);
        const JobRank who = parse_pair_key(pair_prefix(self_.name_space, pair), key);
        check_name("job", who.job);  // failures have none
        auto record = read_record<PairRecord>(key, item.value);
        for (const std::string& peer : record.peers) check_name("job", peer);
        if (liveness_of(record.rank.incarnation) != Liveness::kDead)
          pairs_[std::string(pair)][who.job].emplace(who.rank, std::move(record));
      });
  }
  // REQUIRES: read_pairs()
  void read_batches(const std::string& pair) {
    const std::string prefix = store_key(self_.name_space, "batch", pair + "/");
    for (const auto& [key, item] : store_.range(prefix, deadline_.left()).items)
      skip_bad([&] {
        const std::vector<std::string_view> parts = parts_of_key(std::string_view(key).substr(prefix.size()));
        if (parts.size() != 5 || (parts[3] != "rank" && parts[3] != "gathered")) return;
        const size_t plus = parts[1].find('+');
        if (plus == std::string_view::npos) return;
        const std::array<std::string, 2> jobs{std::string(parts[1].substr(0, plus)),
                                              std::string(parts[1].substr(plus + 1))};
        for (const std::string& job : jobs) check_name("job", job);
        check_name("batch", parts[0]);
        const JobRank who = parse_pair_key("", fmt::format("{}/{}", parts[2], parts[4]));
        const PairRecord* record = find(pair, who);
        if (record == nullptr || (who.job != jobs[0] && who.job != jobs[1]) ||
            record_registration(key, item.value).incarnation != record->rank.incarnation)
          return;
        const auto [it, added] = meetings_.try_emplace({pair, std::string(parts[0]), jobs[0], jobs[1]},
                                                       JointBatch{pair, std::string(parts[0]), jobs});
        it->second.ranks[who.job].insert(who.rank);
      });
  }

  const PairRecord* find(const std::string& pair, const JobRank& who) const {
    const RecordsByRank& ranks = of(pair, who.job);
    const auto it = ranks.find(who.rank);
    return it == ranks.end() ? nullptr : &it->second;
  }
  const RecordsByRank& of(const std::string& pair, const std::string& job) const {
    static const RecordsByRank kNone;
    const auto jobs = pairs_.find(pair);
    if (jobs == pairs_.end()) return kNone;
    const auto it = jobs->second.find(job);
    return it == jobs->second.end() ? kNone : it->second;
  }
  bool is_complete(const std::string& pair, const std::string& job) const {
    const RecordsByRank& ranks = of(pair, job);
    return !ranks.empty() && std::cmp_greater_equal(ranks.size(), ranks.begin()->second.rank.world);
  }
  bool joins(const std::string& pair) const { return find(pair, {self_.job, self_.rank}) != nullptr; }
  const auto& pairs() const { return pairs_; }

  // The batches that `who` registers and this rank does not, though it is to.
  std::vector<const JointBatch*> unmet(const JobRank& who) const {
    return select([&](const JointBatch& meeting) {
      return meeting.has(who.job, who.rank) && std::ranges::count(meeting.jobs, self_.job) != 0 &&
             !meeting.has(self_.job, self_.rank);
    });
  }
  // The batches of the pair that `who` registers, with any job.
  std::vector<std::string> batches(const std::string& pair, const JobRank& who) const {
    std::vector<std::string> names;
    for (const JointBatch* batch : select([&](const JointBatch& of) { return of.pair == pair; }))
      if (batch->has(who.job, who.rank)) names.push_back(batch->batch);
    return names;
  }
  // The batches that `who` registers with a third job, of which ranks are missing.
  std::vector<const JointBatch*> unmet_by_others(const JobRank& who) const {
    return select([&](const JointBatch& meeting) {
      if (!meeting.has(who.job, who.rank) || std::ranges::count(meeting.jobs, self_.job) != 0) return false;
      const auto it = meeting.ranks.find(meeting.other(who.job));
      return it == meeting.ranks.end() || it->second.size() < of(meeting.pair, it->first).size();
    });
  }

 private:
  template <typename Fits>  // bool(const JointBatch&)
  std::vector<const JointBatch*> select(Fits fits) const {
    std::vector<const JointBatch*> fitting;
    for (const auto& [key, meeting] : meetings_)
      if (fits(meeting)) fitting.push_back(&meeting);
    return fitting;
  }
  template <typename Read>
  static void skip_bad(Read read) {
    try {
      read();
    } catch (const Error&) {  // a key or a value that no process of this release writes
    }
  }

  Store& store_;
  const Identity& self_;
  const Deadline deadline_;
  std::map<std::string, std::map<std::string, RecordsByRank>> pairs_;  // of living processes; by pair and job
  std::map<std::array<std::string, 4>, JointBatch> meetings_;          // by pair, batch and jobs
};

// Builds the clauses for ranks of one job.
class HintsForJob {
 public:
  HintsForJob(StoreRecords& snapshot, const Identity& self, const AwaitedRanks& awaited)
      : now_(snapshot), self_(self), awaited_(awaited) {}

  std::vector<std::string> clauses() {
    std::vector<Rank> ranks = awaited_.batch.empty() ? not_joined() : awaited_.ranks;
    read_batches(ranks);
    std::vector<std::pair<std::string, std::vector<Rank>>> clauses;  // what ranks do, and which
    for (const Rank rank : ranks) {
      const std::string clause =
          awaited_.batch.empty() ? of_absent({awaited_.job, rank}) : of_late({awaited_.job, rank});
      if (clause.empty()) continue;
      const auto it = std::ranges::find(clauses, clause, [](const auto& entry) { return entry.first; });
      if (it == clauses.end())
        clauses.push_back({clause, {rank}});
      else
        it->second.push_back(rank);
    }
    std::vector<std::string> texts;
    const bool whole = awaited_.batch.empty() && now_.of(awaited_.pair, awaited_.job).empty();
    for (const auto& [clause, of] : clauses)
      texts.push_back(fmt::format(
          "{} {}", whole && clauses.size() == 1 ? fmt::format("job {}", awaited_.job) : rank_list(awaited_.job, of),
          of.size() > 1 && !(whole && clauses.size() == 1) ? plural(clause) : clause));
    if (texts.empty() && whole) texts = of_other_names();
    return texts;
  }

 private:
  // The ranks of the job that are in other pairs, and not in the awaited one.
  std::vector<Rank> not_joined() const {
    std::set<Rank> ranks;
    for (const auto& [pair, jobs] : now_.pairs())
      for (const auto& [rank, record] : now_.of(pair, awaited_.job))
        if (now_.find(awaited_.pair, {awaited_.job, rank}) == nullptr) ranks.insert(rank);
    if (awaited_.job == self_.job) ranks.erase(self_.rank);
    return {ranks.begin(), ranks.end()};
  }

  // The pairs that the rank has joined, besides the awaited one.
  std::vector<std::string> other_pairs(const JobRank& who) const {
    std::vector<std::string> pairs;
    for (const auto& [pair, jobs] : now_.pairs())
      if (pair != awaited_.pair && now_.find(pair, who) != nullptr) pairs.push_back(pair);
    return pairs;
  }

  void read_batches(const std::vector<Rank>& ranks) {
    std::vector<std::string> pairs;
    if (!awaited_.batch.empty()) pairs.push_back(awaited_.pair);
    for (const Rank rank : ranks)
      for (const std::string& pair : other_pairs({awaited_.job, rank}))
        if (pairs.size() < kMostPairs && std::ranges::find(pairs, pair) == pairs.end()) pairs.push_back(pair);
    for (const std::string& pair : pairs) now_.read_batches(pair);
  }

  // What a rank does that has not joined the pair.
  std::string of_absent(const JobRank& who) const {
    if (const std::string waits = waits_elsewhere(who); !waits.empty()) return waits;
    std::vector<std::string> pairs = other_pairs(who), of_us;
    for (const std::string& pair : pairs)
      if (who.job == self_.job || names(pair, who, self_.job)) of_us.push_back(pair);
    if (of_us.empty()) return is_in(pairs, who);
    return fmt::format("is here, in {}", list_names("pair", "pairs", of_us));
  }

  // What a rank does that has joined the pair, and has not registered the batch.
  std::string of_late(const JobRank& who) const {
    if (who.job != self_.job && !names(awaited_.pair, who, self_.job)) {
      const std::vector<std::string>& peers = now_.find(awaited_.pair, who)->peers;
      const bool nobody = peers.size() == 1 && now_.of(awaited_.pair, peers.front()).empty();
      return fmt::format("waits for {}, not for {}{}", list_names("job", "jobs", peers), self_.job,
                         nobody ? fmt::format(": is {} meant to be {}?", peers.front(), self_.job) : "");
    }
    if (const std::string waits = waits_elsewhere(who); !waits.empty()) return waits;
    std::vector<std::string> pairs;
    for (const std::string& pair : other_pairs(who))
      if (names(pair, who, self_.job) && !now_.joins(pair)) pairs.push_back(pair);
    if (!pairs.empty()) return fmt::format("waits for {} in {}", self_.name(), list_names("pair", "pairs", pairs));
    const std::vector<const JointBatch*> others = now_.unmet_by_others(who);
    if (!others.empty())
      return fmt::format("has registered {}{} with job {}, which has not",
                         list_names("batch", "batches", {others.front()->batch}), of_pair(others.front()->pair),
                         others.front()->other(who.job));
    if (const std::string batch = batch_for_others(who); !batch.empty())
      return fmt::format("has registered {} of this pair, not {}", batch, awaited_.batch);
    for (const std::string& pair : other_pairs(who))
      if (!absent_peer(pair, who).empty()) return is_in({pair}, who);
    return {};
  }

  // A sender registers its batch with each of several jobs once that job has: the batches that it has registered with
  // others, if the awaited one is none of them.
  std::string batch_for_others(const JobRank& who) const {
    const PairRecord* record = now_.find(awaited_.pair, who);
    if (who.job == self_.job || record == nullptr || record->peers.size() < 2) return {};
    std::vector<std::string> batches = now_.batches(awaited_.pair, who);
    if (std::ranges::find(batches, awaited_.batch) != batches.end()) return {};
    std::erase_if(batches, [own = now_.batches(awaited_.pair, {self_.job, self_.rank})](const std::string& batch) {
      return std::ranges::find(own, batch) != own.end();
    });
    return batches.empty() ? std::string() : list_names("batch", "batches", std::move(batches));
  }

  // The batch that the rank has registered and this rank has not: one of the same pair if there is any.
  std::string waits_elsewhere(const JobRank& who) const {
    std::vector<const JointBatch*> meetings = now_.unmet(who);
    if (meetings.empty()) return {};
    std::ranges::stable_sort(meetings, {}, [&](const JointBatch* meeting) { return meeting->pair != awaited_.pair; });
    const std::string& pair = meetings.front()->pair;
    std::vector<std::string> batches;
    for (const JointBatch* meeting : meetings)
      if (meeting->pair == pair) batches.push_back(meeting->batch);
    const std::string what = list_names("batch", "batches", batches);
    if (pair == awaited_.pair) return fmt::format("has registered {} of this pair, not {}", what, awaited_.batch);
    return fmt::format("has registered {} of pair {}, and waits for {} there", what, pair, self_.name());
  }

  // "is here, in pair b with job c, which is missing there".
  std::string is_in(const std::vector<std::string>& pairs, const JobRank& who) const {
    if (pairs.empty()) return {};
    const PairRecord& record = *now_.find(pairs.front(), who);
    const std::string absent = absent_peer(pairs.front(), who);
    return fmt::format("is here, in {} with {}{}", list_names("pair", "pairs", pairs),
                       list_names("job", "jobs", record.peers),
                       absent.empty()             ? ""
                       : record.peers.size() == 1 ? ", which is missing there"
                                                  : fmt::format("; job {} is missing there", absent));
  }

  // A job that the rank has joined the pair with, and that is not there.
  std::string absent_peer(const std::string& pair, const JobRank& who) const {
    for (const std::string& peer : now_.find(pair, who)->peers)
      if (!now_.is_complete(pair, peer)) return peer;
    return {};
  }

  bool names(const std::string& pair, const JobRank& who, const std::string& job) const {
    const PairRecord* record = now_.find(pair, who);
    return record == nullptr || std::ranges::count(record->peers, job) != 0;
  }
  std::string of_pair(const std::string& pair) const {
    return pair == awaited_.pair ? " of this pair" : fmt::format(" of pair {}", pair);
  }

  // Nobody has the job's name: jobs that wait for this one, and others of the pair.
  std::vector<std::string> of_other_names() const {
    std::vector<std::string> waiting, others;
    for (const auto& [pair, jobs] : now_.pairs())
      for (const auto& [job, ranks] : jobs) {
        const std::vector<std::string>& peers = ranks.begin()->second.peers;
        const PairRecord* own = now_.find(pair, {self_.job, self_.rank});
        if (job == self_.job || (own != nullptr && std::ranges::count(own->peers, job) != 0)) continue;
        const bool is_same = pair == awaited_.pair;
        const std::string place = is_same ? "" : fmt::format(", in pair {}", pair);
        const std::string text = fmt::format("job {} is here{} and waits for {}", job, place + (is_same ? "" : ","),
                                             list_names("job", "jobs", peers));
        if (std::ranges::count(peers, self_.job) != 0)
          waiting.push_back(fmt::format("{}: is {} meant to be {}?", text, awaited_.job, job));
        else if (is_same && !absent_peer(pair, {job, ranks.begin()->first}).empty())
          others.push_back(text);
      }
    return waiting.empty() ? others : waiting;
  }

  static std::string plural(const std::string& clause) {
    for (const auto& [one, several] : {std::pair{"is ", "are "}, {"has ", "have "}, {"waits ", "wait "}})
      if (clause.starts_with(one)) {
        std::string text = several + clause.substr(std::string_view(one).size());
        if (const size_t at = text.find(", and waits"); at != std::string::npos) text.replace(at, 11, ", and wait");
        return text;
      }
    return clause;
  }

  StoreRecords& now_;
  const Identity& self_;
  const AwaitedRanks& awaited_;
};

}  // namespace

std::string wait_hint(Store& store, const Identity& self, const std::vector<AwaitedRanks>& awaited, Duration timeout) {
  std::vector<std::string> clauses;
  try {
    StoreRecords snapshot(store, self, timeout);
    snapshot.read_pairs();
    for (const AwaitedRanks& ranks : awaited) {
      if (ranks.batch.empty() && snapshot.is_complete(ranks.pair, ranks.job)) continue;
      for (std::string& clause : HintsForJob(snapshot, self, ranks).clauses())
        if (clauses.size() < kMostClauses) clauses.push_back(std::move(clause));
    }
  } catch (const Error& error) {  // the message is no worse than without it
    log_event(LogLevel::debug, "hints.missing", {}, "no hints for the wait of {}: {}", self.name(), error.what());
  }
  return fmt::format("{}", fmt::join(clauses, "; "));
}

}  // namespace tessera::bus
