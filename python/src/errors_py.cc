// Turns errors of the core into the exception classes of tessera._errors.
#include <nanobind/stl/string.h>

#include <array>
#include <string>
#include <string_view>

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
    const nb::str message = str_of(error.what());
    PyErr_SetObject(g_classes.at(static_cast<size_t>(error.code())), message.ptr());
  }
}

}  // namespace

nb::str str_of(std::string_view bytes) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace"));
}

nb::object error_object(const Status& status) {
  return nb::borrow(g_classes.at(static_cast<size_t>(status.code())))(str_of(status.message()));
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
