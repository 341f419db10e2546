// Turns errors of the core into the exception classes of tessera._errors.
#include <nanobind/stl/string.h>

#include <array>
#include <string>

#include "base/fail.h"
#include "bindings.h"
#include "tessera/error.h"

namespace tessera::python {
namespace {

constexpr auto kCodes = static_cast<size_t>(ErrorCode::kInternal) + 1;

// By code; set by bind_errors(), and kept as long as the interpreter lives.
std::array<PyObject*, kCodes> g_classes{};

void translate(const std::exception_ptr& failure, void*) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    PyErr_SetString(g_classes.at(static_cast<size_t>(error.code())), error.what());
  }
}

}  // namespace

nb::object error_object(const Status& status) {
  return nb::borrow(g_classes.at(static_cast<size_t>(status.code())))(status.message());
}

ErrorCode error_code_named(const std::string& name) {
  for (size_t i = 1; i < kCodes; ++i)
    if (to_string(static_cast<ErrorCode>(i)) == name) return static_cast<ErrorCode>(i);
  fail(ErrorCode::kInvalidArgument, "no error has the code '{}'"_message, name);
}

void bind_errors(nb::module_&) {
  const nb::object base = nb::module_::import_("tessera._errors").attr("Error");
  g_classes.fill(base.ptr());
  for (const nb::handle kind : base.attr("__subclasses__")()) {
    const auto code = nb::cast<std::string>(kind.attr("code"));
    for (size_t i = 0; i < kCodes; ++i)
      if (to_string(static_cast<ErrorCode>(i)) == code) g_classes.at(i) = nb::borrow(kind).release().ptr();
  }
  base.inc_ref();
  nb::register_exception_translator(translate);
}

}  // namespace tessera::python
