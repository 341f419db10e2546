// One fuzz target for each reader of untrusted bytes: libFuzzer drives each in a separate executable (the `fuzz`
// preset, scripts/fuzz.sh), and fuzz_test replays the committed corpora in every build.
//
// A reader must do more than not crash: it throws only tessera::Error, with a message of limited length; what it
// accepts is the same after writing and reading it again; its output is in proportion to its input. A broken promise
// aborts (TESSERA_CHECK).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "base/bytes.h"

namespace tessera::fuzz {

using Input = std::span<const std::byte>;

// Each returns whether the reader took the input.
bool layout(Input input);       // "LAYOUT\nSHAPE"
bool safetensors(Input input);  // 'h', u64 twice the bytes of data, a header; or 'i', an index
bool bus(Input input);          // a stream of frames between agents
bool store(Input input);        // a stream of frames between a store's client and its server, both directions
bool records(Input input);      // a letter for the kind, then the value of one of the bus's keys in the store
bool memory(Input input);       // 'a', keys of shm and ranges; 'r', what a hostile peer writes into a bounce ring
bool command(Input input);      // 'o', the memory of a command queue; 'r', what a hostile peer writes into its rings
bool schedule(Input input);  // 'f', the log of a rank's schedule; 'b', the blocks of several ranks' logs, a string each
bool group(Input input);     // 'b', a bootstrap's blob; 'f', frames of a group; 'p', a hostile peer's page
bool text(Input input);      // a letter for the kind, then what a user writes on the command line or sends over HTTP

struct Target {
  std::string_view name;  // also the name of the folder in fuzz/corpus/
  bool (*run)(Input input);
};
inline constexpr Target kTargets[] = {
    {"layout", layout}, {"safetensors", safetensors}, {"bus", bus},           {"store", store}, {"records", records},
    {"memory", memory}, {"command", command},         {"schedule", schedule}, {"group", group}, {"text", text},
};

// Calls `read`; false if it throws an Error. The message must have a limited length, since it goes to logs and to the
// peer.
template <typename Read>
bool accepts(Read read, size_t most_text = 16 << 10) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    TESSERA_CHECK_LE(std::string_view(error.what()).size(), most_text);
    return false;
  }
}

inline std::string_view as_text(Input input) {
  return {reinterpret_cast<const char*>(input.data()), input.size()};
}

// A message must be written as it was read, from the second time on (the first may normalise it).
template <typename Message, typename Read, typename Write>
void expect_round_trip(const Message& message, Read read, Write write) {
  const auto written = write(message);
  const auto again = write(read(written));
  TESSERA_CHECK(written == again);
}

}  // namespace tessera::fuzz
