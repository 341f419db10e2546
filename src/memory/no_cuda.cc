// Stands in for device/cuda/ in builds without CUDA.
#include "memory/device.h"

namespace tessera::cuda {

Capability capability() {
  return {.available = false,
          .detail = "this build has no CUDA: GPU memory is not supported yet; copy tensors to host memory"};
}

}  // namespace tessera::cuda
