// Copies of the tensors that a rank registers, contiguous, in Tessera's shared memory: what is sent while the user goes
// on writing, and what is received before all ranks agree to take it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "bus/agent.h"
#include "bus/local_tensors.h"
#include "bus/loop_signal.h"
#include "exec/pull.h"
#include "tessera/bus.h"
#include "tessera/memory.h"

namespace tessera::bus {

// Lives on the loop's thread, but for its construction.
class Shadow {
 public:
  enum class Use {
    kSend,     // terms of Partial tensors are left out: they are read in place, as they are reduced
    kReceive,  // tied tensors stay tied
  };
  // `slots` copies. Throws kResourceExhausted if there is not the memory. `done` is called once the copying that
  // copy_in() or copy_out() began has ended.
  Shadow(Agent& agent, const Manifest& manifest, std::span<const TensorSpec> tensors, Use use, uint32_t slots,
         std::function<void()> done);

  // The tensors as they lie in the first slot; those that are left out, as they were registered.
  std::span<const TensorSpec> specs() const { return specs_; }
  uint32_t slots() const { return static_cast<uint32_t>(in_.size()); }
  uint64_t slot_bytes() const { return slot_bytes_; }

  void copy_in(uint32_t slot);   // from the user's memory. REQUIRES: not busy()
  void copy_out(uint32_t slot);  // to it
  bool busy() const { return run_ != nullptr; }
  const Status& status() const { return status_; }  // of the last copy

 private:
  void start(PullRun& run);
  void finish();

  Agent& agent_;
  const std::function<void()> done_;
  std::vector<TensorSpec> specs_;
  uint64_t slot_bytes_ = 0;
  SharedBuffer memory_;
  LoopSignal run_done_;
  std::vector<std::unique_ptr<PullRun>> in_, out_;  // by slot
  PullRun* run_ = nullptr;                          // under way
  uint32_t copies_ = 0;
  Status status_;
};

}  // namespace tessera::bus
