// Quantises and dequantises stacks of matrices, by address: Python allocates.
#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/fail.h"
#include "bindings.h"
#include "choice.h"
#include "matrix_stack.h"
#include "planes.h"
#include "tessera/quantize.h"

namespace tessera::python {
namespace {

constexpr Choice<NvScaling> kScalings[] = {{"1x16", NvScaling::k1x16}, {"16x16", NvScaling::k16x16}};
constexpr Choice<Rounding> kRoundings[] = {{"nearest", Rounding::kNearest}, {"stochastic", Rounding::kStochastic}};
constexpr Choice<Nonfinite> kNonfinites[] = {{"error", Nonfinite::kError}, {"propagate", Nonfinite::kPropagate}};

nb::tuple arguments_of(const QuantSpec& spec) {
  return nb::make_tuple(std::string(to_string(spec.format)), name_of(spec.scaling, kScalings), spec.hadamard,
                        name_of(spec.rounding, kRoundings), spec.seed, spec.eps, spec.power_of_two, spec.margin,
                        name_of(spec.nonfinite, kNonfinites));
}

// (dtype, rows, columns) of an array; two four-bit codes are one u8.
using ArrayShape = std::tuple<std::string, Index, Index>;

std::tuple<ArrayShape, ArrayShape, ArrayShape> plane_arrays(const QuantSpec& spec, const std::string& plane, Index rows,
                                                            Index columns) {
  const PlaneShape shape = plane_shape(spec, plane_from(plane), rows, columns);
  const std::string codes(to_string(shape.code_dtype == DType::kF4 ? DType::kU8 : shape.code_dtype));
  const std::string scales(to_string(shape.scale_dtype == DType::kF32 ? DType::kF32 : DType::kU8));
  return {{codes, shape.code_rows, shape.code_row_bytes()},
          {scales, shape.scale_rows, shape.scale_columns},
          {scales, shape.gemm_rows, shape.gemm_columns}};
}

// The total bytes; then, by plane, where codes, scales and amaxes are.
std::pair<int64_t, std::map<std::string, std::tuple<int64_t, int64_t, int64_t>>> places_of(
    const QuantSpec& spec, const std::vector<std::string>& names, Index matrices, Index rows, Index columns) {
  const QuantizedLayout layout = quantized_layout(spec, plane_set(names), matrices, rows, columns);
  std::map<std::string, std::tuple<int64_t, int64_t, int64_t>> places;
  for (const auto& [name, place] : {std::pair("row", layout.row), std::pair("column", layout.column)})
    if (place) places.emplace(name, std::tuple(place->codes, place->scales, place->amaxes));
  return {layout.bytes, std::move(places)};
}

void bind_spec(nb::module_& module) {
  nb::class_<QuantSpec>(module, "QuantSpec",
                        "A quantised format and its options. Raises InvalidArgumentError if they do not go together.")
      .def(
          "__init__",
          [](QuantSpec* self, const std::string& format, const std::string& scaling, bool hadamard,
             const std::string& rounding, uint64_t seed, float eps, std::optional<bool> power_of_two, int margin,
             const std::string& nonfinite) {
            const QuantSpec spec{.format = parse_format(format),
                                 .scaling = chosen("scaling", scaling, kScalings),
                                 .hadamard = hadamard,
                                 .rounding = chosen("rounding", rounding, kRoundings),
                                 .seed = seed,
                                 .eps = eps,
                                 .power_of_two = power_of_two,
                                 .margin = margin,
                                 .nonfinite = chosen("nonfinite", nonfinite, kNonfinites)};
            check_spec(spec);
            new (self) QuantSpec(spec);
          },
          nb::arg("format"), nb::arg("scaling") = "16x16", nb::arg("hadamard") = false, nb::arg("rounding") = "nearest",
          nb::arg("seed") = 0, nb::arg("eps") = 0.0F, nb::arg("power_of_two") = nb::none(), nb::arg("margin") = 0,
          nb::arg("nonfinite") = "error")
      .def_prop_ro("format", [](const QuantSpec& self) { return std::string(to_string(self.format)); })
      .def_prop_ro("scaling", [](const QuantSpec& self) { return name_of(self.scaling, kScalings); })
      .def_ro("hadamard", &QuantSpec::hadamard)
      .def_prop_ro("needs_amax", [](const QuantSpec& self) { return needs_amax(self.format); })
      .def("plane_arrays", plane_arrays, nb::arg("plane"), nb::arg("rows"), nb::arg("columns"),
           "(dtype, rows, columns) of the codes, the scales and gemm_scales() of a matrix.")
      .def("places", places_of, nb::arg("planes"), nb::arg("matrices"), nb::arg("rows"), nb::arg("columns"),
           "The bytes that `planes` of a stack take in one block of memory, and the offsets of each plane's codes, "
           "scales and amaxes.")
      .def(
          "__reduce__",
          [](nb::handle self) { return nb::make_tuple(self.type(), arguments_of(nb::cast<const QuantSpec&>(self))); },
          nb::sig("def __reduce__(self) -> tuple[type, tuple[object, ...]]"));
  module.def(
      "formats",
      [] {
        std::vector<std::string> names;
        for (const Format format : all_formats()) names.emplace_back(to_string(format));
        return names;
      },
      "The names of all quantised formats.");
}

// --- planes, packed one matrix after another

struct PlaneAddresses {
  std::byte* codes;
  std::byte* scales;
  std::vector<float> amax;  // of each matrix; empty if the format needs none

