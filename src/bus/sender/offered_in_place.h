// A version that lies in the user's memory: it is the receivers' to read from its offer until each of them has it, or
// until it has failed and nobody reads any more. Only then is the memory the user's again.
#pragma once

#include "bus/sender/offered_version.h"

namespace tessera::bus {

class InPlaceSender;

class OfferedInPlace final : public OfferedVersion {
 public:
  OfferedInPlace(SenderSession& session, InPlaceSender& sender) : OfferedVersion(session, 0), sender_(sender) {}

  bool under_way() const override { return state_ != State::kNone; }
  bool may_be_taken() const override { return on_offer(); }
  bool awaits(const SourceLink& receiver) const override;
  bool undecided() const override;

  void on_prepared() override;
  void on_reading() override;
  void on_not_taken(const SourceLink& receiver, const Status& status) override;
  void on_stream_failed(const Status& status) override;
  void on_digests() override {}
  void on_lease_cut(const Incarnation&) override {}  // its receivers stop reading when their links end
  void on_broken(const Status& latest) override;
  void on_leaving(const Status&) override {}  // the send ends first
  void check_ended() override;

 private:
  void take_back(const Status& status) override;

  InPlaceSender& sender_;
};

}  // namespace tessera::bus
