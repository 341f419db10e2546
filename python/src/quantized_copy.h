// What a sender's tensor has beside its elements, as Python passes it on.
#pragma once

#include <memory>

#include "tessera/quantize.h"

namespace tessera::python {

struct QuantizedCopyHandle {
  std::shared_ptr<const QuantizedCopy> copy;
};

}  // namespace tessera::python
