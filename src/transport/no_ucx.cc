// Stands in for transport/ucx/ in builds without it.
#include "transport/optional.h"

namespace tessera {

const Transport& ucx_transport() {
  static const AbsentTransport absent(
      "ucx", "this release moves data within one host only; the folder transport/ucx/ adds other hosts");
  return absent;
}

}  // namespace tessera
