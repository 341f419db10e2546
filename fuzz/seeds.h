// Inputs that the project's own writers produce: starting points for a fuzzer, which readers must accept.
#pragma once

#include <string>
#include <vector>

namespace tessera::fuzz {

struct Seed {
  std::string target;
  std::string name;   // also the file's name in fuzz/corpus/TARGET/: "seed-take"
  std::string bytes;  // the same at every call
};

std::vector<Seed> seeds();

}  // namespace tessera::fuzz
