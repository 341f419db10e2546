// The records of a pair, as last read from the store, checked against each other.
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

#include "base/clock.h"
#include "bus/registration/records.h"
#include "tessera/store.h"

namespace tessera::bus {

class PairRecords {
 public:
  // For the pair whose records are below `prefix`, and failures below `failures`. `joined`: the revision at which this
  // rank, `self`, has joined. Earlier failures belong to a previous attempt.
  PairRecords(std::string prefix, std::string failures, uint64_t self, int64_t joined);

  // Reads only records that have changed, and checks whether their processes live.
  void read(const StoreView& items);
  // Checks all processes of the records read so far.
  void look_for_dead();
  // Throws if another rank of `job` has failed or left, with its reason.
  void throw_if_failed(const std::string& job) const;
  // Whether every rank of `job` has joined, and names the same peers. Throws kMismatch if they disagree about the
  // world.
  bool complete(const std::string& job) const;
  // Throws kMismatch once two ranks of `job` have named different peers for so long, each one that the other has not.
  // Threads that join several jobs under one name may do so in another order on each rank, so this may pass.
  void throw_if_divided(const std::string& job, Duration patience);
  // Whether no rank of `job` has joined, and no dead one waits to be replaced.
  bool gone(const std::string& job) const { return !jobs_.contains(job) && !has_dead(job); }
  // Names the ranks of `job` that have not joined, or that name different peers; empty if there are none.
  std::string missing(const std::string& job) const;
  // Of the jobs that fit; of all without a predicate.
  std::vector<Seen> seen(const std::function<bool(const std::string& job)>& of_job = {}) const;
  // By rank; removes them here. REQUIRES: complete(job)
  std::vector<RankRecord> take(const std::string& job);

 private:
  struct Known {
    int64_t revision = 0;
    std::optional<JobRank> who;  // the record's rank; none: it is a failure
  };
  void read(const std::string& key, const KeyValue& item);
  void forget(const Known& known);
  bool has_dead(std::string_view job) const;
  std::string divided(const std::string& job) const;  // two such ranks in words; empty: there are none

  const std::string prefix_, failures_;
  const uint64_t self_;
  const int64_t joined_;
  std::map<std::string, Known> known_;                                   // by key
  std::map<std::string, std::map<Rank, PairRecord>, std::less<>> jobs_;  // of living processes; no job is empty
  std::set<std::pair<std::string, Rank>> dead_;
  std::map<std::string, Status> failed_;     // by job
  std::map<std::string, Deadline> divided_;  // by job: when its patience ends
};

}  // namespace tessera::bus
