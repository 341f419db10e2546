// The records of a pair, as the last look at the store has shown them, judged against each other.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bus/registration/records.h"
#include "tessera/store.h"

namespace tessera::bus {

class PairRecords {
 public:
  // Of the pair whose records lie below `prefix`, and failures below `failures`. `joined`: the revision at which this
  // rank, `self`, has joined. Failures before it are an earlier try's.
  PairRecords(std::string prefix, std::string failures, uint64_t self, int64_t joined);

  // Only records that have changed since are read, and looked at whether their processes live.
  void read(const StoreView& items);
  // At those of all that were read.
  void look_for_dead();
  // Throws what another rank of `job` has failed with or left for.
  void throw_if_failed(const std::string& job) const;
  // Whether every rank of `job` is in. Throws kMismatch where its ranks disagree.
  bool complete(const std::string& job) const;
  // Whether nobody of `job` is in, nor was as it died and may be replaced.
  bool gone(const std::string& job) const { return !jobs_.contains(job) && !has_dead(job); }
  // Who of `job` is not, in words; empty if all are.
  std::string missing(const std::string& job) const;
  // Of the jobs that fit; without a predicate, of all.
  std::vector<Seen> seen(const std::function<bool(const std::string& job)>& of_job = {}) const;
  // By rank; they are gone from here. REQUIRES: complete(job)
  std::vector<RankRecord> take(const std::string& job);

 private:
  struct Known {
    int64_t revision = 0;
    std::optional<JobRank> who;  // whose record it is; none: it is a failure
  };
  void read(const std::string& key, const KeyValue& item);
  void forget(const Known& known);
  bool has_dead(std::string_view job) const;

  const std::string prefix_, failures_;
  const uint64_t self_;
  const int64_t joined_;
  std::map<std::string, Known> known_;                                   // by key
  std::map<std::string, std::map<Rank, PairRecord>, std::less<>> jobs_;  // the living; no job is empty
  std::set<std::pair<std::string, Rank>> dead_;
  std::map<std::string, Status> failed_;  // by job
};

}  // namespace tessera::bus
