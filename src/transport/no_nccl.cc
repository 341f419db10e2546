// Stands in for transport/nccl/ in builds without it.
#include "transport/optional.h"

namespace tessera {

const Transport& nccl_transport() {
  static const AbsentTransport absent(
      "nccl", "this release moves host memory only; the folder transport/nccl/ adds GPU memory on any hosts");
  return absent;
}

}  // namespace tessera
