// Who this process is in its job, as its launcher tells it through the environment.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

using Environment = std::function<const char*(const char*)>;  // getenv

// The variables that hold a process's rank and its job's world size.
struct Launcher {
  std::string_view name;
  std::string_view rank;
  std::string_view world;
};
// In order of precedence: TESSERA_*, torchrun, MPI (Open MPI, then PMI), Slurm.
std::span<const Launcher> launchers();

// A number from the environment.
struct Said {
  int value = 0;
  std::string variable;
  const Launcher* launcher = nullptr;
};

// Rank and world size of this process as the environment sets them; none where it does not.
struct Launch {
  std::optional<Said> rank;
  std::optional<Said> world;
};

// Values that arguments already give.
struct Given {
  bool rank = false;
  bool world = false;
};

// Each value comes from the first launcher that sets it. A launcher counts only if it sets all values that are still
// open (Slurm's SLURM_NTASKS is also set in a shell that has started no task); TESSERA_* count one by one. Throws
// Error(kInvalidArgument), which names the variable, if a rank is not a number of at least 0 or a world size not one of
// at least 1.
Launch launched(const Environment& environment, Given given = {});

// Which process of its job this is.
struct Place {
  int rank = 0;
  int world = 1;
};

// The rank and the world size, each from the first source that has it: the arguments, the environment, `group` (an
// existing process group). Without any source, the process is a job by itself, rank 0 of 1. Throws
// Error(kInvalidArgument), which names the source.
Place own_place(std::optional<int> rank, std::optional<int> world, const Environment& environment,
                std::optional<Place> group = std::nullopt);

}  // namespace tessera
