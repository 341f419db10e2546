// Largest magnitudes: of tensors, of the matrices of a stack, and of a tensor's last steps.
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "base/message.h"
#include "bindings.h"
#include "choice.h"
#include "given.h"
#include "matrix_stack.h"

namespace tessera::python {
namespace {

constexpr Choice<AmaxHistory::Algorithm> kAlgorithms[] = {{"max", AmaxHistory::Algorithm::kMax},
                                                          {"most_recent", AmaxHistory::Algorithm::kMostRecent}};

// Splits a row of many elements so that threads can share it.
void add_in_pieces(const MatrixView& view, std::vector<MatrixView>& views) {
  constexpr Index kPiece = Index{1} << 16;
  if (view.rows != 1 || view.columns <= kPiece) {
    views.push_back(view);
    return;
  }
  MatrixView whole = view, rest = view;
  whole.rows = view.columns / kPiece;
  whole.columns = whole.row_stride = kPiece;
  rest.columns = view.columns % kPiece;
  rest.data = static_cast<const std::byte*>(view.data) + bytes_of(view.dtype, view.columns - rest.columns);
  views.push_back(whole);
  views.push_back(rest);
}

std::vector<float> tensor_amaxes(const std::vector<const MatrixStack*>& tensors) {
  const nb::gil_scoped_release released;
  std::vector<MatrixView> views;
  std::vector<size_t> ends;
  for (const MatrixStack* tensor : tensors) {
    for (const MatrixView& view : tensor->matrices()) add_in_pieces(view, views);
    ends.push_back(views.size());
  }
  const std::vector<Amax> found = compute_amax(views, kAllCpus);
  std::vector<float> amaxes;
  size_t at = 0;
  for (const size_t end : ends) {
    float amax = 0;
    for (; at < end; ++at) amax = std::max(amax, found[at].value);
    amaxes.push_back(amax);
  }
  return amaxes;
}

std::vector<float> matrix_amaxes(const MatrixStack& stack, bool hadamard) {
  const nb::gil_scoped_release released;
  std::vector<Amax> found(stack.size());
  if (!hadamard) {
    compute_amax(stack.matrices(), found, kAllCpus);
  } else {
    const auto compute = [&](size_t i, Parallel parallel) { found[i] = compute_hadamard_amax(stack[i], parallel); };
    for_each_matrix(stack.size(), stack.bytes(), compute, rethrow);
  }
  std::vector<float> amaxes;
  for (const Amax& amax : found) amaxes.push_back(amax.value);
  return amaxes;
}

void bind_history(nb::module_& module) {
  nb::class_<AmaxHistory>(
      module, "AmaxHistory",
      "The last amaxes of a tensor, for *delayed* scaling: the scale of a step comes from the amaxes of earlier steps, "
      "so that no extra pass over the tensor is needed. Pass the same history to every quantize() of the tensor.\n\n"
      "Args:\n"
      "    length: The number of amaxes to keep; TransformerEngine's default is 1024.\n"
      "    algorithm: The scale is computed from the largest of them (\"max\") or from the newest (\"most_recent\").\n"
      "    margin: Scales are 2^margin smaller than they could be; -64 to 64.")
      .def(
          "__init__",
          [](AmaxHistory* self, Given<Index> given_length, Given<std::string> given_algorithm,
             Given<int> given_margin) {
            const Index length = given_length.as("AmaxHistory: length", "a whole number");
            const std::string algorithm = given_algorithm.as("AmaxHistory: algorithm", "'max' or 'most_recent'");
            const int margin = given_margin.as("AmaxHistory: margin", "a whole number from -64 to 64");
            if (length < 0)
              fail(ErrorCode::kInvalidArgument, "a history of {} amaxes: give its length, 1 or more"_message, length);
            new (self) AmaxHistory(static_cast<size_t>(length), chosen("algorithm", algorithm, kAlgorithms), margin);
          },
          nb::arg("length").none() = AmaxHistory::kLength, nb::arg("algorithm").none() = "max",
          nb::arg("margin").none() = 0,
          nb::sig("def __init__(self, length: int = 1024, algorithm: str = 'max', margin: int = 0) -> None"))
      .def(
          "push",
          [](AmaxHistory& self, Given<double> amax) { self.push(static_cast<float>(amax.as("amax", "a number"))); },
          nb::arg("amax").none(), nb::sig("def push(self, amax: float) -> None"),
          "Adds the newest amax; drops the oldest if the history is full.")
      .def_prop_ro("amax", &AmaxHistory::amax,
                   "The amax for the next scale; 0, which gives a scale of 1, while the history is empty.")
      .def_prop_ro("values", &AmaxHistory::values, "Newest first.")
      .def_prop_ro("length", &AmaxHistory::length, "How many are kept.")
      .def_prop_ro(
          "algorithm", [](const AmaxHistory& self) { return name_of(self.algorithm(), kAlgorithms); },
          "'max' or 'most_recent'.")
      .def_prop_ro("margin", &AmaxHistory::margin, "Scales are 2^margin smaller than they could be.")
      .def("__getstate__",
           [](const AmaxHistory& self) {
             return std::tuple(self.length(), name_of(self.algorithm(), kAlgorithms), self.margin(), self.values());
           })
      .def("__setstate__",
           [](AmaxHistory& self, const std::tuple<size_t, std::string, int, std::vector<float>>& state) {
             const auto& [length, algorithm, margin, values] = state;
             new (&self) AmaxHistory(length, chosen("algorithm", algorithm, kAlgorithms), margin);
             for (auto value = values.rbegin(); value != values.rend(); ++value) self.push(*value);
           })
      .def("__repr__", [](const AmaxHistory& self) {
        return fmt::format("AmaxHistory(length={}, algorithm='{}', margin={}): {} values, amax {}", self.length(),
                           name_of(self.algorithm(), kAlgorithms), self.margin(), self.values().size(), self.amax());
      });
}

}  // namespace

void bind_amax(nb::module_& module) {
  module.def("tensor_amaxes", tensor_amaxes, nb::arg("tensors"), "The largest magnitude of each tensor.");
  module.def("matrix_amaxes", matrix_amaxes, nb::arg("stack"), nb::arg("hadamard") = false,
             "The largest magnitude of each matrix, after the Hadamard transform if `hadamard`.");
  bind_history(module);
}

}  // namespace tessera::python
