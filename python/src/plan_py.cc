// Planning, and the reference executor.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "base/fail.h"
#include "bindings.h"
#include "codec/simd/cast.h"
#include "tessera/plan.h"
#include "tessera/simulate.h"

namespace tessera::python {
namespace {

// A route, with the parts that the plan stores once for all routes.
struct RouteView {
  Rank src;
  std::vector<Rank> dsts;
  std::string kind;
  std::string region;
  int64_t bytes;
};

std::vector<RouteView> routes_of(const Plan& plan) {
  std::vector<RouteView> views;
  views.reserve(plan.routes.size());
  for (const Route& route : plan.routes) {
    const std::span<const Rank> dsts = plan.dsts(route);
    views.push_back({.src = route.src,
                     .dsts = {dsts.begin(), dsts.end()},
                     .kind = std::string(to_string(route.kind)),
                     .region = route.region.to_string(),
                     .bytes = route.bytes});
  }
  return views;
}

nb::dict stats_of(const Plan& plan) {
  const PlanStats& stats = plan.stats;
  nb::dict result;
  result["bytes_delivered"] = stats.bytes_delivered;
  result["bytes_moved"] = stats.bytes_moved;
  result["bytes_lower_bound"] = stats.bytes_lower_bound;
  result["bytes_between_hosts"] = stats.bytes_between_hosts;
  result["max_egress"] = stats.max_egress;
  result["max_egress_lower_bound"] = stats.max_egress_lower_bound;
  result["reduction_bytes"] = stats.reduction_bytes;
  result["routes"] = stats.routes;
  return result;
}

std::string summary(const Plan& plan) {
  return fmt::format("Plan({} {}: {} -> {}, {} routes, {} bytes moved)", to_string_shape(plan.meta.shape),
                     to_string(plan.meta.dtype), plan.src.to_string(), plan.dst.to_string(), plan.routes.size(),
                     plan.stats.bytes_moved);
}

// Computes every destination rank's packed local array from those of the source ranks, cast to `dtype`.
nb::dict simulate_bytes(const Plan& plan, const nb::dict& sources, std::optional<nb::object> dtype) {
  const DType from = plan.meta.dtype;
  const DType to = dtype ? dtype_from(*dtype) : from;
  const CastRow cast = from == to ? nullptr : cast_row(from, to);
  LocalArrays arrays;
  for (const auto& [rank, data] : sources) {
    const auto bytes = nb::cast<nb::bytes>(data);
    auto& array = arrays[nb::cast<Rank>(rank)];
    array.resize(bytes.size());
    std::memcpy(array.data(), bytes.data(), bytes.size());
  }
  LocalArrays moved;
  {
    const nb::gil_scoped_release released;
    moved = simulate(plan, arrays);
    if (cast != nullptr)
      for (auto& [rank, array] : moved) {
        const auto elements = static_cast<int64_t>(array.size()) * 8 / bits_of(from);
        std::vector<std::byte> converted(static_cast<size_t>(bytes_of(to, elements)));
        cast(array.data(), converted.data(), static_cast<size_t>(elements));
        array = std::move(converted);
      }
  }
  nb::dict result;
  for (const auto& [rank, array] : moved) result[nb::cast(rank)] = nb::bytes(array.data(), array.size());
  return result;
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<RouteView>(module, "Route", "One region that one source rank provides.")
      .def_ro("src", &RouteView::src, "The rank that sends the region.")
      .def_ro("dsts", &RouteView::dsts, "The ranks that receive it, ascending.")
      .def_ro("kind", &RouteView::kind, "'local', 'p2p' or 'multicast'.")
      .def_ro("region", &RouteView::region, "In global coordinates: '[0:4,8:12][0:16]'.")
      .def_ro("bytes", &RouteView::bytes, "Bytes of the region, counted once whatever the number of destinations.")
      .def("__repr__", [](const RouteView& self) {
        return fmt::format("Route({} -> {}: {}, {} bytes)", self.src, fmt::join(self.dsts, ","), self.region,
                           self.bytes);
      });
  nb::class_<Plan>(module, "Plan",
                   "Who sends which elements of a tensor to whom, so that every destination element is written once. A "
                   "value; a notebook shows its picture.")
      .def_prop_ro("shape", [](const Plan& self) { return int_tuple(self.meta.shape); })
      .def_prop_ro("dtype", [](const Plan& self) { return std::string(to_string(self.meta.dtype)); })
      .def_ro("src", &Plan::src)
      .def_ro("dst", &Plan::dst)
      .def_prop_ro("routes", routes_of)
      .def_prop_ro("stats", stats_of, nb::sig("def stats(self) -> dict[str, int]"),
                   "Byte totals of the plan. A multicast counts once at its source.")
      .def("egress", &Plan::egress, "(rank, bytes that it sends), ascending by rank.")
      .def("dump", &Plan::dump, "A stable text form, one route per line.")
      .def(
          "explain", [](const Plan& self) { return explain(self); }, "Describes the plan in words and a table.")
      .def("to_json", &Plan::to_json, "The JSON form of docs/formats/plan-json.md.")
      .def("to_svg", &Plan::to_svg, "A picture of the plan, as an SVG document.")
      .def("_repr_html_", &Plan::to_svg)
      .def("__repr__", summary);
  module.def(
      "plan",
      [](const Shape& shape, nb::handle dtype, const Layout& src, const Layout& dst) {
        return redistribute({.shape = shape, .dtype = dtype_from(dtype)}, src, dst);
      },
      nb::arg("shape"), nb::arg("dtype").none(), nb::arg("src"), nb::arg("dst"),
      nb::sig("def plan(shape: collections.abc.Sequence[int], dtype: object, src: Layout, dst: Layout) -> Plan"));
  module.def("simulate_bytes", simulate_bytes, nb::arg("plan"), nb::arg("sources"), nb::arg("dtype") = nb::none(),
             nb::sig("def simulate_bytes(plan: Plan, sources: dict[int, bytes], dtype: object | None = None) -> "
                     "dict[int, bytes]"));
}

}  // namespace tessera::python
