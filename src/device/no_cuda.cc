// Stands in for device/cuda/ in builds without CUDA.
#include "base/fail.h"
#include "device/optional.h"

namespace tessera::device::cuda {

std::shared_ptr<Device> make_device(const DeviceOptions&) {
  fail(
      ErrorCode::kUnimplemented,
      "this build has no CUDA streams: parameters must be in host memory; move the model there with .to('cpu')"_message);
}

}  // namespace tessera::device::cuda
