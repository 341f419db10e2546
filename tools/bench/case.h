// The cases of `tessera bench`: which tensors go from which layout to which, out of which memory, and how fast that
// should be on any machine, as a share of what the machine itself can do.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/bus.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::bench {

inline constexpr int kSources = 4;       // processes that hold the tensors
inline constexpr int kDestinations = 2;  // processes that receive them

// Threads of a ceiling, and CPUs for all of a benchmark: what a case's many threads do is held against what as many
// CPUs can.
inline constexpr int kCpus = 2;

enum class Memory : uint8_t { kShared, kPrivate };
std::string_view to_string(Memory memory);

// A process that is killed while the other side waits for a transfer.
enum class Victim : uint8_t { kSource, kDestination };
std::string_view to_string(Victim victim);  // "killed-source"

// Tensors that are alike: vectors or matrices.
struct TensorGroup {
  std::string src{};  // layout over kSources ranks
  std::string dst{};  // layout over kDestinations ranks
  Shape shape{};      // of each tensor
  int tensors = 1;
  DType src_dtype = DType::kBF16;
  DType dst_dtype = DType::kBF16;
};

// One transfer to be measured.
struct Case {
  std::string name{};  // "rows-to-columns/8192/shared/digest"
  std::vector<TensorGroup> groups{};
  Memory memory = Memory::kShared;  // of the sources; destinations always write private memory
  DigestMode digest = DigestMode::kOff;
  bool staged = false;  // on both sides: through a copy at each
  // What its rate is compared with: that case's rate; empty: the ceiling, streaming copies for shared memory and
  // process_vm_readv for private memory.
  std::string baseline{};
  std::optional<double> target{};             // share of it to reach
  std::optional<double> register_target_s{};  // seconds in which all tensors should be registered
  bool quick = false;                         // in the short selection too
  bool only_baseline = false;                 // not asked for: measured because others are compared with it
};

// Every case; the large ones have sources that hold `bytes` in all. A baseline precedes those that name it.
std::vector<Case> all_cases(int64_t bytes);

// Those of `cases` that are `wanted`, and their baselines, in the order given.
std::vector<Case> select_cases(std::vector<Case> cases, const std::function<bool(const Case&)>& wanted);

}  // namespace tessera::bench
