// Options that `tessera send` and `tessera recv` share: who this process is and whom it meets.
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

// One batch a pair is all that the command moves; both sides call it this.
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
  bool no_digest = false;
  bool pinned = false;
  bool delta = false;
  bool json = false;
  std::vector<std::string> layouts;
  std::vector<std::string> wires;

  void declare(CLI::App& command);

  // Each checks what it uses and throws Error(kInvalidArgument).
  BusOptions bus() const;
  PairOptions pair_options() const;
  Timeout rendezvous_timeout() const;
  Timeout transfer_timeout() const;
};

}  // namespace tessera::tools
