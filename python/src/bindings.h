// What the sources of this module share: one binding file a concept, and the conversions between them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/bus.h"
#include "tessera/dtype.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera::python {

namespace nb = nanobind;

void bind_errors(nb::module_& module);
void bind_layout(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_codec(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_quantize(nb::module_& module);
void bind_amax(nb::module_& module);
void bind_tensor_watch(nb::module_& module);
void bind_bus(nb::module_& module);
void bind_bus_values(nb::module_& module);  // before the bus
void bind_environment(nb::module_& module);

// What the Python class of its code is, not raised. REQUIRES: !status.ok()
nb::object error_object(const Status& status);

// A Mesh, placement or dtype of this module, or another library's (torch's, NumPy's), which tessera._tensors.foreign
// translates. They throw what that raises.
Mesh mesh_from(nb::handle object);
Placement placement_from(nb::handle object);
DType dtype_from(nb::handle object);
nb::object placement_object(const Placement& placement);

// A tuple of ints, and typed so.
using IntTuple = nb::typed<nb::tuple, int, nb::ellipsis>;

template <typename T>
IntTuple int_tuple(const std::vector<T>& values) {
  nb::list list;
  for (const T value : values) list.append(value);
  return IntTuple(nb::tuple(list));
}

// (begin, end, step, dropped) of one dim.
using SliceTuple = std::tuple<Index, Index, Index, bool>;

inline std::vector<Slice> slices_from(const std::vector<SliceTuple>& tuples) {
  std::vector<Slice> slices;
  for (const auto& [begin, end, step, dropped] : tuples) slices.push_back({begin, end, step, dropped});
  return slices;
}

inline std::vector<SliceTuple> tuples_of(const std::vector<Slice>& slices) {
  std::vector<SliceTuple> tuples;
  for (const Slice& slice : slices) tuples.emplace_back(slice.begin, slice.end, slice.step, slice.dropped);
  return tuples;
}

// Seconds, as Python says them. Throws Error(kInvalidArgument) that names `what`; none: `fallback`.
Timeout timeout_from(const char* what, std::optional<double> seconds, Timeout fallback);

}  // namespace tessera::python
