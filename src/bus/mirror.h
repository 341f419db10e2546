// What a worker's agent daemon sees of the worker's tensors: those in Tessera's shared memory as they lie there; those
// in private memory by a copy in shared memory, which is filled before a send and emptied after a receive.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "bus/agent.h"
#include "bus/agent_protocol.h"
#include "bus/packing.h"
#include "exec/pull.h"
#include "exec/worker_pool.h"

namespace tessera {
class SharedArena;
}

namespace tessera::bus {

// Copies block, on one thread at a time.
class Mirror {
 public:
  // `manifest` is that of `tensors`, and outlives the mirror. Throws kResourceExhausted if there is not the memory for
  // the copy; kInvalidArgument where received tensors overlap.
  Mirror(const Identity& identity, const Manifest& manifest, std::span<const TensorSpec> tensors, bool sends,
         int threads);
  ~Mirror();

  std::span<const RegisterCall::Tensor> tensors() const { return tensors_; }
  // The arenas that they lie in, by number.
  std::span<const std::shared_ptr<SharedArena>> arenas() const { return arenas_; }
  uint64_t copied_bytes() const { return copied_bytes_; }  // 0: all is seen as it lies

  void copy_in();
  void copy_out();

 private:
  void run(PullRun* copies);
  uint32_t number_of(const std::shared_ptr<SharedArena>& arena);

  std::vector<RegisterCall::Tensor> tensors_;
  std::vector<std::shared_ptr<SharedArena>> arenas_;
  uint64_t copied_bytes_ = 0;
  std::unique_ptr<WorkerPool> pool_;  // where there is something to copy
  std::unique_ptr<PullRun> in_, out_;
  uint32_t copies_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool running_ = false;  // guarded by mutex_
};

}  // namespace tessera::bus
