// What becomes of a staged version that this rank has got: it counts once all ranks of the job have. Rank 0 has that
// written down in the store, and tells the others; one that loses rank 0 meanwhile asks the store.
#pragma once

#include <cstdint>
#include <functional>

#include "bus/receiver/election.h"
#include "bus/receiver/own_ranks.h"
#include "bus/session/versions.h"

namespace tessera::bus {

// On the loop's thread. From vote() to Events::over, and called only then.
class Decision {
 public:
  struct Events {
    // Rank 0: all ranks have got it. decided() is called; soon, but not at once.
    std::function<void(int64_t version, uint32_t epoch)> all_got;
    // The deciding rank was lost, or does not know. The store is asked, and decided() is called; not at once.
    std::function<void(int64_t version, uint32_t epoch)> ask_store;
    std::function<void(Decided::Verdict verdict, const Status& reason)> over;
  };
  // `broken` says why a follower was lost. REQUIRES: that all of it outlives it
  Decision(const Election& election, const OwnRanks& own_ranks, const Status& broken, Events events);

  // This rank has got the version of the election's epoch, and waits for what all decide.
  void vote(int64_t version);
  // A rank has got it or not, or was lost.
  void check_votes();
  void leader_lost() { ask_store(); }
  bool asked() const { return asked_; }  // the store is asked, or told
  void give_up(const Status& why);       // as far as it can
  void hear(const Decided& decided);     // by rank 0
  // `reason` of an abort, or why the store does not say: kAskStore ends it then.
  void decided(Decided::Verdict verdict, const Status& reason);

 private:
  void ask_store();

  const Election& election_;
  const OwnRanks& own_ranks_;
  const Status& broken_;
  const Events events_;
  int64_t version_ = 0;
  bool asked_ = false;
};

}  // namespace tessera::bus
