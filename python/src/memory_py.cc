// Memory that another process can read in place.
#include <nanobind/ndarray.h>

#include <memory>

#include "bindings.h"
#include "tessera/memory.h"

namespace tessera::python {

void bind_memory(nb::module_& module) {
  module.def(
      "shared_bytes",
      [](size_t bytes) {
        auto buffer = std::make_unique<SharedBuffer>();
        {
          const nb::gil_scoped_release released;
          *buffer = SharedHeap::process().allocate(bytes);
        }
        std::byte* data = buffer->data();
        const nb::capsule owner(buffer.release(), [](void* held) noexcept { delete static_cast<SharedBuffer*>(held); });
        return nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu>(data, {bytes}, owner);
      },
      nb::arg("bytes"),
      "A zeroed block of shared memory, freed once nothing refers to it. Raises ResourceExhaustedError.");
  module.def(
      "in_shared_memory",
      [](uintptr_t address, size_t bytes) {
        return SharedHeap::process().locate(reinterpret_cast<const void*>(address), bytes).has_value();
      },
      nb::arg("address"), nb::arg("bytes"), "Whether one block of Tessera's shared memory holds all of it.");
}

}  // namespace tessera::python
