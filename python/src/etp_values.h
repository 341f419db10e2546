// What the bindings of Extended Tensor Parallelism share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "device/condition.h"
#include "tessera/etp.h"

namespace tessera::python {

// Lets a Python signal handler end the waits of this thread for other ranks while it lives; the handler's exception is
// then thrown. Python runs handlers only on the main thread: elsewhere it does nothing. May be made without the GIL.
class SignalHook {
 public:
  SignalHook() : hook_(look, nullptr) {}

  // Runs the handlers of signals that have come.
  static void look(void* = nullptr);

 private:
  const device::WaitHook hook_;
};

// A DLPack capsule over row-major [rows, columns] host memory, for torch.utils.dlpack.from_dlpack(), which costs a
// fraction of what an array object does. `keeper` is given up when the tensor's storage has gone, on whatever thread
// frees it, without the GIL.
nb::object dlpack_capsule(const void* data, int64_t rows, int64_t columns, DType dtype, std::shared_ptr<void> keeper);

// Of "auto", "on" and "off".
etp::PrefetchMode prefetch_from(const std::string& name);

// Dtypes by their names; none: the default.
etp::WeightSpec spec_of(const std::string& name, int64_t rows, int64_t columns, const std::string& dtype,
                        const std::string& format, const std::optional<std::string>& compute,
                        const std::optional<std::string>& accumulated, int pad_for_alignment, bool frozen, bool native,
                        bool planes_only, bool copied);

template <typename T>
T* at_address(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace tessera::python
