#include "bus/rendezvous.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <map>

#include "base/fail.h"
#include "base/log.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

constexpr Duration kLeaseTtl = seconds(10);
constexpr Duration kReminder = seconds(10);

// The records of a pair, judged against each other.
class PairRecords {
 public:
  PairRecords(const StoreView& items, std::string_view prefix) {
    for (const auto& [key, item] : items) {
      const JobRank who = parse_pair_key(prefix, key);
      jobs_[who.job].emplace(who.rank, PairRecord::read(key, item.value));
    }
  }

  // Whether every rank of `job` is in. Throws kMismatch where ranks disagree.
  bool complete(const std::string& job, const std::string& wanted_peer) const {
    const auto it = jobs_.find(job);
    if (it == jobs_.end()) return false;
    const auto& [first_rank, first] = *it->second.begin();
    for (const auto& [rank, record] : it->second) {
      if (record.rank.world != first.rank.world)
        fail(ErrorCode::kMismatch, "world: {} says {}, {} says {}", rank_name(job, rank), record.rank.world,
             rank_name(job, first_rank), first.rank.world);
      if (rank >= record.rank.world)
        fail(ErrorCode::kMismatch, "rank: {} is not below its world of {}", rank_name(job, rank), record.rank.world);
      if (record.peer != wanted_peer)
        fail(ErrorCode::kMismatch, "peer: {} wants to be joined with job {}, not {}", rank_name(job, rank), record.peer,
             wanted_peer);
    }
    if (it->second.size() < static_cast<size_t>(first.rank.world)) return false;
    // A record of a process that is dead stays until its lease ends or its successor comes.
    return std::ranges::none_of(
        it->second, [](const auto& entry) { return liveness_of(entry.second.rank.incarnation) == Liveness::kDead; });
  }

  std::string missing(const std::string& job) const {
    const auto it = jobs_.find(job);
    if (it == jobs_.end()) {
      std::string others;
      for (const auto& [name, ranks] : jobs_)
        others += fmt::format("{}{} ({})", others.empty() ? "" : ", ", name, ranks.size());
      return fmt::format("all of job {} (here: {})", job, others.empty() ? "nobody" : others);
    }
    std::vector<Rank> ranks;
    for (Rank rank = 0; rank < it->second.begin()->second.rank.world; ++rank) {
      const auto found = it->second.find(rank);
      if (found == it->second.end() || liveness_of(found->second.rank.incarnation) == Liveness::kDead)
        ranks.push_back(rank);
    }
    return rank_list(job, ranks);
  }

  std::vector<RankRecord> take(const std::string& job) {
    std::vector<RankRecord> ranks;
    for (auto& [rank, record] : jobs_.at(job)) ranks.push_back(std::move(record.rank));
    return ranks;
  }

 private:
  std::map<std::string, std::map<Rank, PairRecord>, std::less<>> jobs_;
};

std::string hash_of(const Manifest& sender, const Manifest& receiver) {
  const std::string both = sender.hash() + receiver.hash();
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(both.data(), both.size()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

}  // namespace

Rendezvous::Rendezvous(Store& store, Identity identity, std::string address)
    : store_(store),
      identity_(std::move(identity)),
      own_{.incarnation = Incarnation::self(),
           .world = identity_.world,
           .address = std::move(address),
           .release = kVersion},
      lease_(store.grant_lease(kLeaseTtl)) {}

Rendezvous::~Rendezvous() {
  try {
    store_.revoke_lease(lease_, seconds(1));
  } catch (const Error& error) {
    log().info("{}: the store keeps this rank's keys until their lease ends: {}", identity_.name(), error.what());
  }
}

template <typename Missing>
StoreView Rendezvous::wait(const std::string& prefix, const Store::Predicate& complete, const std::string& what,
                           const Missing& missing, Deadline deadline) {
  const TimePoint start = Clock::steady().now();
  StoreView seen;
  const auto remember = [&](const StoreView& view) {
    seen = view;
    return complete(view);
  };
  while (true) {
    try {
      return store_.wait_for(prefix, remember, std::min(deadline.left(), kReminder));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDeadlineExceeded) throw;
      const double waited = to_seconds(Clock::steady().now() - start);
      if (deadline.passed())
        fail(ErrorCode::kDeadlineExceeded, "{}: {} waited {:.0f} s, missing: {}", what, identity_.name(), waited,
             missing(seen));
      log().warn("{}: {} has waited {:.0f} s, missing: {}", what, identity_.name(), waited, missing(seen));
    }
  }
}

