// Decides about a staged version that this rank has got: it is taken once all ranks of the job have got it. Rank 0 has
// the decision written to the store, and then tells the others. A rank that loses rank 0 before that asks the store.
#pragma once

#include <cstdint>
#include <functional>

#include "bus/receiver/election.h"
#include "bus/receiver/own_ranks.h"
#include "bus/session/versions.h"

namespace tessera::bus {

// On the loop's thread. A decision lasts from vote() to Events::over, and only then are the other functions called.
class Decision {
 public:
  struct Events {
    // Rank 0: all ranks have got it. The owner writes the decision to the store and calls decided() soon, not at once.
    std::function<void(int64_t version, uint32_t epoch)> all_got;
    // The deciding rank was lost, or does not know. The owner asks the store and calls decided() later, not at once.
    std::function<void(int64_t version, uint32_t epoch)> ask_store;
    std::function<void(Decided::Verdict verdict, const Status& reason)> over;
  };
  // `broken` says why a follower was lost. REQUIRES: all references outlive this
  Decision(const Election& election, const OwnRanks& own_ranks, const Status& broken, Events events);

  // This rank has got the version of the election's epoch, and waits for the decision.
  void vote(int64_t version);
  // A rank has got it or not, or was lost.
  void check_votes();
  void leader_lost() { ask_store(); }
  bool asked() const { return asked_; }  // the store was asked, or told
  void give_up(const Status& why);       // no effect once the store was asked or told
  void hear(const Decided& decided);     // from rank 0
  // `reason` is that of an abort. kAskStore means that the store gave no answer, for `reason`; that ends it, too.
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
