// Stands in for transport/cuda_ipc/ in builds without it.
#include "transport/optional.h"

namespace tessera {

const Transport& cuda_ipc_transport() {
  static const AbsentTransport absent(
      "cuda_ipc", "this release moves host memory only; the folder transport/cuda_ipc/ adds GPU memory of one host");
  return absent;
}

}  // namespace tessera