void Rendezvous::claim(Deadline deadline) {
  const std::string key = rank_key(identity_.name_space, identity_.job, identity_.rank);
  const std::string value = own_.write();
  SwapResult swap = store_.put_if_absent(key, value, {.lease = lease_}, deadline.left());
  while (!swap.stored) {
    const RankRecord holder = RankRecord::read(key, swap.current.value);
    if (holder.incarnation == own_.incarnation && holder.address == own_.address) return;  // our own, sent twice
    const Liveness liveness = liveness_of(holder.incarnation);
    if (liveness == Liveness::kAlive)
      fail(ErrorCode::kAlreadyExists,
           "duplicate rank: {} is pid {} already, and this is pid {}: give each process its own rank", identity_.name(),
           holder.incarnation.pid, own_.incarnation.pid);
    if (liveness == Liveness::kUnknowable) {
      log().warn("{} is held by a process that cannot be seen from here ({}): waiting for its lease to end",
                 identity_.name(), holder.incarnation.to_string());
      wait(
          key, [&](const StoreView& view) { return !view.contains(key); }, "claiming the rank",
          [&](const StoreView&) { return fmt::format("the end of the lease of {}", identity_.name()); }, deadline);
      swap.current.mod_revision = 0;
    }
    swap = store_.compare_and_set(key, swap.current.mod_revision, value, {.lease = lease_}, deadline.left());
  }
}

PairView Rendezvous::join(const std::string& pair, const std::string& peer_job, Deadline deadline) {
  const std::string prefix = pair_prefix(identity_.name_space, pair);
  store_.put(pair_key(identity_.name_space, pair, identity_.job, identity_.rank),
             PairRecord{.rank = own_, .peer = peer_job}.write(), {.lease = lease_}, deadline.left());
  const auto complete = [&](const StoreView& view) {
    try {
      const PairRecords records(view, prefix);
      const bool own = records.complete(identity_.job, peer_job);
      return records.complete(peer_job, identity_.job) && own;
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("pair {}: {}", pair, error.what()));
    }
  };
  const auto missing = [&](const StoreView& view) {
    const PairRecords records(view, prefix);
    std::string text;
    for (const std::string& job : {identity_.job, peer_job}) {
      const std::string ranks = records.missing(job);
      if (!ranks.empty()) text += (text.empty() ? "" : ", ") + ranks;
    }
    return text;
  };
  PairRecords records(wait(prefix, complete, fmt::format("pair {}", pair), missing, deadline), prefix);
  return {.name = pair, .peer_job = peer_job, .own = records.take(identity_.job), .peer = records.take(peer_job)};
}

