#include "bus/sender/leases.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <semaphore>
#include <sstream>
#include <string>
#include <utility>

namespace tessera::bus {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);

// A process that does nothing, and what it is known by.
class Reader {
 public:
  Reader() : pid_(::fork()) {
    if (pid_ == 0) {
      ::pause();
      ::_exit(0);
    }
    process_ = Incarnation::self();
    process_.pid = pid_;
    std::ifstream stat("/proc/" + std::to_string(pid_) + "/stat");
    std::string text((std::istreambuf_iterator<char>(stat)), {});
    std::istringstream fields(text.substr(text.rfind(')') + 2));
    for (int field = 3; field <= 22; ++field) fields >> text;
    process_.start_time = std::stoull(text);
  }
  ~Reader() { end(); }
  void end() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  const Incarnation& process() const { return process_; }

 private:
  pid_t pid_;
  Incarnation process_;
};

class LeasesTest : public testing::Test {
 protected:
  LeasesTest() { loop_.start(); }
  // On the loop's thread, where leases live.
  template <typename Task>
  void on_loop(Task task) {
    std::promise<void> done;
    loop_.post([&] {
      task();
      done.set_value();
    });
    ASSERT_EQ(done.get_future().wait_for(kPatience), std::future_status::ready);
  }
  ~LeasesTest() override {
    loop_.post([this] { leases_.reset(); });
    loop_.stop();
  }

  Reader first_, second_;  // before there is another thread
  EventLoop loop_{"leases"};
  std::counting_semaphore<8> ended_{0};
  std::unique_ptr<Leases> leases_ = std::make_unique<Leases>(loop_, [this] { ended_.release(); });
};

TEST_F(LeasesTest, LastUntilTheProcessComesAgainOrIsDead) {
  on_loop([&] {
    leases_->add(0, first_.process());
    leases_->add(1, second_.process());
    EXPECT_TRUE(leases_->hold(0) && leases_->hold(1));
    leases_->end(first_.process());
    EXPECT_TRUE(!leases_->hold(0) && leases_->hold(1));
  });
  second_.end();
  ASSERT_TRUE(ended_.try_acquire_for(kPatience));
  on_loop([&] {
    EXPECT_FALSE(leases_->hold(1));
    leases_->add(1, second_.process());
    EXPECT_FALSE(leases_->hold(1)) << "of a process that is dead";
  });
}

TEST_F(LeasesTest, MemoryIsKeptUntilTheLastReaderIsDead) {
  auto memory = std::make_shared<std::byte>();
  const std::weak_ptr<std::byte> kept = memory;
  const auto look = [&] { on_loop([&] { Leases(loop_, [] {}).keep(nullptr); }); };
  on_loop([&] {
    leases_->add(0, first_.process());
    leases_->add(1, second_.process());
    leases_->keep(std::exchange(memory, nullptr));
  });
  first_.end();
  look();
  EXPECT_FALSE(kept.expired());
  second_.end();
  look();
  EXPECT_TRUE(kept.expired());
}

}  // namespace
}  // namespace tessera::bus
