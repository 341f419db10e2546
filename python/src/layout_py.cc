// Mesh, the placements and Layout: values.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "base/escape.h"
#include "base/fail.h"
#include "bindings.h"
#include "given.h"

namespace tessera::python {
namespace {

constexpr const char* kWhole = "a whole number";
constexpr const char* kWholes = "whole numbers";
constexpr const char* kText = "a str";

nb::object foreign(const char* function, nb::handle object) {
  return nb::module_::import_("tessera._tensors.foreign").attr(function)(object);
}

Mesh make_mesh(const std::vector<int>& shape, const std::optional<std::vector<std::string>>& names,
               const std::optional<std::vector<Rank>>& ranks) {
  if (names && names->size() != shape.size())
    fail(ErrorCode::kInvalidArgument, "mesh of {} axes: {} names are given"_message, shape.size(), names->size());
  std::vector<Axis> axes;
  for (size_t i = 0; i < shape.size(); ++i) axes.push_back({.name = names ? (*names)[i] : "", .size = shape[i]});
  return ranks ? Mesh(std::move(axes), *ranks) : Mesh(std::move(axes));
}

std::vector<int> shape_of(const Mesh& mesh) {
  std::vector<int> shape;
  for (const Axis& axis : mesh.axes()) shape.push_back(axis.size);
  return shape;
}

std::vector<std::string> names_of(const Mesh& mesh) {
  std::vector<std::string> names;
  for (const Axis& axis : mesh.axes()) names.push_back(axis.name);
  return names;
}

std::vector<Rank> ranks_of(const Mesh& mesh) {
  return {mesh.ranks().begin(), mesh.ranks().end()};
}

// The axes and ranks as in a Layout's text form.
std::string mesh_text(const Mesh& mesh) {
  const std::string text =
      Layout(mesh, std::vector<Placement>(static_cast<size_t>(mesh.ndim()), Replicate{})).to_string();
  return text.substr(0, text.rfind(':'));
}

nb::tuple bounds_of(const IntervalSet& set) {
  nb::list bounds;
  for (const Interval& interval : set.intervals()) bounds.append(nb::make_tuple(interval.begin, interval.end));
  return nb::tuple(bounds);
}

std::vector<Placement> placements_from(nb::handle objects) {
  if (nb::isinstance<nb::str>(objects) || !nb::isinstance<nb::iterable>(objects))
    fail(ErrorCode::kInvalidArgument, "placements {}: give a list of them, one for each axis of the mesh"_message,
         shown(objects));
  std::vector<Placement> placements;
  for (const nb::handle object : objects) placements.push_back(placement_from(object));
  return placements;
}

// "Shard(0)"; `arguments` returns the constructor's arguments.
template <typename T, typename Arguments>
std::string call_text(nb::handle self, const Arguments& arguments) {
  std::vector<std::string> words;
  for (const nb::handle argument : arguments(nb::cast<const T&>(self)))
    words.emplace_back(nb::cast<std::string>(nb::repr(argument)));
  return fmt::format("{}({})", nb::cast<std::string>(self.type().attr("__name__")), fmt::join(words, ", "));
}

// Makes a class a value type: ==, hash and pickling.
template <typename T, typename Arguments>
void make_value(nb::class_<T>& type, const Arguments& arguments) {
  type.def(
          "__eq__",
          [](const T& self, nb::handle other) { return nb::isinstance<T>(other) && self == nb::cast<const T&>(other); },
          nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [arguments](nb::handle self) { return nb::hash(nb::cast(call_text<T>(self, arguments))); })
      .def(
          "__reduce__",
          [arguments](nb::handle self) { return nb::make_tuple(self.type(), arguments(nb::cast<const T&>(self))); },
          nb::sig("def __reduce__(self) -> tuple[type, tuple[object, ...]]"));
}

// A value type whose repr is the call that creates it.
template <typename T, typename Arguments>
void make_printed_value(nb::class_<T>& type, const Arguments& arguments) {
  make_value(type, arguments);
  type.def("__repr__", [arguments](nb::handle self) { return call_text<T>(self, arguments); });
}

ReduceOp reduce_op_from(const std::string& name) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct})
    if (to_string(op) == name) return op;
  fail(ErrorCode::kInvalidArgument, "Partial({}): sum, avg, min, max and product are possible"_message,
       in_quotes(name));
}

