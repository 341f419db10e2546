// Options that `tessera send` and `tessera recv` share: who this process is, and which job it joins.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/launch.h"
#include "tessera/bus.h"

namespace CLI {
class App;
}

namespace tessera::tools {

// The command moves one batch for each pair; both sides give it this id.
inline constexpr char kBatchId[] = "checkpoint";

struct JobOptions {
  std::string store;
  std::string name_space;
  std::string job;
  std::string agent;
  std::string peer;
  std::string pair = "weights";
  std::optional<int> rank;
  std::optional<int> world;
  std::optional<double> timeout_s;
  int threads = 0;
  std::string digest = "full";
  bool no_digest = false;
  bool pinned = false;
  bool delta = false;
  bool json = false;
  std::vector<std::string> layouts;
  std::vector<std::string> wires;

  void declare(CLI::App& command);

  // Each checks the options that it uses and throws Error(kInvalidArgument).
  BusOptions bus() const;
  PairOptions pair_options() const;
  Timeout rendezvous_timeout() const;
  Timeout transfer_timeout() const;
};

}  // namespace tessera::tools
