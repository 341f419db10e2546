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

// Rank and world size of this process as the environment sets them; none if nothing does.
struct Launch {
  std::optional<Said> rank;
  std::optional<Said> world;
};

// What need not be asked for, since arguments say it.
struct Given {
  bool rank = false;
  bool world = false;
};

// Each value from the first launcher that sets it. A launcher counts only if it sets all values that are still open
// (Slurm's SLURM_NTASKS is also set in a shell that has started no task); TESSERA_* count one by one.
// Throws Error(kInvalidArgument), which names the variable, if its value is not a number of at least 0 (a rank), or 1
// (a world).
Launch launched(const Environment& environment, Given given = {});

std::string rank_variables();   // "TESSERA_RANK, RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID"
std::string world_variables();  // the same

}  // namespace tessera
