// One version that this rank takes, from Chosen until nothing writes for it any more.
//
//   InPlaceVersion  pulling --all pulled--> over
//   StagedVersion   pulling --all pulled--> voting --decided--> over
//   LeasedVersion   pulling --all pulled--> voting --decided--> copying --all copied--> over
//
//   any of them     pulling --failure--> failing: runs are aborted --all have ended--> over
//
// On the loop's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bus/receiver/election.h"
#include "bus/receiver/own_ranks.h"
#include "bus/session/pull_link.h"
#include "bus/session/session.h"
#include "bus/session/versions.h"

namespace tessera::bus {

class ReceiverBatch;

// The parts of a session that its versions work with. REQUIRES: all references outlive this
struct ReceiverParts {
  const SessionSetup& setup;
  const std::string name;  // "batch policy of pair weights", for messages
  const SenderLinks& links;
  const OwnRanks& own_ranks;
  Election& election;
  const Status& broken;  // the first peer lost, and why
  ReceiverBatch& batch;
  // Called by the version under way once it has ended. REQUIRES: it is kept, since its functions are on the stack
  const std::function<void(const Status&)> over;

  const Identity& identity() const { return setup.agent->identity(); }
  // Returns whether everything that the version still needs is there: a sender may go once this rank is done with it,
  // and a rank of this job that has the version may close.
  bool can_take(int64_t version) const;
};

class TakenVersion {
 public:
  // REQUIRES: `parts` outlives this
  TakenVersion(const ReceiverParts& parts, const Chosen& chosen);
  virtual ~TakenVersion() = default;
  TakenVersion(const TakenVersion&) = delete;
  TakenVersion& operator=(const TakenVersion&) = delete;

  int64_t version() const { return version_; }
  uint32_t epoch() const { return epoch_; }
  // Returns whether it lies in the registered tensors, and not in the snapshot. REQUIRES: it was taken
  virtual bool registered() const = 0;
  virtual bool may_go_on() const;  // after the loss of a peer
  virtual std::vector<Link*> awaited_links() const;
  // Names the ranks that it waits for, and what for: "the others to take version 8". Empty while bytes are to come.
  virtual std::string awaited() const { return {}; }

  void begin();  // asks the senders for it
  // Ends it with `why` once nothing writes for it any more; no effect if it must go on.
  virtual void fail(const Status& why);
  void expire() { fail(overdue()); }  // nothing has come for too long
  // Reports how far it is, every now and then. Returns whether there is more to report later.
  virtual bool report_progress();

  virtual void granted(const PullLink& /*link*/) {}  // the sender lets it read from now on
  void pulled(const PullLink& link, const Status& status);
  virtual void copied() {}    // a PullLink::copy() has ended
  virtual void hear_got() {}  // at rank 0: another rank is done with it
  virtual void hear(const Decided& /*decided*/) {}
  virtual void hear(const ProgressReport& /*report*/) {}
  virtual void decided(Decided::Verdict /*verdict*/, const Status& /*reason*/) {}  // says the store
  virtual void peer_lost() {}

 protected:
  enum class State { kPulling, kVoting, kCopying, kFailing, kOver };

  // --- steps in which the kinds differ ---
  virtual void ask(PullLink& link) { link.take(version_, epoch_); }
  virtual void complete() = 0;                                                   // called once all of it is pulled
  virtual void end_leases(const Status& /*why*/) {}                              // called if it is not copied
  virtual void tell_failure() { parts_.election.tell_got(version_, failure_); }  // to the ranks of this job
  virtual void moved();            // called if bytes of this rank have moved
  virtual Status overdue() const;  // the error of expire()
  virtual void end(const Status& status);

  const ReceiverParts& parts_;
  State state_ = State::kPulling;
  int64_t bytes_ = 0;  // pulled, when that was last reported
  Status failure_;

 private:
  void take_more();
  void check_pulled();

  const int64_t version_;
  const uint32_t epoch_;
};

}  // namespace tessera::bus
