// Arguments of public functions, converted where they are used: an invalid one is an Error that names the argument and
// its value, while nanobind would raise a TypeError that lists signatures.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <concepts>
#include <optional>
#include <string>
#include <vector>

#include "base/fail.h"

namespace tessera::python {

namespace nb = nanobind;

// A short repr() of an object. Never throws.
std::string shown(nb::handle object) noexcept;

inline bool convert(nb::handle object, std::string& text) {
  return nb::try_cast(object, text);  // false for a text with a lone surrogate
}

inline bool convert(nb::handle object, double& number) {
  return !PyBool_Check(object.ptr()) && nb::try_cast(object, number);
}

// From an int or an object with __index__; not from a bool, and not out of range.
template <std::signed_integral T>
bool convert(nb::handle object, T& number) {
  if (PyBool_Check(object.ptr())) return false;
  const nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  if (!index.is_valid()) PyErr_Clear();
  return index.is_valid() && nb::try_cast(index, number);
}

// From any iterable except a str.
template <typename T>
bool convert(nb::handle object, std::vector<T>& values) {
  if (nb::isinstance<nb::str>(object)) return false;
  const nb::object list = nb::steal(PySequence_List(object.ptr()));
  if (!list.is_valid()) {
    PyErr_Clear();
    return false;
  }
  for (const nb::handle each : list)
    if (!convert(each, values.emplace_back())) return false;
  return true;
}

template <typename T>
bool convert(nb::handle object, std::optional<T>& value) {
  return object.is_none() || convert(object, value.emplace());
}

// An argument that should be a T. REQUIRES: the call that it was passed to has not returned.
template <typename T>
struct Given {
  nb::handle object;

  // Throws Error(kInvalidArgument): "WHAT VALUE: give WANTED".
  T as(const char* what, const char* wanted) const {
    T value{};
    if (!convert(object, value))
      fail(ErrorCode::kInvalidArgument, "{} {}: give {}"_message, what, shown(object), wanted);
    return value;
  }
};

}  // namespace tessera::python

namespace nanobind::detail {

// The name of the argument's type; nanobind adds None itself if that is the default.
template <typename T>
struct GivenName {
  static constexpr auto Name = make_caster<T>::Name;
};
template <typename T>
struct GivenName<std::optional<T>> : GivenName<T> {};

template <typename T>
struct type_caster<tessera::python::Given<T>> {
  NB_TYPE_CASTER(tessera::python::Given<T>, GivenName<T>::Name)

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    value = {source};
    return true;
  }
};

}  // namespace nanobind::detail
