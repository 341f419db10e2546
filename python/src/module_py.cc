// tessera._core: the C++ library for Python. Thin: the Pythonic part is in python/tessera.
#include "bindings.h"
#include "tessera/version.h"

NB_MODULE(_core, module) {
  // A module's globals may hold values until the interpreter ends, which is not a leak; only tests enable the warnings.
  nanobind::set_leak_warnings(false);
  module.def("report_leaks", &nanobind::set_leak_warnings, nanobind::arg("on"),
             "Whether nanobind reports values that are still alive when the interpreter ends.");
  module.doc() = "The C++ core of Tessera. Use it through the package `tessera`.";
  module.attr("version") = tessera::kVersion;
  tessera::python::bind_errors(module);
  tessera::python::bind_layout(module);
  tessera::python::bind_plan(module);
  tessera::python::bind_codec(module);
  tessera::python::bind_memory(module);
  tessera::python::bind_quantize(module);
  tessera::python::bind_amax(module);
  tessera::python::bind_tensor_watch(module);
  tessera::python::bind_bus_values(module);
  tessera::python::bind_bus(module);
  tessera::python::bind_checkpoint(module);
  tessera::python::bind_environment(module);
  tessera::python::bind_etp_group(module);
  tessera::python::bind_etp_norms(module);
  tessera::python::bind_etp_report(module);
  tessera::python::bind_etp_runtime(module);
}
