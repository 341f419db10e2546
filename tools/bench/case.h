// The cases of `tessera bench`: which tensors move from which layout to which, from which memory, and how fast that
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

// The number of threads of a ceiling, and of CPUs for the whole benchmark: a case's many threads are compared with what
// this many CPUs can do.
inline constexpr int kCpus = 2;

enum class Memory : uint8_t { kShared, kPrivate };
std::string_view to_string(Memory memory);

// A process that is killed while the other side waits for a transfer.
enum class Victim : uint8_t { kSource, kDestination };
std::string_view to_string(Victim victim);  // "killed-source"

// Tensors of one kind: vectors or matrices.
struct TensorGroup {
  std::string src{};  // layout over kSources ranks
  std::string dst{};  // layout over kDestinations ranks
  Shape shape{};      // of each tensor
  int tensors = 1;
  DType src_dtype = DType::kBF16;
  DType dst_dtype = DType::kBF16;
};

// One transfer to measure.
struct Case {
  std::string name{};  // "rows-to-columns/8192/shared/digest"
  std::vector<TensorGroup> groups{};
  Memory memory = Memory::kShared;  // of the sources; destinations always write private memory
  DigestMode digest = DigestMode::kOff;
  bool staged = false;  // on both sides, with a copy on each
  // The case with whose rate its rate is compared. Empty: it is compared with the ceiling, which is streaming copies
  // for shared memory and process_vm_readv for private memory.
  std::string baseline{};
  // Each transfer is followed by the same one without digests, and compared with that instead.
  bool beside_plain = false;
  std::optional<double> target{};             // share of that rate to reach
  std::optional<double> register_target_s{};  // seconds in which all tensors should be registered
  bool quick = false;                         // also in the short selection
  bool only_baseline = false;                 // not selected: measured because others are compared with it
};

// Every case. In the large ones the sources hold `bytes` in total. A baseline precedes the cases that name it.
std::vector<Case> all_cases(int64_t bytes);

// The `cases` that are `wanted`, and their baselines, in the given order.
std::vector<Case> select_cases(std::vector<Case> cases, const std::function<bool(const Case&)>& wanted);

}  // namespace tessera::bench
