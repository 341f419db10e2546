#include "base/listener.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <semaphore>
#include <string>
#include <vector>

#include "base/message.h"
#include "base/socket.h"

namespace tessera {
namespace {

class ListenerTest : public testing::Test {
 protected:
  ListenerTest() {
    listener_.start(
        [this](UniqueFd socket) {
          if (refuses_) fail(ErrorCode::kPermissionDenied, "not this one"_message);
          taken_.push_back(std::move(socket));
          if (pauses_) listener_.pause();
          took_.release();
        },
        [this](const Error& error) {
          why_ = error.code();
          refused_.release();
        });
    loop_.start();
  }
  ~ListenerTest() override {
    loop_.stop();
    std::filesystem::remove_all(folder_);
  }
  UniqueFd call() const { return connect_unix(path_, soon()); }
  static bool comes(std::counting_semaphore<>& event) { return event.try_acquire_for(std::chrono::seconds(10)); }
  static Deadline soon() { return Deadline::after(seconds(10)); }
  // Whether the other end has closed the connection.
  static bool ends(const UniqueFd& socket) {
    pollfd end{.fd = socket.get(), .events = POLLRDHUP, .revents = 0};
    return ::poll(&end, 1, soon().poll_ms()) == 1 && (end.revents & POLLRDHUP) != 0;
  }

  std::string folder_ = [] {
    std::string path = (std::filesystem::temp_directory_path() / "tessera-listener-XXXXXX").string();
    return std::string(::mkdtemp(path.data()));
  }();
  std::string path_ = folder_ + "/socket";
  std::atomic<bool> refuses_ = false;
  std::atomic<bool> pauses_ = false;
  std::atomic<ErrorCode> why_ = ErrorCode::kOk;
  std::counting_semaphore<> took_{0}, refused_{0};
  std::vector<UniqueFd> taken_;
  EventLoop loop_{"test"};
  Listener listener_{loop_, listen_unix(path_)};
};

TEST_F(ListenerTest, AnErrorRefusesOneConnectionAndTheNextIsTaken) {
  refuses_ = true;
  const UniqueFd first = call();
  ASSERT_TRUE(comes(refused_));
  EXPECT_EQ(why_, ErrorCode::kPermissionDenied);
  EXPECT_TRUE(ends(first));
  refuses_ = false;
  const UniqueFd second = call();
  EXPECT_TRUE(comes(took_));
}

TEST_F(ListenerTest, CallersWaitWhileItPauses) {
  pauses_ = true;
  const UniqueFd first = call();
  ASSERT_TRUE(comes(took_));
  const UniqueFd second = call();
  EXPECT_FALSE(took_.try_acquire_for(std::chrono::milliseconds(20)));
  ASSERT_TRUE(loop_.post([this] { listener_.resume(); }));
  EXPECT_TRUE(comes(took_));
}

TEST_F(ListenerTest, TakesAgainOnceThereAreDescriptors) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "without a descriptor, the sanitizer's check of an object's type fails: it opens a pipe";
#endif
  const UniqueFd early = call();
  ASSERT_TRUE(comes(took_));
  UniqueFd late(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(::connect(late.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const bool refused = comes(refused_);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  ASSERT_TRUE(refused);
  EXPECT_EQ(why_, ErrorCode::kResourceExhausted);
  EXPECT_TRUE(comes(took_));  // it waited meanwhile
}

TEST_F(ListenerTest, StopIsForGood) {
  ASSERT_TRUE(loop_.post([this] {
    listener_.stop();
    listener_.resume();
    took_.release();
  }));
  ASSERT_TRUE(comes(took_));
  const UniqueFd caller = call();
  EXPECT_FALSE(took_.try_acquire_for(std::chrono::milliseconds(20)));
}

}  // namespace
}  // namespace tessera
