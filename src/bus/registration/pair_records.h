// The records of a pair, as one look at the store shows them, judged against each other. A value.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "bus/registration/records.h"
#include "tessera/store.h"

namespace tessera::bus {

class PairRecords {
 public:
  // `joined`: the revision at which this rank, `self`, has joined. Failures before it are an earlier try's.
  PairRecords(const StoreView& items, std::string_view prefix, std::string_view failures, uint64_t self,
              int64_t joined);

  // Throws what another rank has failed with or left for.
  void throw_if_failed() const { failure_.throw_if_error(); }
  // Whether every rank of `job` is in. Throws kMismatch where its ranks disagree.
  bool complete(const std::string& job) const;
  // Whether nobody of `job` is in, nor was as it died and may be replaced.
  bool gone(const std::string& job) const { return !jobs_.contains(job) && !dead_.contains(job); }
  // Who of `job` is not, in words; empty if all are.
  std::string missing(const std::string& job) const;
  std::vector<Seen> seen() const;
  // By rank; they are gone from here. REQUIRES: complete(job)
  std::vector<RankRecord> take(const std::string& job);

 private:
  std::map<std::string, std::map<Rank, PairRecord>, std::less<>> jobs_;  // the living
  std::set<std::string, std::less<>> dead_;                              // jobs of whom some are dead
  Status failure_;
};

}  // namespace tessera::bus
