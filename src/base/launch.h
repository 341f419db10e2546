// Who this process is in its job, as its launcher tells it through the environment.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

using Environment = std::function<const char*(const char*)>;  // getenv

// Variables that say a process' rank and its job's world size.
struct Launcher {
  std::string_view name;
  std::string_view rank;
  std::string_view world;
};
// In order of precedence: TESSERA_*, torchrun, MPI (Open MPI, then what PMI sets), Slurm.
std::span<const Launcher> launchers();

// A number that the environment says.
struct Said {
  int value = 0;
  std::string variable;
  const Launcher* launcher = nullptr;
};

// What the environment says of this process; nothing where nobody says it.
struct Launch {
  std::optional<Said> rank;
  std::optional<Said> world;
};

// What need not be asked for, since arguments say it.
struct Given {
  bool rank = false;
  bool world = false;
};

// Each from the first launcher that says it. One that leaves open what neither `given` nor a launcher before it says is
// passed over, but for TESSERA_*: Slurm's SLURM_NTASKS stands also in a shell that has started no task.
// Throws Error(kInvalidArgument) that names the variable if what it says is no number from 0 (a rank), or 1 (a world),
// up.
Launch launched(const Environment& environment, Given given = {});

std::string rank_variables();   // "TESSERA_RANK, RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID"
std::string world_variables();  // likewise

}  // namespace tessera
