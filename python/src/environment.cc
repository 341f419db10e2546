// What the environment says: Tessera's variables, and who this process is.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdlib>

#include "base/config.h"
#include "base/launch.h"
#include "bindings.h"

namespace tessera::python {

void bind_environment(nb::module_& module) {
  module.def(
      "environment_variables",
      [] {
        nb::list rows;
        for (const EnvironmentVariable& variable : environment_variables())
          rows.append(nb::make_tuple(std::string(variable.name), std::string(variable.default_value),
                                     std::string(variable.meaning)));
        return rows;
      },
      nb::sig("def environment_variables() -> list[tuple[str, str, str]]"),
      "(name, default, meaning) of every environment variable that Tessera reads.");
  const auto said = [](std::optional<Said> (*find)(const Environment&)) {
    return [find]() -> std::optional<std::pair<int, std::string>> {
      const std::optional<Said> found = find(::getenv);
      if (!found) return std::nullopt;
      return std::pair(found->value, found->variable);
    };
  };
  module.def("launched_rank", said(launched_rank),
             "(rank, variable that says it) of this process, from the first of TESSERA_*, torchrun, MPI and Slurm.");
  module.def("launched_world", said(launched_world), "(world size, variable that says it), likewise.");
}

}  // namespace tessera::python
