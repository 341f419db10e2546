#include "exec/worker_pool.h"

#include <cstdlib>
#include <memory>
#include <utility>

#include "base/fail.h"
#include "base/thread.h"

namespace tessera {
namespace {

constexpr size_t kPage = 4096;

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

}  // namespace

WorkerPool::WorkerPool(int threads, const std::string& name) {
  TESSERA_CHECK_LE(1, threads);
  threads_.reserve(static_cast<size_t>(threads));
  try {
    for (int t = 0; t < threads; ++t)
      threads_.push_back(start_thread(fmt::format("{}-{}", name, t), [this] { work(); }));
  } catch (...) {
    stop();
    throw;
  }
}

WorkerPool::~WorkerPool() {
  stop();
}

void WorkerPool::stop() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::submit(Job& job) {
  {
    const MutexLock lock(mutex_);
    job.next_ = nullptr;
    (last_ == nullptr ? first_ : last_->next_) = &job;
    last_ = &job;
  }
  wake_.notify_one();
}

void WorkerPool::work() {
  const std::unique_ptr<std::byte, Free> scratch(static_cast<std::byte*>(std::aligned_alloc(kPage, kScratchBytes)));
  TESSERA_CHECK(scratch != nullptr);
  const MutexLock lock(mutex_);
  while (true) {
    wake_.wait(mutex_, [this]() REQUIRES(mutex_) { return first_ != nullptr || stopping_; });
    if (first_ == nullptr) return;
    Job* job = std::exchange(first_, first_->next_);
    if (first_ == nullptr) last_ = nullptr;
    const MutexUnlock unlocked(mutex_);
    job->run({scratch.get(), kScratchBytes});
  }
}

}  // namespace tessera
