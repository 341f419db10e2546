// Writes the seeds into the corpus: fuzz_seeds FOLDER. scripts/fuzz.sh --seeds runs it.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>

#include "fuzz/seeds.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: fuzz_seeds FOLDER\n", stderr);
    return 2;
  }
  try {
    for (const tessera::fuzz::Seed& seed : tessera::fuzz::seeds()) {
      const std::filesystem::path folder = std::filesystem::path(argv[1]) / seed.target;
      std::filesystem::create_directories(folder);
      std::ofstream file(folder / seed.name, std::ios::binary);
      file.exceptions(std::ios::failbit | std::ios::badbit);
      file << seed.bytes;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_seeds: %s\n", error.what());
    return 1;
  }
  return 0;
}