Rendezvous::Side Rendezvous::read_side(const PairView& view, const std::string& batch, const std::string& job,
                                       const std::vector<RankRecord>& ranks, bool sends, Deadline deadline) {
  const std::string prefix = batch_prefix(identity_.name_space, view.name, batch, job);
  const std::string manifest = manifest_key(identity_.name_space, view.name, batch, job);
  const auto key_of = [&](size_t rank) {
    return batch_key(identity_.name_space, view.name, batch, job, static_cast<Rank>(rank));
  };
  const auto missing_ranks = [&](const StoreView& items) {
    std::vector<Rank> missing;
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      if (!items.contains(key_of(rank))) missing.push_back(static_cast<Rank>(rank));
    return missing;
  };
  const auto complete = [&](const StoreView& items) {
    if (!items.contains(manifest) || !missing_ranks(items).empty()) return false;
    for (size_t rank = 0; rank < ranks.size(); ++rank)  // records of an earlier process do not count
      if (record_incarnation(key_of(rank), items.at(key_of(rank)).value) != ranks[rank].incarnation) return false;
    return record_incarnation(manifest, items.at(manifest).value) == ranks[0].incarnation;
  };
  const auto missing = [&](const StoreView& items) {
    const std::vector<Rank> absent = missing_ranks(items);
    return absent.empty() ? fmt::format("a registration by the present processes of job {}", job)
                          : rank_list(job, absent);
  };
  const StoreView items = wait(prefix, complete, fmt::format("pair {}, batch {}", view.name, batch), missing, deadline);

  Side side;
  std::vector<ManifestDiff> diffs;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    BatchRecord record = BatchRecord::read(key_of(rank), items.at(key_of(rank)).value);
    if (record.sends != sends)
      fail(ErrorCode::kMismatch, "pair {}, batch {}: {} {} it, which job {} does: one side offers, the other accepts",
           view.name, batch, rank_name(job, static_cast<Rank>(rank)), record.sends ? "offers" : "accepts",
           job == identity_.job ? view.peer_job : identity_.job);
    side.digest = side.digest && record.digest;
    diffs.push_back(std::move(record.diff));
  }
  side.manifest = merge(job, ManifestRecord::read(manifest, items.at(manifest).value).manifest, diffs);
  return side;
}

Agreement Rendezvous::exchange(const PairView& view, const std::string& batch, bool sends, bool digest,
                               const Manifest& own, Deadline deadline) {
  const std::string prefix = batch_prefix(identity_.name_space, view.name, batch, identity_.job);
  const std::string manifest = manifest_key(identity_.name_space, view.name, batch, identity_.job);
  BatchRecord record{.incarnation = own_.incarnation, .sends = sends, .digest = digest, .hash = own.hash(), .diff = {}};
  if (identity_.rank == 0) {
    store_.put(manifest, ManifestRecord{.incarnation = own_.incarnation, .manifest = own}.write(), {.lease = lease_},
               deadline.left());
  } else {
    const auto published = [&](const StoreView& items) {
      const auto it = items.find(manifest);
      return it != items.end() && record_incarnation(manifest, it->second.value) == view.own[0].incarnation;
    };
    const auto missing = [&](const StoreView&) { return rank_name(identity_.job, 0); };
    const StoreView items =
        wait(manifest, published, fmt::format("pair {}, batch {}", view.name, batch), missing, deadline);
    const Manifest rank0 = ManifestRecord::read(manifest, items.at(manifest).value).manifest;
    if (rank0.hash() != record.hash) record.diff = ManifestDiff::between(rank0, own);
  }
  store_.put(batch_key(identity_.name_space, view.name, batch, identity_.job, identity_.rank), record.write(),
             {.lease = lease_}, deadline.left());

  const Side mine = read_side(view, batch, identity_.job, view.own, sends, deadline);
  const Side theirs = read_side(view, batch, view.peer_job, view.peer, !sends, deadline);
  const Manifest& sender = sends ? mine.manifest : theirs.manifest;
  const Manifest& receiver = sends ? theirs.manifest : mine.manifest;
  const std::string& sender_job = sends ? identity_.job : view.peer_job;
  const std::string& receiver_job = sends ? view.peer_job : identity_.job;
  return {.match = match(sender, sender_job, receiver, receiver_job),
          .match_hash = hash_of(sender, receiver),
          .digest = mine.digest && theirs.digest};
}

Manifest Rendezvous::peer_manifest(const PairView& view, const std::string& batch, Deadline deadline) {
  return read_side(view, batch, view.peer_job, view.peer, true, deadline).manifest;
}

void Rendezvous::withdraw(const PairView& view, const std::string& batch) {
  store_.erase(batch_key(identity_.name_space, view.name, batch, identity_.job, identity_.rank), seconds(1));
  if (identity_.rank == 0)
    store_.erase(manifest_key(identity_.name_space, view.name, batch, identity_.job), seconds(1));
}

}  // namespace tessera::bus
