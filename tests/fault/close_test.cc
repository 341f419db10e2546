// A batch is closed while a peer reads from it: the peer is told, and neither side reads memory that is gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/testing.h"
#include "tests/support/jobs.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;

// A snapshot is Tessera's own memory, which is freed with the batch.
TEST(Close, OfAStagedSenderWaitsForThoseWhoReadItsSnapshot) {
  constexpr int kTimes = 10;
  constexpr Index kElements = Index{4} << 20;  // a digest of it takes longer than the receiver takes to begin
  ProcessGroup group;
  const std::string store = group.start_store();
  const Signal offered, begun;
  group.start("trainer/0", [&] {
    Bus bus({.job = "trainer", .store = store, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = "inference"});
    std::vector<float> data(kElements);
    const TensorSpec tensor{.name = "t", .data = data.data(), .shape = {kElements}};
    for (int i = 0; i < kTimes; ++i) {
      Batch batch = pair.offer(std::to_string(i), {&tensor, 1}, soon().left(), {.mode = Mode::kStaged});
      std::ranges::fill(data, static_cast<float>(i + 1));
      batch.send(1).wait();
      offered.raise();
      begun.wait();
      batch.close(Timeout(0));
      std::ranges::fill(data, -1.0f);
    }
    return 0;
  });
  group.start("inference/0", [&] {
    Bus bus({.job = "inference", .store = store, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
    std::vector<float> data(kElements);
    const TensorSpec tensor{.name = "t", .data = data.data(), .shape = {kElements}};
    for (int i = 0; i < kTimes; ++i) {
      Batch batch = pair.accept(std::to_string(i), {&tensor, 1});
      offered.wait();
      Handle handle = batch.recv({}, std::chrono::seconds(5));
      begun.raise();
      const std::string error = error_of([&] { handle.wait(); });
      const bool whole = std::ranges::count(data, static_cast<float>(i + 1)) == kElements;
      if (error == "(no error)" ? !whole : error.find("has closed the batch") == std::string::npos)
        throw Error(ErrorCode::kInternal, error);
    }
    return 0;
  });
  expect_all_well(group);
}

}  // namespace
}  // namespace tessera::test
