// Element types by name, and what one element of them takes.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace tessera::python {

void bind_codec(nb::module_& module) {
  module.def(
      "dtypes",
      [] {
        std::vector<std::string> names;
        for (const DType dtype : all_dtypes()) names.emplace_back(to_string(dtype));
        return names;
      },
      "The names of all element types.");
  module.def(
      "dtype", [](nb::handle object) { return std::string(to_string(dtype_from(object))); }, nb::arg("object"),
      "Tessera's name of an element type: of its own names, of NumPy's, torch's or ml_dtypes' types.");
  module.def(
      "bits_of", [](nb::handle object) { return bits_of(dtype_from(object)); }, nb::arg("dtype"),
      "Bits an element: 4 for f4, else a multiple of 8.");
}

}  // namespace tessera::python
