// A version that is pulled into the registered tensors, which are torn from its first byte on.
#pragma once

#include "bus/receiver/taken_version.h"

namespace tessera::bus {

class InPlaceVersion final : public TakenVersion {
 public:
  using TakenVersion::TakenVersion;

  bool registered() const override { return true; }
  void granted(const PullLink& link) override;

 private:
  void complete() override;
};

}  // namespace tessera::bus