  PlaneAddresses(uintptr_t codes_at, uintptr_t scales_at, std::vector<float> amaxes)
      : codes(reinterpret_cast<std::byte*>(codes_at)),
        scales(reinterpret_cast<std::byte*>(scales_at)),
        amax(std::move(amaxes)) {}

  float amax_of(size_t i) const { return amax.empty() ? 0 : amax.at(i); }
  PlaneMemory memory(const PlaneShape& shape, size_t i) const {
    return {.codes = codes + static_cast<Index>(i) * shape.code_bytes(),
            .code_stride = shape.code_row_bytes(),
            .scales = scales + static_cast<Index>(i) * shape.scale_bytes(),
            .scale_stride = shape.scale_row_bytes()};
  }
};

// Throws an error for the whole stack if it holds NaN or infinity, otherwise the error with the matrix's index.
[[noreturn]] void fail_at(const MatrixStack& stack, const QuantSpec& spec, size_t i, const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const std::vector<Amax> found =
        spec.nonfinite == Nonfinite::kError ? compute_amax(stack.matrices(), kAllCpus) : std::vector<Amax>{};
    int64_t nonfinite = 0;
    for (const Amax& amax : found) nonfinite += amax.nonfinite;
    const auto bad = std::ranges::find_if(found, [](const Amax& amax) { return amax.nonfinite > 0; });
    if (bad != found.end()) {
      std::vector<Index> index = stack.position(static_cast<size_t>(bad - found.begin()));
      index.push_back(bad->first_nonfinite / stack.columns());
      index.push_back(bad->first_nonfinite % stack.columns());
      fail(
          ErrorCode::kInvalidArgument,
          "{} of {} elements are NaN or infinite, the first at [{}]: fix the tensor, or pass nonfinite='propagate'"_message,
          nonfinite, static_cast<Index>(stack.size()) * stack.elements(), fmt::join(index, ", "));
    }
    if (stack.dims() == 0) throw;
    fail(error.code(), "matrix [{}] of the stack: {}"_message, fmt::join(stack.position(i), ", "), error.what());
  }
}

void quantize_stack(const MatrixStack& stack, const QuantSpec& spec, const PlaneAddresses* row,
                    const PlaneAddresses* column) {
  const nb::gil_scoped_release released;
  const auto shape_of = [&](const PlaneAddresses* plane, Plane which) {
    return plane == nullptr ? PlaneShape{} : plane_shape(spec, which, stack.rows(), stack.columns());
  };
  const PlaneShape row_shape = shape_of(row, Plane::kRow);
  const PlaneShape column_shape = shape_of(column, Plane::kColumn);
  const auto quantize_one = [&](size_t i, Parallel parallel) {
    Planes planes;
    PlaneAmax amax;
    if (row != nullptr) {
      planes.row = row->memory(row_shape, i);
      amax.row = row->amax_of(i);
    }
    if (column != nullptr) {
      planes.column = column->memory(column_shape, i);
      amax.column = column->amax_of(i);
    }
    quantize(stack[i], spec, amax, planes, parallel, {.first_element = static_cast<Index>(i) * stack.elements()});
  };
  for_each_matrix(stack.size(), stack.bytes(), quantize_one,
                  [&](size_t i, const std::exception_ptr& error) { fail_at(stack, spec, i, error); });
}

void dequantize_stack(const QuantSpec& spec, const std::string& plane, size_t n, Index rows, Index columns,
                      const PlaneAddresses& from, uintptr_t to, const std::string& dtype) {
  const nb::gil_scoped_release released;
  const Plane which = plane_from(plane);
  const PlaneShape shape = plane_shape(spec, which, rows, columns);
  const DType type = parse_dtype(dtype);
  const Index bytes = bytes_of(type, rows * columns);
  const auto dequantize_one = [&](size_t i, Parallel parallel) {
    const PlaneMemory memory = from.memory(shape, i);
    dequantize(spec, which, {memory.codes, memory.code_stride, memory.scales, memory.scale_stride}, from.amax_of(i),
               {.data = reinterpret_cast<std::byte*>(to) + static_cast<Index>(i) * bytes,
                .dtype = type,
                .rows = rows,
                .columns = columns,
                .row_stride = columns},
               parallel);
  };
  for_each_matrix(n, n * static_cast<size_t>(bytes), dequantize_one, rethrow);
}

void gemm_scales_of_stack(const QuantSpec& spec, const std::string& plane, size_t n, Index rows, Index columns,
                          const PlaneAddresses& from, uintptr_t to) {
  const nb::gil_scoped_release released;
  const Plane which = plane_from(plane);
  const PlaneShape shape = plane_shape(spec, which, rows, columns);
  for (size_t i = 0; i < n; ++i) {
    const PlaneMemory memory = from.memory(shape, i);
    gemm_scales(spec, which, rows, columns, memory.scales, memory.scale_stride,
                reinterpret_cast<std::byte*>(to) + static_cast<Index>(i) * shape.gemm_bytes());
  }
}

void bind_planes(nb::module_& module) {
  nb::class_<PlaneAddresses>(module, "PlaneAddresses",
                             "The addresses of a plane's packed codes and scales, and the amax of each matrix if the "
                             "format has one.")
      .def(nb::init<uintptr_t, uintptr_t, std::vector<float>>(), nb::arg("codes"), nb::arg("scales"), nb::arg("amax"));
  module.def("quantize", quantize_stack, nb::arg("stack"), nb::arg("spec"), nb::arg("row").none(),
             nb::arg("column").none(), "Quantises to one plane or both.");
  module.def("dequantize", dequantize_stack, nb::arg("spec"), nb::arg("plane"), nb::arg("n"), nb::arg("rows"),
             nb::arg("columns"), nb::arg("addresses"), nb::arg("to"), nb::arg("dtype"),
             "Dequantises n packed matrices to the address `to`.");
  module.def("gemm_scales", gemm_scales_of_stack, nb::arg("spec"), nb::arg("plane"), nb::arg("n"), nb::arg("rows"),
             nb::arg("columns"), nb::arg("addresses"), nb::arg("to"),
             "Writes the scales of n packed matrices to `to`, in the order that GEMM kernels read.");
}

}  // namespace

void bind_quantize(nb::module_& module) {
  nb::class_<MatrixStack>(module, "MatrixStack", "Matrices [..., M, K] in memory, dense along the last dim.")
      .def(
          "__init__",
          [](MatrixStack* self, uintptr_t address, const std::string& dtype, Shape shape, std::vector<Index> strides,
             nb::handle) { new (self) MatrixStack(address, dtype, std::move(shape), std::move(strides)); },
          nb::arg("address"), nb::arg("dtype"), nb::arg("shape"), nb::arg("strides"), nb::arg("memory"),
          nb::keep_alive<1, 6>(), "`memory` is kept alive as long as the stack.");
  bind_spec(module);
  bind_planes(module);
}

}  // namespace tessera::python
