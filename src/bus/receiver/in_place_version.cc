#include "bus/receiver/in_place_version.h"

#include "bus/receiver/receiver_batch.h"

namespace tessera::bus {

void InPlaceVersion::granted(const PullLink& link) {
  if (link.bytes() != 0) parts_.batch.on_writing();
}

void InPlaceVersion::complete() {
  // If a rank of this job has not got it, all take it again.
  if (parts_.election.refusal().ok()) parts_.election.took(version());
  parts_.election.tell_got(version(), {});
  end({});
}

}  // namespace tessera::bus