void bind_placements(nb::module_& module) {
  nb::class_<Replicate> replicate(module, "Replicate", "Every rank along the axis holds the same elements.");
  replicate.def(nb::init<>());
  make_printed_value(replicate, [](const Replicate&) { return nb::make_tuple(); });

  nb::class_<Shard> shard(module, "Shard",
                          "Split along tensor dim `dim` like torch.chunk: ceil(n/k) elements per rank; the last ranks "
                          "may have fewer or none.");
  shard
      .def(
          "__init__", [](Shard* self, Given<int> dim) { new (self) Shard{.dim = dim.as("Shard: dim", kWhole)}; },
          nb::arg("dim").none(), nb::sig("def __init__(self, dim: int) -> None"))
      .def_ro("dim", &Shard::dim);
  make_printed_value(shard, [](const Shard& self) { return nb::make_tuple(self.dim); });
}

void bind_uneven_shards(nb::module_& module) {
  nb::class_<StridedShard> strided(
      module, "StridedShard",
      "DTensor's _StridedShard: the dim is cut into `split_factor` chunks first, each of them along the axis; a rank's "
      "pieces are concatenated. What FSDP2 over tensor parallelism gives.");
  strided
      .def(
          "__init__",
          [](StridedShard* self, Given<int> given_dim, Given<Index> given_factor) {
            const int dim = given_dim.as("StridedShard: dim", kWhole);
            const Index split_factor = given_factor.as("StridedShard: split_factor", kWhole);
            if (split_factor < 1)
              fail(ErrorCode::kInvalidArgument, "StridedShard({}): split_factor {} must be at least 1"_message, dim,
                   split_factor);
            new (self) StridedShard{.dim = dim, .split_factor = split_factor};
          },
          nb::arg("dim").none(), nb::arg("split_factor").none(),
          nb::sig("def __init__(self, dim: int, split_factor: int) -> None"))
      .def_ro("dim", &StridedShard::dim)
      .def_ro("split_factor", &StridedShard::split_factor);
  make_printed_value(strided, [](const StridedShard& self) { return nb::make_tuple(self.dim, self.split_factor); });

  nb::class_<RaggedShard> ragged(module, "RaggedShard",
                                 "Explicit bounds along tensor dim `dim`: k+1 of them for an axis of k ranks, from 0 "
                                 "to the dim's size. Must be the outermost axis on its dim.");
  ragged
      .def(
          "__init__",
          [](RaggedShard* self, Given<int> dim, Given<std::vector<Index>> bounds) {
            new (self) RaggedShard{.dim = dim.as("RaggedShard: dim", kWhole),
                                   .bounds = bounds.as("RaggedShard: bounds", kWholes)};
          },
          nb::arg("dim").none(), nb::arg("bounds").none(),
          nb::sig("def __init__(self, dim: int, bounds: collections.abc.Sequence[int]) -> None"))
      .def_ro("dim", &RaggedShard::dim)
      .def_prop_ro("bounds", [](const RaggedShard& self) { return int_tuple(self.bounds); });
  make_printed_value(ragged, [](const RaggedShard& self) { return nb::make_tuple(self.dim, int_tuple(self.bounds)); });
}

void bind_partial(nb::module_& module) {
  nb::class_<Partial> partial(module, "Partial",
                              "Every rank along the axis holds a term of each element; `reduce_op` (sum, avg, min, max "
                              "or product) makes one value of them. Of a source only.");
  partial
      .def(
          "__init__",
          [](Partial* self, Given<std::string> op) {
            new (self) Partial{.op = reduce_op_from(op.as("Partial: reduce_op", kText))};
          },
          nb::arg("reduce_op").none() = "sum", nb::sig("def __init__(self, reduce_op: str = 'sum') -> None"))
      .def_prop_ro("reduce_op", [](const Partial& self) { return std::string(to_string(self.op)); });
  make_printed_value(partial, [](const Partial& self) { return nb::make_tuple(std::string(to_string(self.op))); });
}

