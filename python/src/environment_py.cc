// Who this process is, as the environment says.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdlib>

#include "base/launch.h"
#include "bindings.h"

namespace tessera::python {

void bind_environment(nb::module_& module) {
  module.def(
      "launched",
      [](bool rank_given, bool world_given) {
        using Pair = std::optional<std::pair<int, std::string>>;
        const auto pair = [](const std::optional<Said>& said) {
          return said ? Pair({said->value, said->variable}) : std::nullopt;
        };
        const Launch said = launched(::getenv, {.rank = rank_given, .world = world_given});
        return std::pair(pair(said.rank), pair(said.world));
      },
      nb::kw_only(), nb::arg("rank_given"), nb::arg("world_given"),
      "(rank, variable that says it), (world size, its variable) of this process, from the first of TESSERA_*, "
      "torchrun, MPI and Slurm that says both; of what is given, None.");
}

}  // namespace tessera::python
