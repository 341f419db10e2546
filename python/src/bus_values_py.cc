// Inputs and results of the bus: TensorSpec, ManifestEntry, Progress, BatchStats, BatchPeer.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "base/escape.h"
#include "base/fail.h"
#include "bindings.h"
#include "planes.h"
#include "quantized_copy.h"
#include "tessera/bus.h"

namespace tessera::python {
namespace {

// Name, then row and column.
using FusedTuple = std::tuple<std::string, std::optional<std::tuple<Index, Index>>>;

FusedPart fused_from(FusedTuple fused) {
  auto& [name, place] = fused;
  FusedPart part{.name = std::move(name)};
  if (place) part.place = {std::get<0>(*place), std::get<1>(*place)};
  return part;
}

std::optional<FusedTuple> tuple_of(const FusedPart& part) {
  if (part.name.empty()) return std::nullopt;
  if (!part.place) return FusedTuple(part.name, std::nullopt);
  return FusedTuple(part.name, std::tuple(part.place->row, part.place->column));
}

TensorSpec make_spec(std::string name, uintptr_t address, nb::handle dtype, Shape shape, std::optional<Layout> layout,
                     std::optional<std::vector<Index>> strides) {
  return {.name = std::move(name),
          .data = reinterpret_cast<void*>(address),
          .dtype = dtype_from(dtype),
          .shape = std::move(shape),
          .layout = std::move(layout).value_or(Layout()),
          .strides = std::move(strides).value_or(std::vector<Index>())};
}

std::optional<std::string> name_of(std::optional<Format> wire) {
  return wire ? std::optional(std::string(to_string(*wire))) : std::nullopt;
}

std::string describe(const TensorSpec& spec) {
  return fmt::format("TensorSpec({}, {} {} {})", in_quotes(spec.name), to_string(spec.dtype),
                     to_string_shape(spec.shape), spec.layout == Layout() ? "replicated" : spec.layout.to_string());
}

void bind_tensor_spec(nb::module_& module) {
  nb::class_<QuantizedCopyHandle>(module, "QuantizedCopy",
                                  "Elements that lie elsewhere, quantised: what ETP publishes of a weight.")
      .def_prop_ro("format", [](const QuantizedCopyHandle& self) { return std::string(to_string(self.copy->format)); })
      .def_prop_ro(
          "current", [](const QuantizedCopyHandle& self) { return self.copy->current(); },
          "Whether it is of what the elements are now.");
  nb::class_<TensorSpec>(module, "TensorSpec", "One tensor of a batch, as one rank holds it.")
      .def(
          "__init__",
          [](TensorSpec* self, std::string name, uintptr_t address, nb::handle dtype, Shape shape,
             std::optional<Layout> layout, std::optional<std::vector<Index>> strides, std::string source,
             const std::vector<SliceTuple>& slices, const std::optional<std::string>& wire,
             const std::vector<std::string>& planes, std::optional<FusedTuple> fused,
             const QuantizedCopyHandle* quantized) {
            const std::optional<Format> format = wire ? std::optional(parse_format(*wire)) : std::nullopt;
            new (self) TensorSpec(
                make_spec(std::move(name), address, dtype, std::move(shape), std::move(layout), std::move(strides)));
            self->source = {.name = std::move(source), .slices = slices_from(slices)};
            self->wire = format;
            self->planes = plane_set(planes);
            if (fused) self->fused = fused_from(std::move(*fused));
            if (quantized != nullptr) self->quantized = quantized->copy;
          },
          nb::arg("name"), nb::arg("address"), nb::arg("dtype"), nb::arg("shape"), nb::arg("layout") = nb::none(),
          nb::arg("strides") = nb::none(), nb::arg("source") = "", nb::arg("slices") = std::vector<SliceTuple>(),
          nb::arg("wire") = nb::none(), nb::arg("planes") = std::vector<std::string>(), nb::arg("fused") = nb::none(),
          nb::arg("quantized").none() = nb::none(),
          "`shape` is the global shape; `strides` are those of the local tensor, in elements. The address is 0 on a "
          "rank outside the mesh. A receiver may read `source` instead of the sender's tensor of the same name, or "
          "`slices` of it: (begin, end, step, whether the dim is dropped) for each dim. `wire` is the format on the "
          "wire. `planes` of that format are received, or sent, as they are: they lie in one block of memory at "
          "`address`. `fused` is the name of the tensor that this one is a part of, and (row, column) of its first "
          "element "
          "there, or None. `quantized` is what a sender has of the same elements.")
      .def_ro("name", &TensorSpec::name)
      .def_prop_ro("address", [](const TensorSpec& self) { return reinterpret_cast<uintptr_t>(self.data); })
      .def_prop_ro("dtype", [](const TensorSpec& self) { return std::string(to_string(self.dtype)); })
      .def_prop_ro("shape", [](const TensorSpec& self) { return int_tuple(self.shape); })
      .def_prop_ro("layout",
                   [](const TensorSpec& self) -> std::optional<Layout> {
                     return self.layout == Layout() ? std::nullopt : std::optional(self.layout);
                   })
      .def_prop_ro("strides", [](const TensorSpec& self) { return int_tuple(self.strides); })
      .def_prop_ro("source", [](const TensorSpec& self) { return self.source.name; })
      .def_prop_ro("slices", [](const TensorSpec& self) { return tuples_of(self.source.slices); })
      .def_prop_ro("wire", [](const TensorSpec& self) { return name_of(self.wire); })
      .def_prop_ro("planes", [](const TensorSpec& self) { return names_of(self.planes); })
      .def_prop_ro("fused", [](const TensorSpec& self) { return tuple_of(self.fused); })
      .def("__repr__", describe);
  module.def(
      "wire_format", [](const std::string& name) { return std::string(to_string(parse_format(name))); },
      nb::arg("name"), "The name of a format, whatever its upper and lower case; an error lists all formats.");
}

void bind_values(nb::module_& module) {
  nb::class_<ManifestEntry>(module, "ManifestEntry", "One tensor that the sending side offers.")
      .def_prop_ro("name", [](const ManifestEntry& self) { return str_of(self.name); })
      .def_prop_ro("dtype", [](const ManifestEntry& self) { return std::string(to_string(self.dtype)); })
      .def_prop_ro("shape", [](const ManifestEntry& self) { return int_tuple(self.shape); })
      .def_ro("layout", &ManifestEntry::layout)
      .def_prop_ro(
          "wire", [](const ManifestEntry& self) { return name_of(self.wire); },
          "The wire format that the sender registered, or None.")
      .def("__repr__", [](const ManifestEntry& self) {
        return fmt::format("ManifestEntry({}, {} {} {})", in_quotes(self.name), to_string(self.dtype),
                           to_string_shape(self.shape), self.layout.to_string());
      });
  nb::class_<Progress>(module, "Progress", "What a transfer has done so far.")
      .def(nb::init<>(), "The progress of a transfer that has not begun.")
      .def_ro("bytes_done", &Progress::bytes_done)
      .def_ro("bytes_total", &Progress::bytes_total)
      .def_ro("seconds", &Progress::seconds, "Seconds since the data began to flow.")
      .def_prop_ro("gigabytes_per_second", &Progress::gigabytes_per_second)
      .def("__repr__", [](const Progress& self) {
        return fmt::format("Progress({} of {} bytes, {:.3f} s, {:.2f} GB/s)", self.bytes_done, self.bytes_total,
                           self.seconds, self.gigabytes_per_second());
      });
}

void bind_stats(nb::module_& module) {
  nb::class_<BatchStats>(module, "BatchStats", "Facts about a batch, and what its transfers have cost.")
      .def_ro("tensors", &BatchStats::tensors)
      .def_ro("skipped", &BatchStats::skipped, "Tensors that only the sender has.")
      .def_ro("routes", &BatchStats::routes)
      .def_ro("bytes_moved", &BatchStats::bytes_moved, "Bytes that all ranks move in one transfer.")
      .def_ro("bytes_lower_bound", &BatchStats::bytes_lower_bound)
      .def_ro("rank_bytes", &BatchStats::rank_bytes, "Bytes of one transfer that this rank sends or receives.")
      .def_ro("transfers", &BatchStats::transfers,
              "Versions that were sent or taken; one that is staged counts at its commit.")
      .def_ro("sessions", &BatchStats::sessions, "Times that the batch was matched with another job.")
      .def_ro("snapshot_bytes", &BatchStats::snapshot_bytes,
              "Bytes of a staged batch's copies. Their number does not depend on how many jobs take them.")
      .def_ro("register_seconds", &BatchStats::register_seconds)
      .def_ro("store_requests", &BatchStats::store_requests, "Requests to the store since registration.")
      .def_ro("plans", &BatchStats::plans, "Batches planned since registration.")
      .def_ro("allocations", &BatchStats::allocations,
              "Allocations of staging, scratch and streams since registration.")
      .def_ro("delta_routes", &BatchStats::delta_routes,
              "Regions that travelled as deltas from or to this rank, over all transfers.")
      .def_ro("delta_bytes", &BatchStats::delta_bytes, "Bytes of those deltas.")
      .def_ro("delta_full_bytes", &BatchStats::delta_full_bytes, "Bytes that those regions would have taken in full.")
      .def_ro("quantized_elements", &BatchStats::quantized_elements,
              "Elements that this rank quantises (sender) or receives quantised (receiver) in one transfer.")
      .def_ro("quantized_bytes", &BatchStats::quantized_bytes,
              "Bytes of those elements as they travel, with scales and amaxes.")
      .def_ro("quantized_source_bytes", &BatchStats::quantized_source_bytes,
              "Bytes of those elements in the sender's dtypes.")
      .def_ro("quantized_elements_moved", &BatchStats::quantized_elements_moved,
              "Quantised elements that all ranks move in one transfer.")
      .def_ro("quantized_bytes_moved", &BatchStats::quantized_bytes_moved,
              "The planned bytes of those elements; a part of bytes_moved.")
      .def_ro("amax_exchanges", &BatchStats::amax_exchanges,
              "Exchanges in which all ranks of a sending job agreed on the amaxes.")
      .def_prop_ro("quantized_ratio", &BatchStats::quantized_ratio,
                   "quantized_bytes over the bytes of the same elements in bf16; 0 if nothing is quantised.")
      .def_prop_ro("batch_ratio", &BatchStats::batch_ratio,
                   "bytes_moved over the bytes that would move if bf16 were sent instead of the quantised formats.")
      .def("__repr__", [](const BatchStats& self) {
        return fmt::format("BatchStats({} tensors, {} skipped, {} routes, {} bytes moved, {} transfers)", self.tensors,
                           self.skipped, self.routes, self.bytes_moved, self.transfers);
      });
}

void bind_peer(nb::module_& module) {
  nb::class_<BatchPeer>(module, "BatchPeer", "Another job of a batch, as this rank knows it.")
      .def_ro("job", &BatchPeer::job)
      .def_ro("attached", &BatchPeer::attached, "Whether all its ranks are there and have registered the batch.")
      .def_ro("world", &BatchPeer::world, "The number of its ranks; 0 until it has been attached once.")
      .def_ro("version", &BatchPeer::version,
              "The newest version that all its ranks have taken, as far as they read from this one; of a receiver's "
              "peer, the newest that it has offered.")
      .def_prop_ro(
          "error", [](const BatchPeer& self) { return self.error.ok() ? nb::none() : error_object(self.error); },
          nb::sig("def error(self) -> tessera._errors.Error | None"),
          "Why it is not attached, though it was or tried to be, or why it has not taken the version that was sent "
          "last. None: nothing is wrong with it.")
      .def("__repr__", [](const BatchPeer& self) {
        return fmt::format("BatchPeer({}, {}, version {}{}{})", in_quotes(self.job),
                           self.attached ? "attached" : "not attached", self.version, self.error.ok() ? "" : ", ",
                           printable(self.error.message()));
      });
}

}  // namespace

void bind_bus_values(nb::module_& module) {
  bind_tensor_spec(module);
  bind_values(module);
  bind_stats(module);
  bind_peer(module);
}

}  // namespace tessera::python
