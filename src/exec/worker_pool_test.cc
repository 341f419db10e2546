#include "exec/worker_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <set>
#include <string>

#include "exec/testing.h"

namespace tessera {
namespace {

class CountingJob final : public Job {
 public:
  CountingJob(std::atomic<int>& ran, std::function<void(std::span<std::byte>)> body = {})
      : ran_(ran), body_(std::move(body)) {}
  void run(std::span<std::byte> scratch) override {
    if (body_) body_(scratch);
    ran_.fetch_add(1);
  }

 private:
  std::atomic<int>& ran_;
  std::function<void(std::span<std::byte>)> body_;
};

TEST(WorkerPool, RunsEverythingBeforeItEnds) {
  std::atomic<int> ran{0};
  std::vector<std::unique_ptr<CountingJob>> jobs;
  {
    WorkerPool pool(3, "pool");
    for (int i = 0; i < 100; ++i) {
      jobs.push_back(std::make_unique<CountingJob>(ran));
      pool.submit(*jobs.back());
    }
  }
  EXPECT_EQ(ran.load(), 100);
}

TEST(WorkerPool, RunsInOrderOnNamedThreadsWithScratchOfTheirOwn) {
  std::vector<int> order;
  std::set<std::string> names;
  std::atomic<int> ran{0};
  std::vector<std::unique_ptr<CountingJob>> jobs;
  {
    WorkerPool pool(1, "pull");
    for (int i = 0; i < 10; ++i) {
      jobs.push_back(std::make_unique<CountingJob>(ran, [&, i](std::span<std::byte> scratch) {
        order.push_back(i);
        char name[16] = {};
        ::pthread_getname_np(::pthread_self(), name, sizeof(name));
        names.insert(name);
        EXPECT_EQ(scratch.size(), WorkerPool::kScratchBytes);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(scratch.data()) % 4096, 0u);
        std::fill(scratch.begin(), scratch.end(), std::byte{1});
      }));
      pool.submit(*jobs.back());
    }
  }
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(names, std::set<std::string>{"pull-0"});
}

}  // namespace
}  // namespace tessera
