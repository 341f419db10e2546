// Which version a receiving job takes next. Rank 0 chooses the newest that every sender offers. It asks each sender to
// hold that version, and once they all do, it sends (epoch, version) to the other ranks. They report when they have got
// it; before that, rank 0 chooses no other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bus/receiver/own_ranks.h"
#include "bus/session/pull_link.h"
#include "bus/session/versions.h"
#include "peer/identity.h"

namespace tessera::bus {

using SenderLinks = std::vector<std::unique_ptr<PullLink>>;  // of this rank, in the order of the senders' ranks

// On the loop's thread.
class Election {
 public:
  // Versions up to `floor` are not taken (again). REQUIRES: all references outlive this
  Election(const Identity& self, const SenderLinks& senders, const OwnRanks& own_ranks, int64_t floor);

  bool leads() const { return self_.rank == 0; }
  uint32_t epoch() const { return epoch_; }  // of the last transfer

  // --- what this rank takes ---
  void want(int64_t min_version);  // the argument of recv()
  int64_t wanted() const { return wanted_; }
  int64_t min_version() const { return min_version_; }                // the lowest that is wanted and new
  void held(int64_t version) { floor_ = std::max(floor_, version); }  // this rank has that version from elsewhere
  void took(int64_t version) { floor_before_ = std::exchange(floor_, version); }
  const std::optional<Chosen>& chosen() const { return chosen_; }  // announced, not yet taken
  // From rank 0. Throws kMismatch for one that is out of turn.
  void hear(const Chosen& chosen);
  void begin(const Chosen& chosen);  // this rank takes it from now on
  // This rank does not take it, and tells rank 0, which chooses no other version before it knows. REQUIRES: chosen()
  void pass_up(const Status& why);
  // Tells rank 0 how the version that was begun last has ended here.
  void tell_got(int64_t version, const Status& status) const;

  // --- rank 0 ---
  int64_t complete_version() const;  // the newest that all senders offer; 0: none
  // Asks all senders to hold the newest version, if there is one to take and all ranks are done with the last one.
  void choose();
  bool holding() const { return holding_ != 0; }
  void stop_holding();
  // Tells senders that others of their job offer a newer version, where that may keep them from ever offering the same.
  void tell_those_behind() const;
  // Once all senders hold the version: announces it to the others.
  std::optional<Chosen> announce();
  // Throws kMismatch for a Got that is out of turn. If a rank has not got the version, this one may take it again.
  void note_got(Rank rank, const Got& got);
  void lower_min_version();  // afterwards, so that it is chosen again
  bool has_got(Rank rank, uint32_t epoch) const { return got_[static_cast<size_t>(rank)] >= epoch; }
  bool all_have(uint32_t epoch) const;
  bool all_have_announced() const { return all_have(announced_); }
  bool awaits(Rank rank) const { return !has_got(rank, announced_); }
  const Status& refusal() const { return refusal_; }  // of the first rank that has not got the present version
  std::string missing() const;                        // the ranks awaited
  std::vector<Link*> awaited_links() const;           // to those of this job

 private:
  const Identity& self_;
  const SenderLinks& senders_;
  const OwnRanks& own_ranks_;
  std::optional<Chosen> chosen_;
  int64_t wanted_ = 0;
  int64_t min_version_ = 0;
  uint32_t epoch_ = 0;
  int64_t floor_ = 0;
  // Rank 0.
  int64_t holding_ = 0;                  // the version that it will choose once all senders hold it
  uint32_t announced_ = 0;               // the epoch that it announced last
  std::vector<uint32_t> got_;            // by rank: the last epoch that the rank is done with
  std::optional<int64_t> floor_before_;  // floor_ before the announced version was taken here; none: it was not
  Status refusal_;
};

}  // namespace tessera::bus
