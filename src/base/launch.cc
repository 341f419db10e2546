#include "base/launch.h"

#include <array>
#include <charconv>
#include <utility>

#include "base/escape.h"
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
    fail(ErrorCode::kInvalidArgument, "{} is {}, not a number from {} up"_message, name, in_quotes(text), least);
  return Said{.value = value, .variable = name, .launcher = &launcher};
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

Place own_place(std::optional<int> rank, std::optional<int> world, const Environment& environment,
                std::optional<Place> group) {
  const Launch said = launched(environment, {.rank = rank.has_value(), .world = world.has_value()});
  struct Number {
    int value;
    std::string source;
  };
  const auto first = [&](std::optional<int> given, const std::optional<Said>& by_launcher, int Place::* member) {
    if (given) return Number{*given, "the arguments"};
    if (by_launcher) return Number{by_launcher->value, by_launcher->variable};
    return group ? Number{(*group).*member, "torch's default process group"} : Number{Place().*member, "nobody"};
  };
  const Number own_rank = first(rank, said.rank, &Place::rank);
  const Number own_world = first(world, said.world, &Place::world);
  if (own_world.value < 1 || own_rank.value < 0 || own_rank.value >= own_world.value)
    fail(ErrorCode::kInvalidArgument,
         "rank {} of world {} (rank from {}, world from {}): ranks go from 0 to world - 1"_message, own_rank.value,
         own_world.value, own_rank.source, own_world.source);
  return {.rank = own_rank.value, .world = own_world.value};
}

}  // namespace tessera
