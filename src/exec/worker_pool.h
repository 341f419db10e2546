// The threads that move data.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace tessera {

// Work for a pool. Its creator owns it; it must outlive its run, and be in only one queue at a time.
class Job {
 public:
  virtual ~Job() = default;
  // On a worker thread; must not throw. `scratch` belongs to the thread: WorkerPool::kScratchBytes, page-aligned.
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
  // Runs the queued jobs, then ends the threads. Nothing may be submitted after this.
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
