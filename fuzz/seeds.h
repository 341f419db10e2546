// Inputs that the project's own writers produce: where a fuzzer begins, and what a reader must take.
#pragma once

#include <string>
#include <vector>

namespace tessera::fuzz {

struct Seed {
  std::string target;
  std::string name;   // the file's in fuzz/corpus/TARGET/, "seed-take"
  std::string bytes;  // the same at every call
};

std::vector<Seed> seeds();

}  // namespace tessera::fuzz
