// The identity of this process, from the environment, and its metrics.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdlib>

#include "base/launch.h"
#include "base/metrics.h"
#include "bindings.h"

namespace tessera::python {

void bind_environment(nb::module_& module) {
  module.def(
      "launch",
      [](std::optional<int> rank, std::optional<int> world, std::optional<std::pair<int, int>> group) {
        const auto there = group ? std::optional(Place{.rank = group->first, .world = group->second}) : std::nullopt;
        const Place own = own_place(rank, world, ::getenv, there);
        return std::pair(own.rank, own.world);
      },
      nb::arg("rank").none(), nb::arg("world").none(), nb::arg("group").none(),
      "(rank, world size) of this process: what is given, else what the first of TESSERA_*, torchrun, MPI and Slurm "
      "says that says both, else those of `group`, else (0, 1).");
  module.def(
      "metrics", [] { return Metrics::process().exposition(); },
      "What this process serves at /metrics, where it is asked to.");
}

}  // namespace tessera::python
