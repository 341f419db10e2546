#include "device/virtual/fiber.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::device {
namespace {

TEST(Fiber, GoesOnWhereItYielded) {
  std::vector<int> seen;
  Fiber* self = nullptr;
  Fiber fiber([&] {
    for (int i = 0; i < 3; ++i) {
      seen.push_back(i);
      self->yield();
    }
  });
  self = &fiber;
  for (int i = 0; !fiber.ended(); ++i) {
    fiber.resume();
    seen.push_back(100 + i);
  }
  EXPECT_EQ(seen, (std::vector<int>{0, 100, 1, 101, 2, 102, 103}));
}

TEST(Fiber, ThatNeverRanHoldsNothing) {
  auto held = std::make_shared<int>(1);
  {
    Fiber fiber([held] {});
  }
  EXPECT_EQ(held.use_count(), 1);
}

// An exception is in flight on one stack while others throw, catch and yield: the runtime keeps what is in flight by
// thread.
TEST(Fiber, ExceptionsStayOnTheirStack) {
  constexpr int kFibers = 8;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::string> caught;
  struct Yields {  // in its destructor, while an exception unwinds the stack
    Fiber& fiber;
    ~Yields() {
      EXPECT_EQ(std::uncaught_exceptions(), 1);
      fiber.yield();
      EXPECT_EQ(std::uncaught_exceptions(), 1);
    }
  };
  for (int i = 0; i < kFibers; ++i)
    fibers.push_back(std::make_unique<Fiber>([&, i] {
      Fiber& self = *fibers[static_cast<size_t>(i)];
      try {
        const Yields yields{self};
        throw std::runtime_error("fiber " + std::to_string(i));
      } catch (const std::exception& error) {
        self.yield();  // while it is caught
        try {
          throw;
        } catch (const std::exception& same) {
          EXPECT_STREQ(same.what(), error.what());
          caught.emplace_back(same.what());
        }
      }
      EXPECT_EQ(std::uncaught_exceptions(), 0);
    }));
  for (int round = 0; round < 3; ++round) {
    try {
      throw std::runtime_error("outside");
    } catch (const std::exception& outside) {
      for (const auto& fiber : fibers) fiber->resume();
      EXPECT_STREQ(outside.what(), "outside");
      EXPECT_NE(std::current_exception(), nullptr);
    }
    EXPECT_EQ(std::current_exception(), nullptr);
    EXPECT_EQ(std::uncaught_exceptions(), 0);
  }
  for (const auto& fiber : fibers) EXPECT_TRUE(fiber->ended());
  ASSERT_EQ(caught.size(), size_t{kFibers});
  EXPECT_EQ(caught[3], "fiber 3");
}

TEST(Fiber, HasAStackOfItsOwnWithRoom) {
  int sum = 0;
  Fiber fiber([&] {
    std::vector<int> kept;
    volatile char room[Fiber::kStackBytes / 4];
    for (size_t i = 0; i < sizeof room; i += 512) room[i] = 1;
    for (size_t i = 0; i < sizeof room; i += 512) sum += room[i];
  });
  fiber.resume();
  EXPECT_TRUE(fiber.ended());
  EXPECT_EQ(sum, static_cast<int>(Fiber::kStackBytes / 4 / 512));
}

}  // namespace
}  // namespace tessera::device
