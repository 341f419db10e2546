// A trainer and an inference job with one float matrix: just enough for a test to break.
#pragma once

#include <cstdio>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "peer/report.h"
#include "tessera/bus.h"
#include "tests/support/harness.h"

// Reports a failed check inside a child: prints the line and returns an exit status.
#define REQUIRE_HERE(condition)                                            \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      return 5;                                                            \
    }                                                                      \
  } while (false)

namespace tessera::test {

// The exit status of a child that an Error ends: see ProcessGroup::start.
constexpr int status_of(ErrorCode code) {
  return 10 + static_cast<int>(code);
}
inline constexpr int kPeerLost = status_of(ErrorCode::kPeerLost);
inline constexpr int kMismatch = status_of(ErrorCode::kMismatch);
inline constexpr int kDeadline = status_of(ErrorCode::kDeadlineExceeded);
inline constexpr int kExists = status_of(ErrorCode::kAlreadyExists);
inline constexpr int kCancelled = status_of(ErrorCode::kCancelled);
inline constexpr int kDataLoss = status_of(ErrorCode::kDataLoss);

struct Side {
  std::string job;
  std::string peer;
  Rank rank = 0;
  int world = 1;
  std::string layout;  // of "weight"
  Shape shape{64, 48};
  DType dtype = DType::kF32;
  std::string name = "weight";
  bool sends = false;
  Timeout rendezvous = std::chrono::seconds(60);
  std::string name_space = {};
  DigestMode digest = {};
  BatchOptions options = {};
  std::string agent = {};
  std::optional<Format> wire = {};
  std::vector<std::string> peers = {};  // instead of `peer`
  std::string says = {};  // to its own ranks before it registers, followed by its rank; all must say the same

  std::string who() const { return job + "/" + std::to_string(rank); }
};

// Rows at the trainer's ranks, columns at the inference job's.
Side trainer(Rank rank, int world = 2);
Side inference(Rank rank, int world = 2);
Side with_agent(Side side);  // which has an agent daemon
Side staged(Side side);

// The zeroed local tensor of a side, and its registration.
std::vector<float> local_tensor(const Side& side);
TensorSpec spec_of(const Side& side, float* tensor);
Batch register_tensor(Pair& pair, const Side& side, float* tensor);
// Likewise, once the side's ranks have told each other what they say; throws kInternal if they differ.
Batch gather_and_register(Pair& pair, const Side& side, float* tensor);

inline constexpr Timeout kPatience = std::chrono::seconds(60);  // for what must come, on a machine with other work
inline constexpr Timeout kAttempt = std::chrono::seconds(5);    // for what is tried again if it does not come

// The contents of a version: every element encodes the version and its own index.
void fill(const Side& side, std::span<float> tensor, int64_t version);
bool holds(const Side& side, std::span<const float> tensor, int64_t version);

// Joins the pair and calls `body`.
int with_pair(const Side& side, const std::string& store, const std::function<int(Pair& pair)>& body);
// Joins the pair, registers the tensor and calls `body`.
int with_batch(const Side& side, const std::string& store,
               const std::function<int(Batch& batch, std::vector<float>& tensor)>& body);
// Likewise, with a tensor in shared memory, which an agent can access.
int with_shared_batch(const Side& side, const std::string& store,
                      const std::function<int(Batch& batch, std::span<float> tensor)>& body);

// Bodies of a batch.
int send_once(Batch& batch, std::vector<float>&);
int receive_once(Batch& batch, std::vector<float>&);

// Whether the call fails with that code and message; prints what it says.
bool fails_with(const std::function<void()>& call, ErrorCode code, const std::string& text);

// Whether a stop, requested before or during the wait, ends a wait for a handle that does not end, and only the wait.
bool a_stop_ends_a_wait_for(Handle& handle);

// Returns once that process has ended, reaped or not.
void await_end(pid_t pid);
// Stops that process; returns once all its threads stand still.
void stop_process(pid_t pid);
// Whether `transfer` succeeded; a lost peer, or one that did not come in time, counts as false.
bool went_well(const std::function<void()>& transfer);

// What that rank's agent reports, asked as `tessera top` does.
Report report_of(const std::string& store, const std::string& job, Rank rank);

// Waits for all and expects that each ends with 0, and that the runtime folder is empty.
void expect_all_well(ProcessGroup& group);

// A point where the processes that are started while it lives wait for each other: pass() returns once each of them has
// reached it or has ended.
class Barrier {
 public:
  Barrier();
  void pass();                         // in such a process, once
  void open() { write_end_.reset(); }  // in the test itself, once it has started them all

 private:
  UniqueFd read_end_;
  UniqueFd write_end_;
};

// Raised by one of the processes that are started while it lives; awaited by another.
class Signal {
 public:
  Signal();
  void raise() const;
  void wait() const;  // takes one raise; throws kDeadlineExceeded past the hang limit

 private:
  UniqueFd event_;
};

}  // namespace tessera::test
