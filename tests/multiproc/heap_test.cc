// Counts the heap allocations of a transfer: this program replaces operator new.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "tessera/memory.h"
#include "tests/support/jobs.h"

namespace tessera::test {
namespace {
std::atomic<int64_t> heap_blocks{0};
}
}  // namespace tessera::test

// Not inlined: the compiler would take new and free() for a mismatch.
[[gnu::noinline]] void* operator new(size_t size) {
  tessera::test::heap_blocks.fetch_add(1, std::memory_order_relaxed);
  if (void* block = std::malloc(size)) return block;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* block) noexcept {
  std::free(block);
}
[[gnu::noinline]] void operator delete(void* block, size_t) noexcept {
  std::free(block);
}

namespace tessera::test {
namespace {

constexpr int64_t kElements = 64;  // of a tensor
constexpr int kWarmUp = 5;
constexpr size_t kTransfers = 41;

// Allocations of all threads of this process in a transfer: the median, since a lease may be renewed in one of them.
template <typename Transfer>
int64_t blocks_of(Transfer transfer) {
  for (int i = 0; i < kWarmUp; ++i) transfer();
  std::array<int64_t, kTransfers> counts;
  for (int64_t& count : counts) {
    const int64_t before = heap_blocks.load();
    transfer();
    count = heap_blocks.load() - before;
  }
  std::ranges::sort(counts);
  return counts[kTransfers / 2];
}

std::vector<TensorSpec> specs_of(int count, std::byte* data, bool quantised) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < count; ++i) {
    specs.push_back({.name = "t" + std::to_string(i),
                     .data = data + static_cast<size_t>(i) * kElements * sizeof(float),
                     .dtype = DType::kF32,
                     .shape = {4, kElements / 4}});
    if (quantised) specs.back().wire = Format::kNvfp4;
  }
  return specs;
}

// One rank's job: a batch of one tensor and one of a thousand. Checks its counts.
int run_rank(const std::string& store, bool sends, const std::string& path) {
  constexpr int kMany = 1000;
  const size_t bytes = kMany * kElements * sizeof(float);
  Bus bus({.job = sends ? "trainer" : "inference", .store = store, .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = sends ? "inference" : "trainer"});
  const SharedBuffer mapped = SharedHeap::process().allocate(bytes);
  std::vector<std::byte> own(bytes);
  std::byte* data = path == "mapped" ? mapped.data() : own.data();
  const BatchOptions options{.delta = path == "delta"};
  const auto count = [&](const std::string& id, int tensors) {
    const std::vector<TensorSpec> specs = specs_of(tensors, data, path == "quantised");
    Batch batch = sends ? pair.offer(id, specs, kRendezvousTimeout, options)
                        : pair.accept(id, specs, kRendezvousTimeout, options);
    return blocks_of([&] { (sends ? batch.send() : batch.recv()).wait(); });
  };
  const int64_t one = count("one", 1);
  const int64_t many = count("many", kMany);
  std::fprintf(stderr, "%s takes %lld blocks for one tensor, %lld for %d\n", sends ? "sender" : "receiver",
               static_cast<long long>(one), static_cast<long long>(many), kMany);
  return one == 0 && many == 0 ? 0 : 5;
}

class Heap : public testing::TestWithParam<const char*> {};

TEST_P(Heap, ASteadyTransferTakesNothing) {
  const std::string path = GetParam();
  ProcessGroup group;
  const std::string store = group.start_store();
  for (const bool sends : {true, false})
    group.start(sends ? "trainer" : "inference", [=] {
      if (path == "stream") ::setenv("TESSERA_FORCE_PULL", "stream", 1);
      return run_rank(store, sends, path);
    });
  for (const Outcome& outcome : group.wait(2 * hang_limit())) {
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    std::printf("%s", outcome.output.c_str());
  }
}
INSTANTIATE_TEST_SUITE_P(, Heap, testing::Values("mapped", "private", "stream", "quantised", "delta"),
                         [](const auto& path) { return std::string(path.param); });

}  // namespace
}  // namespace tessera::test
