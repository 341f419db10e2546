// Contiguous copies of the tensors that a rank registers, in Tessera's shared memory: sent while the user goes on
// writing, or received before all ranks agree to take them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "bus/registration/local_tensors.h"
#include "bus/session/packing.h"
#include "exec/run_factory.h"
#include "peer/agent.h"
#include "peer/call_limits.h"
#include "peer/loop_signal.h"
#include "tessera/bus.h"

namespace tessera::bus {

// Used on the loop's thread, except for its construction.
class Snapshots {
 public:
  enum class Use {
    kSend,     // leaves out terms of Partial tensors: they are read in place when they are reduced
    kReceive,  // tied tensors stay tied
  };
  // `slots` copies, made by `factory`, which must outlive them. Throws kResourceExhausted without enough memory. `done`
  // is called once the copying that copy() began has ended.
  Snapshots(Agent& agent, RunFactory& factory, const Manifest& manifest, std::span<const TensorSpec> tensors, Use use,
            uint32_t slots, const CallLimits& limits, std::function<void()> done);
  ~Snapshots();
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  // The tensors as placed in the first slot; left-out tensors as they were registered.
  std::span<const TensorSpec> specs() const { return specs_; }
  uint32_t slots() const { return static_cast<uint32_t>(runs_.size()); }
  uint64_t slot_bytes() const { return slot_bytes_; }
  const std::shared_ptr<std::byte>& memory() const { return memory_; }  // of all slots

  // The registered tensors have moved. Throws kInvalidArgument if ties have changed. REQUIRES: !busy()
  void relocate(const Manifest& manifest, std::span<const TensorSpec> tensors);
  // From the user's memory (kSend), or to it. REQUIRES: not busy()
  void copy(uint32_t slot);
  bool busy() const { return run_ != nullptr; }
  // Whether a slot has the quantised copy of that tensor's elements. REQUIRES: specs()[tensor].quantized
  bool is_current(size_t tensor, uint32_t slot) const { return current_[slot][tensor]; }
  const Status& status() const { return status_; }  // of the last copy

 private:
  Packing pack(const Manifest& manifest, std::span<const TensorSpec> tensors) const;
  std::vector<PullRoute> routes_of(const Packing& packing, uint32_t slot) const;
  void note_copies(std::span<const TensorSpec> tensors);
  void make_runs(const Packing& packing, uint32_t slots, std::vector<std::unique_ptr<Run>>& runs);
  void finish();

  Agent& agent_;
  RunFactory& factory_;
  const Use use_;
  const std::function<void()> done_;
  std::vector<TensorSpec> specs_;
  std::vector<std::shared_ptr<const QuantizedCopy>> quantized_;  // as registered, of those that are copied
  std::vector<std::vector<bool>> current_;                       // by slot
  uint64_t slot_bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
  LoopSignal run_done_;
  std::vector<std::unique_ptr<Run>> runs_;  // by slot
  Run* run_ = nullptr;                      // the current one
  uint32_t copies_ = 0;
  Status status_;
};

}  // namespace tessera::bus
