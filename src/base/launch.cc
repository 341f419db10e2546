#include "base/launch.h"

#include <array>
#include <charconv>

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

std::optional<Said> first(std::string_view Launcher::* variable, int least, const Environment& environment) {
  for (const Launcher& launcher : kLaunchers) {
    const std::string name(launcher.*variable);
    const char* set = environment(name.c_str());
    if (set == nullptr || *set == '\0') continue;
    const std::string_view text = set;
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least)
      fail(ErrorCode::kInvalidArgument, "{} is {:?}, not a number from {} up", name, text, least);
    return Said{.value = value, .variable = name, .launcher = &launcher};
  }
  return std::nullopt;
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

std::optional<Said> launched_rank(const Environment& environment) {
  return first(&Launcher::rank, 0, environment);
}

std::optional<Said> launched_world(const Environment& environment) {
  return first(&Launcher::world, 1, environment);
}

std::string rank_variables() {
  return listed(&Launcher::rank);
}

std::string world_variables() {
  return listed(&Launcher::world);
}

}  // namespace tessera
