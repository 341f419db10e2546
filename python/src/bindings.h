// Shared by the sources of this module: one binding file for each concept, and the conversions between them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <string_view>
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
void bind_checkpoint(nb::module_& module);
void bind_environment(nb::module_& module);
void bind_etp_group(nb::module_& module);
void bind_etp_norms(nb::module_& module);  // after the group
void bind_etp_report(nb::module_& module);
void bind_etp_runtime(nb::module_& module);  // after reports

// Makes a str of any bytes; those that are not UTF-8 become \xff. Names, paths and messages of peers may hold some.
nb::str str_of(std::string_view bytes);

// An instance of the Python class for its code, not raised. REQUIRES: !status.ok()
nb::object error_object(const Status& status);
// Returns the code of that name: "invalid-argument". Throws Error(kInvalidArgument) if there is none.
ErrorCode error_code_named(const std::string& name);

// Converts a Mesh, placement or dtype of this module, or of another library (torch, NumPy), which
// tessera._tensors.foreign translates; its exceptions pass through.
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

// A timeout in seconds from Python. Throws Error(kInvalidArgument), which names `what`; None gives `fallback`.
Timeout timeout_from(const char* what, std::optional<double> seconds, Timeout fallback);

}  // namespace tessera::python
