// Two jobs whose tensors travel quantised, and the expected result: what the codec computes from the whole tensor, bit
// for bit.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/mutation.h"
#include "tests/support/jobs.h"
#include "tests/support/random_case.h"

namespace tessera::test {

inline constexpr int kWrong = 3;  // exit status of a receiver that has found a wrong element

enum class Asks { kSender, kReceiver, kBoth };

struct WireJobs {
  int sources;
  int destinations;
  Asks asks = Asks::kBoth;
  Mode sends = Mode::kInPlace;
  Mode receives = Mode::kInPlace;
  const char* pull = "";       // TESSERA_FORCE_PULL
  bool sender_agents = false;  // daemons
  bool receiver_agents = false;
  int64_t versions = 2;
};

// Runs both jobs, the senders first; the senders make `mistake`.
std::vector<Outcome> transfer_cases(const WireJobs& jobs, const std::vector<RandomCase>& cases,
                                    Mutation mistake = Mutation::kNone);
void expect_all_well(const std::vector<Outcome>& outcomes);

// Calls `body`, and returns or rethrows its result once all that pass the barrier have come as far: a process that has
// ended cannot be asked why.
int until_all_know(Barrier& all, const std::function<int()>& body);

// One of bf16.
RandomCase fixed_case(Format format, const Shape& shape, const std::string& from, const std::string& to);

// A row-major matrix, quantised and back.
std::vector<float> quantised_values(Format format, std::vector<float> values, Index rows, Index columns);

Side quantised(Side side, Format format = Format::kNvfp4);
// Three ranks that send rows of one nvfp4 tensor, and two that receive columns.
inline constexpr int kWireSenders = 3;
Side wire_sender(Rank rank);
Side wire_receiver(Rank rank);
// Whether it holds what a version is after quantisation to side.wire: see fill().
bool holds_quantised(const Side& side, const std::vector<float>& tensor, int64_t version);

}  // namespace tessera::test
