// The terms of Partial tensors that this rank offers with a version: to the ranks of its own job that reduce them,
// where they lie as the user registered them. They may be read from the version's offer until it is over.
#pragma once

#include <cstdint>
#include <vector>

#include "bus/sender/receiver_links.h"
#include "bus/session/session.h"
#include "bus/session/source_link.h"

namespace tessera::bus {

class SenderSession;

// On the loop's thread.
class OfferedTerms final : public SourceLinkOwner {
 public:
  // REQUIRES: the session outlives it
  explicit OfferedTerms(SenderSession& session) : session_(session) {}

  // An owner of a reduction attaches, which reads `served`. Throws kAlreadyExists.
  void accept(Caller caller, std::vector<ServedRoute> served);
  const ReceiverLinks& owners() const { return owners_; }
  bool ready(Rank rank) const;

  void offer(int64_t version);
  void take_back(const Status& status);  // of the version offered last; whoever reads is asked to stop
  bool reading() const { return bus::reading(owners_); }
  bool all_ended(int64_t version) const;  // all owners have had it, or have failed; true without owners
  bool awaits(const SourceLink& owner) const { return owner.ended_version() != version_; }
  void detach(const Status& why);

 private:
  void on_source_ready(SourceLink& link) override;
  void on_hold(SourceLink& link, int64_t version, uint32_t epoch) override;
  void on_released(SourceLink&) override {}  // it keeps nothing
  void on_take(SourceLink& link, const Take& take) override;
  void on_progress(SourceLink& link) override;
  void on_done(SourceLink& link, const Done& done) override;
  void on_source_run_done(SourceLink& link) override;
  void on_ahead(SourceLink& link, int64_t version) override;
  void on_source_detached(SourceLink& link, const Status& reason) override;
  void on_source_lost(SourceLink& link, const Status& status) override;
  void on_source_broken(SourceLink& link, const Status& status) override;

  SenderSession& session_;
  ReceiverLinks owners_;
  int64_t version_ = 0;  // offered last
};

}  // namespace tessera::bus
