// A version that this rank offers to one receiving job, in one slot of memory. In place there is one slot, which is the
// user's memory; staged, each slot is a snapshot. A slot's object serves one version after the other.
//
//   none --offer(v)--> preparing --all is there--> on offer --over--> none
//                          |                          |
//                          \------------------> failing: taken back; over once nobody reads it any more
//
// Preparing: prepare/preparation.h. Kinds: offered_in_place.h, offered_snapshot.h; the terms of Partial tensors, which
// ranks of this job read meanwhile, are offered_terms.h.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "bus/session/source_link.h"
#include "tessera/error.h"

namespace tessera::bus {

class SenderSession;

// On the loop's thread.
class OfferedVersion {
 public:
  // REQUIRES: the session outlives it
  OfferedVersion(SenderSession& session, uint32_t slot) : session_(session), slot_(slot) {}
  virtual ~OfferedVersion() = default;
  OfferedVersion(const OfferedVersion&) = delete;
  OfferedVersion& operator=(const OfferedVersion&) = delete;

  uint32_t slot() const { return slot_; }
  int64_t version() const { return state_ == State::kNone ? 0 : version_; }  // 0: none
  bool preparing() const { return state_ == State::kPreparing; }
  bool on_offer() const { return state_ == State::kOnOffer; }
  bool failing() const { return state_ == State::kFailing; }
  virtual bool under_way() const = 0;  // what offer() began is not over

  // Prepares a version for the job. `copied`: the slot holds it already; otherwise copied() must follow. REQUIRES: not
  // under_way(); the session is adopted and not broken
  void offer(int64_t version, bool copied);
  void copied(const Status& status);  // no-op unless it is being prepared
  // Ends with `status` once nobody reads any more. No-op unless it is under way.
  void fail(const Status& status);
  Status why_given_up(int64_t version) const;  // as others hear it; ok if that version was not given up here

  virtual bool may_be_taken() const = 0;                      // a receiver may begin to read it
  virtual bool awaits(const SourceLink& receiver) const = 0;  // it must hear from that receiver
  virtual bool undecided() const = 0;  // nobody has begun to read it, and nobody can say yet whether it will be read
  bool pinned() const;                 // its memory is read, or a receiver may begin to read it any time
  // All receivers are at it, and one was heard of since then.
  bool flows_since(TimePoint then) const;
  std::string who_has_not_taken() const;
  std::string awaited() const;  // "inference/1 to take version 7"

  // --- events of its session ---
  virtual void on_prepared() = 0;
  virtual void on_reading() = 0;  // somebody begins to read it, or its terms
  virtual void on_not_taken(const SourceLink& receiver, const Status& status) = 0;
  virtual void on_stream_failed(const Status& status) = 0;
  virtual void on_digests() = 0;  // a run of them has ended
  virtual void on_lease_cut(const Incarnation& process) = 0;
  virtual void on_broken(const Status& latest) = 0;
  virtual void on_leaving(const Status& why) = 0;  // this rank closes the batch
  virtual void check_ended() = 0;

 protected:
  enum class State { kNone, kPreparing, kPrepared, kOnOffer, kFailing };

  // Offers it to all receivers. Returns whether its digests are there already.
  bool show();
  void withdraw() const;
  virtual void take_back(const Status& status) = 0;  // from receivers, as it fails

  SenderSession& session_;
  const uint32_t slot_;
  State state_ = State::kNone;
  int64_t version_ = 0;  // kept until the next one
  Status failure_;       // what offer() ends with

 private:
  Status cause_;  // of the failure, as others hear it
};

}  // namespace tessera::bus
