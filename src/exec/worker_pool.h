// The threads that move bytes.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace tessera {

// Work for a pool. Its maker owns it; it must outlive its run, and is in one queue at a time.
class Job {
 public:
  virtual ~Job() = default;
  // On a worker thread; must not throw. `scratch` is the thread's own, WorkerPool::kScratchBytes at a page boundary.
  virtual void run(std::span<std::byte> scratch) = 0;

 private:
  friend class WorkerPool;
  Job* next_ = nullptr;
};

// A fixed set of threads and a first-in first-out queue. Thread-safe. submit() allocates nothing.
class WorkerPool {
 public:
  static constexpr size_t kScratchBytes = size_t{256} << 10;  // fits into a core's L2

  // Threads are called `name`-0, `name`-1, ...
  WorkerPool(int threads, const std::string& name);
  // Runs what is queued, then ends the threads. Nothing may be submitted any more.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void submit(Job& job);
  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  void work();
  void stop();

  Mutex mutex_;
  CondVar wake_;
  Job* first_ GUARDED_BY(mutex_) = nullptr;
  Job* last_ GUARDED_BY(mutex_) = nullptr;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
