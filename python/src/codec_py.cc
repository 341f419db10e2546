// Element types by name, and the size of their elements.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/fail.h"
#include "bindings.h"
#include "codec/simd/digest.h"

namespace tessera::python {
namespace {

// Digests a local tensor's elements in row-major order, with any strides.
std::string local_digest(uintptr_t address, nb::handle dtype, const Shape& shape, const std::vector<Index>& strides) {
  const DType type = dtype_from(dtype);
  if (strides.size() != shape.size())
    fail(ErrorCode::kInvalidArgument, "{} strides for {} dims"_message, strides.size(), shape.size());
  const nb::gil_scoped_release unlocked;
  // The dense dims on the right form a run, which is repeated for the dims on the left.
  size_t dense = shape.size();
  Index run = 1;
  while (dense > 0 && (strides[dense - 1] == run || shape[dense - 1] == 1)) run *= shape[--dense];
  Index runs = 1;
  for (size_t dim = 0; dim < dense; ++dim) runs *= shape[dim];
  Digest digest;
  if (runs == 0 || run == 0) return digest.to_string();
  const auto bytes = static_cast<size_t>(bytes_of(type, run));
  const auto* const data = reinterpret_cast<const std::byte*>(address);
  for (Index i = 0; i < runs; ++i) {
    Index offset = 0, rest = i;
    for (size_t dim = dense; dim-- > 0; rest /= shape[dim]) offset += rest % shape[dim] * strides[dim];
    digest_bytes(digest, static_cast<uint64_t>(i) * bytes, data + bytes_of(type, offset), bytes);
  }
  return digest.to_string();
}

}  // namespace

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
      "torch_name", [](const std::string& name) { return std::string(torch_name(parse_dtype(name))); },
      nb::arg("dtype"), "What torch, NumPy and ml_dtypes call an element type: float32 for f32.");
  module.def(
      "dtype", [](nb::handle object) { return std::string(to_string(dtype_from(object))); }, nb::arg("object"),
      "Tessera's name of an element type, given as such a name or as a type of NumPy, torch or ml_dtypes.");
  module.def(
      "bits_of", [](nb::handle object) { return bits_of(dtype_from(object)); }, nb::arg("dtype"),
      "Bits per element: 4 for f4, a multiple of 8 for the others.");
  module.def("local_digest", &local_digest, nb::arg("address"), nb::arg("dtype"), nb::arg("shape"), nb::arg("strides"),
             "The digest of a local tensor's elements in row-major order (docs/formats/digest.md).");
}

}  // namespace tessera::python