void bind_mesh(nb::module_& module) {
  nb::class_<Mesh> mesh(
      module, "Mesh",
      "An n-d array of distinct ranks, row-major, with optional axis names. A value.\n\n"
      "Mesh((2, 4), names=('dp', 'tp')) numbers the ranks from 0; `ranks` gives other ranks, row-major.");
  mesh.def(
          "__init__",
          [](Mesh* self, Given<std::vector<int>> shape, Given<std::optional<std::vector<std::string>>> names,
             Given<std::optional<std::vector<Rank>>> ranks) {
            new (self) Mesh(make_mesh(shape.as("Mesh: shape", kWholes),
                                      names.as("Mesh: names", "a list of str, one for each axis, or None"),
                                      ranks.as("Mesh: ranks", "a list of whole numbers, or None")));
          },
          nb::arg("shape").none(), nb::arg("names") = nb::none(), nb::arg("ranks") = nb::none(),
          nb::sig(
              "def __init__(self, shape: collections.abc.Sequence[int], names: collections.abc.Sequence[str] | None "
              "= None, ranks: collections.abc.Sequence[int] | None = None) -> None"))
      .def_prop_ro("shape", [](const Mesh& self) { return int_tuple(shape_of(self)); })
      .def_prop_ro("names",
                   [](const Mesh& self) {
                     return nb::typed<nb::tuple, nb::str, nb::ellipsis>(nb::tuple(nb::cast(names_of(self))));
                   })
      .def_prop_ro("ranks", [](const Mesh& self) { return int_tuple(ranks_of(self)); })
      .def_prop_ro("ndim", &Mesh::ndim)
      .def_prop_ro("size", &Mesh::size)
      .def(
          "coordinate",
          [](const Mesh& self, Given<Rank> rank) -> std::optional<IntTuple> {
            const std::optional<int> position = self.position_of(rank.as("rank", kWhole));
            if (!position) return std::nullopt;
            return int_tuple(self.coordinate(*position));
          },
          nb::arg("rank").none(), nb::sig("def coordinate(self, rank: int) -> tuple[int, ...] | None"),
          "The coordinate of `rank` on each axis; None if it is not in the mesh.")
      .def(
          "__contains__",
          [](const Mesh& self, nb::handle object) {
            Rank rank = 0;
            return convert(object, rank) && self.position_of(rank).has_value();
          },
          nb::arg("rank").none(), nb::sig("def __contains__(self, rank: object, /) -> bool"))
      .def("__len__", &Mesh::size);
  make_value(mesh, [](const Mesh& self) {
    return nb::make_tuple(nb::cast(shape_of(self)), nb::cast(names_of(self)), nb::cast(ranks_of(self)));
  });
  mesh.def("__repr__", [](const Mesh& self) { return fmt::format("Mesh({})", mesh_text(self)); });
}

void bind_shapes(nb::class_<Layout>& layout) {
  layout
      .def(
          "bind", [](const Layout& self, Given<Shape> shape) { return self.bind(shape.as("shape", kWholes)); },
          nb::arg("shape").none(), nb::sig("def bind(self, shape: collections.abc.Sequence[int]) -> Layout"),
          "The same layout with negative dims resolved; raises InvalidArgumentError if it does not fit `shape`.")
      .def(
          "local_shape",
          [](const Layout& self, Given<Shape> given, Given<Rank> rank) {
            const Shape shape = given.as("shape", kWholes);
            return int_tuple(self.bind(shape).local_shape(shape, rank.as("rank", kWhole)));
          },
          nb::arg("shape").none(), nb::arg("rank").none(),
          nb::sig("def local_shape(self, shape: collections.abc.Sequence[int], rank: int) -> tuple[int, ...]"),
          "Shape of the local tensor on `rank` of a tensor of global `shape`; zeros for a rank outside the mesh.")
      .def(
          "owned",
          [](const Layout& self, Given<Shape> given, Given<Rank> rank) -> std::optional<nb::list> {
            const Shape shape = given.as("shape", kWholes);
            const Region region = self.bind(shape).owned(shape, rank.as("rank", kWhole));
            if (region.empty()) return std::nullopt;
            nb::list dims;
            for (const IntervalSet& dim : region.dims()) dims.append(bounds_of(dim));
            return dims;
          },
          nb::arg("shape").none(), nb::arg("rank").none(),
          nb::sig("def owned(self, shape: collections.abc.Sequence[int], rank: int) -> "
                  "list[tuple[tuple[int, int], ...]] | None"),
          "The intervals (begin, end) of each dim that `rank` holds, ascending. None if it holds nothing.");
}

