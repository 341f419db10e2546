#include "base/launch.h"

#include <array>
#include <charconv>
#include <utility>

#include "base/fail.h"

namespace tessera {
namespace {

constexpr std::array kLaunchers{
    Launcher{"TESSERA_*", "TESSERA_RANK", "TESSERA_WORLD_SIZE"},
    Launcher{"torchrun", "RANK", "WORLD_SIZE"},
    Launcher{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    Launcher{"MPI (PMI)", "PMI_RANK", "PMI_SIZE"},
    Launcher{"Slurm", "SLURM_PROCID", "SLURM_NTASKS"},
};

std::optional<Said> say(const Launcher& launcher, std::string_view Launcher::* variable, int least,
                        const Environment& environment) {
  const std::string name(launcher.*variable);
  const char* const set = environment(name.c_str());
  if (set == nullptr || *set == '\0') return std::nullopt;
  const std::string_view text = set;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least)
    fail(ErrorCode::kInvalidArgument, "{} is {:?}, not a number from {} up"_message, name, text, least);
  return Said{.value = value, .variable = name, .launcher = &launcher};
}

std::string listed(std::string_view Launcher::* variable) {
  std::string text;
  for (size_t i = 0; i < kLaunchers.size(); ++i) {
    if (i > 0) text += i + 1 == kLaunchers.size() ? " or " : ", ";
    text += kLaunchers[i].*variable;
  }
  return text;
}

}  // namespace

std::span<const Launcher> launchers() {
  return kLaunchers;
}

Launch launched(const Environment& environment, Given given) {
  Launch found;
  for (const Launcher& launcher : kLaunchers) {
    const bool needs_rank = !given.rank && !found.rank;
    const bool needs_world = !given.world && !found.world;
    std::optional<Said> rank, world;
    if (needs_rank) rank = say(launcher, &Launcher::rank, 0, environment);
    if (needs_world) world = say(launcher, &Launcher::world, 1, environment);
    const bool whole = (!needs_rank || rank) && (!needs_world || world);
    if (!whole && &launcher != kLaunchers.begin()) continue;
    if (rank) found.rank = std::move(rank);
    if (world) found.world = std::move(world);
  }
  return found;
}

std::string rank_variables() {
  return listed(&Launcher::rank);
}

std::string world_variables() {
  return listed(&Launcher::world);
}

}  // namespace tessera
