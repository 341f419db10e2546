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

// Which process of its job this is.
struct Place {
  int rank = 0;
  int world = 1;
};

// The rank and the world, each from the first that says it: the arguments, the environment, `group` (a process group
// that there is already). A process of which nobody says it is a job of its own, rank 0 of 1. Throws
// Error(kInvalidArgument) that names who says it.
Place own_place(std::optional<int> rank, std::optional<int> world, const Environment& environment,
                std::optional<Place> group = std::nullopt);

}  // namespace tessera