void bind_layouts(nb::module_& module) {
  nb::class_<Layout> layout(
      module, "Layout",
      "How a tensor lies on the ranks of a mesh: one placement for each mesh axis, with the semantics of "
      "torch's DTensor. A value.\n\n"
      "Layout('dp=2,tp=4@0-7:R,S1') reads the text form; Layout(mesh, placements) takes Tessera's or "
      "torch's own DeviceMesh and placements.");
  layout
      .def(
          "__init__",
          [](Layout* self, Given<std::string> text) {
            new (self)
                Layout(Layout::parse(text.as("layout", "its text ('dp=2,tp=4:R,S1'), or a mesh and placements")));
          },
          nb::arg("text").none(), nb::sig("def __init__(self, text: str) -> None"))
      .def(
          "__init__",
          [](Layout* self, nb::handle mesh, nb::handle placements) {
            new (self) Layout(mesh_from(mesh), placements_from(placements));
          },
          nb::arg("mesh").none(), nb::arg("placements").none(),
          nb::sig("def __init__(self, mesh: Mesh | object, placements: collections.abc.Iterable[object]) -> None"))
      .def_prop_ro("mesh", &Layout::mesh)
      .def_prop_ro(
          "placements",
          [](const Layout& self) {
            nb::list placements;
            for (const Placement& placement : self.placements()) placements.append(placement_object(placement));
            return nb::tuple(placements);
          },
          nb::sig("def placements(self) -> tuple[Replicate | Shard | StridedShard | RaggedShard | Partial, ...]"))
      .def(
          "shifted", [](const Layout& self, Given<Rank> offset) { return self.shifted(offset.as("offset", kWhole)); },
          nb::arg("offset").none(), nb::sig("def shifted(self, offset: int) -> Layout"),
          "The same layout over ranks that are `offset` higher.")
      .def(
          "with_ranks",
          [](const Layout& self, Given<std::vector<Rank>> ranks) {
            return self.with_ranks(ranks.as("ranks", kWholes));
          },
          nb::arg("ranks").none(), nb::sig("def with_ranks(self, ranks: collections.abc.Sequence[int]) -> Layout"),
          "The same placements; position i of the mesh becomes ranks[i].")
      .def("__str__", &Layout::to_string);
  bind_shapes(layout);
  make_printed_value(layout, [](const Layout& self) { return nb::make_tuple(self.to_string()); });
}

}  // namespace

std::string shown(nb::handle object) noexcept {
  try {
    return nb::cast<std::string>(nb::module_::import_("reprlib").attr("repr")(object));
  } catch (...) {
    return "(which has no repr)";
  }
}

Mesh mesh_from(nb::handle object) {
  Mesh mesh;
  if (nb::try_cast(object, mesh)) return mesh;
  return nb::cast<Mesh>(foreign("mesh", object));
}

Placement placement_from(nb::handle object) {
  for (nb::object known = nb::borrow(object);; known = foreign("placement", object)) {
    if (nb::isinstance<Replicate>(known)) return Replicate{};
    if (nb::isinstance<Shard>(known)) return nb::cast<Shard>(known);
    if (nb::isinstance<StridedShard>(known)) return nb::cast<StridedShard>(known);
    if (nb::isinstance<RaggedShard>(known)) return nb::cast<RaggedShard>(known);
    if (nb::isinstance<Partial>(known)) return nb::cast<Partial>(known);
  }
}

nb::object placement_object(const Placement& placement) {
  return std::visit([](const auto& value) { return nb::cast(value); }, placement);
}

DType dtype_from(nb::handle object) {
  std::string name;
  if (convert(object, name)) return parse_dtype(name);
  return parse_dtype(nb::cast<std::string>(foreign("dtype", object)));
}

Timeout timeout_from(const char* what, std::optional<double> seconds, Timeout fallback) {
  constexpr double kMaxSeconds = 30.0 * 24 * 3600;
  if (!seconds) return fallback;
  if (!(*seconds >= 0) || *seconds > kMaxSeconds)
    fail(ErrorCode::kInvalidArgument, "{} {}: give seconds, 0 to {}"_message, what, *seconds, kMaxSeconds);
  return std::chrono::duration_cast<Timeout>(std::chrono::duration<double>(*seconds));
}

void bind_slices(nb::module_& module) {
  module.def(
      "sliced_layout",
      [](const Layout& layout, const Shape& shape, const std::vector<SliceTuple>& slices) {
        return sliced_layout(layout, shape, slices_from(slices));
      },
      nb::arg("layout"), nb::arg("shape"), nb::arg("slices"),
      "The layout of a slice as a tensor of its own. `slices` has (begin, end, step, whether the dim is dropped) for "
      "each dim.");
  module.def(
      "local_slices",
      [](const Layout& layout, const Shape& shape, const std::vector<SliceTuple>& slices, Rank rank) {
        return tuples_of(local_slices(layout.bind(shape), shape, slices_from(slices), rank));
      },
      nb::arg("layout"), nb::arg("shape"), nb::arg("slices"), nb::arg("rank"),
      "The part of that slice that is in the local tensor of `rank`, as slices of the local tensor.");
}

void bind_layout(nb::module_& module) {
  bind_placements(module);
  bind_uneven_shards(module);
  bind_partial(module);
  bind_mesh(module);
  bind_layouts(module);
  bind_slices(module);
}

}  // namespace tessera::python
