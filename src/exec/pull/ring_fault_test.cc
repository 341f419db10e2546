// Rings between two processes, one of which dies or is restricted.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <utility>

#include "base/socket.h"
#include "base/thread.h"
#include "exec/pull/compiler.h"
#include "exec/pull/source.h"
#include "exec/testing.h"
#include "transport/shm/bounce_ring.h"
#include "transport/testing.h"
#include "transport/transport.h"

namespace tessera {
namespace {

using exec_testing::Completion;
using exec_testing::kPatience;
using exec_testing::reach_self;
using transport_testing::Child;
using transport_testing::forbid_process_vm_readv;
using transport_testing::Signal;

constexpr Index kElements = Index{8} << 20;  // of one f32 tensor: many times what a ring holds

struct Tensor {
  std::vector<float> values = std::vector<float>(kElements, 1.5f);
  Region whole = Region::full(Shape{kElements});
  RouteRegion what{.shape = {kElements}, .dtype = DType::kF32, .region = whole};

  SourceRoute source() const {
    return {
        .what = what, .src = {whole, {4}}, .data = reinterpret_cast<const std::byte*>(values.data()), .streamed = true};
  }
  PullRoute pull(uint64_t address, std::vector<float>& into) const {
    return {.what = what,
            .src = {whole, {4}},
            .memory = {.key = kOwnMemory, .offset = address, .bytes = kElements * 4},
            .dst = {whole, {4}},
            .dst_dtype = DType::kF32,
            .data = reinterpret_cast<std::byte*>(into.data())};
  }
};

// A second descriptor of the ring, which a forked child gets too.
UniqueFd descriptor_for_child(const BounceRing& ring) {
  UniqueFd fd = duplicate_fd(ring.fd());
  fd.keep_across_fork();
  return fd;
}

// What the bus does: aborts the run when the peer's pidfd fires.
class Watch {
 public:
  Watch(pid_t pid, TransferRun& run) : pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
    thread_ = start_thread("watch", [this, &run] {
      pollfd events{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
      const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(kPatience);
      if (::poll(&events, 1, static_cast<int>(limit.count())) == 1)
        run.abort(Status(ErrorCode::kPeerLost, "trainer/0 died"));
    });
  }
  ~Watch() { thread_.join(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  UniqueFd pidfd_;
  std::thread thread_;
};

// The sender stops in the middle, as one that is killed while it fills the ring.
int fill_a_part_of(BounceRing& ring, size_t frames) {
  ring.begin_produce(1);
  for (size_t f = 0; f < frames; ++f) {
    if (ring.reserve(Deadline::after(kPatience)).empty()) return 1;
    ring.publish(BounceRing::kSlotBytes);
  }
  ::pause();
  return 0;
}

TEST(RingFault, AReceiverEndsSoonAfterItsSenderIsKilled) {
  std::unique_ptr<BounceRing> ring = BounceRing::create();
  UniqueFd for_child = descriptor_for_child(*ring);
  Child sender([&] { return fill_a_part_of(*BounceRing::open(std::move(for_child), "inference/0"), 20); });
  Tensor tensor;
  std::vector<float> into(kElements);
  const PullRoute route = tensor.pull(reinterpret_cast<uintptr_t>(tensor.values.data()), into);
  auto program = std::make_shared<PullProgram>(reach_self("shm"), std::span(&route, 1),
                                               PullOptions{.digest = false, .private_access = Access::kStream});
  WorkerPool pool(1, "pull");
  Completion done;
  PullRun run(program, pool, done.callback(), std::move(ring), {.stall = kPatience});
  {
    const Watch watch(sender.pid(), run);
    run.start(1);
    sender.kill();
    ASSERT_TRUE(done.wait());
  }
  EXPECT_EQ(run.status().code(), ErrorCode::kPeerLost);
  EXPECT_LT(run.bytes_done(), program->bytes());
}

TEST(RingFault, ASenderEndsSoonAfterItsReceiverIsKilled) {
  std::unique_ptr<BounceRing> ring = BounceRing::create();
  UniqueFd for_child = descriptor_for_child(*ring);
  Child receiver([&] {
    const auto own = BounceRing::open(std::move(for_child), "trainer/0");
    own->begin_consume(1);
    for (int f = 0; f < 5; ++f) {
      if (own->acquire(Deadline::after(kPatience)).empty()) return 1;
      own->release();
    }
    ::pause();
    return 0;
  });
  const Tensor tensor;
  const SourceRoute route = tensor.source();
  auto program = std::make_shared<SourceProgram>(std::span(&route, 1), SourceOptions{.digest = false});
  WorkerPool pool(1, "source");
  Completion done;
  SourceRun run(program, pool, done.callback(), "inference/0", std::move(ring), {.stall = kPatience});
  {
    const Watch watch(receiver.pid(), run);
    run.start(1);
    receiver.kill();
    ASSERT_TRUE(done.wait());
  }
  EXPECT_EQ(run.status().code(), ErrorCode::kPeerLost);
}

TEST(RingFault, ARefusedSystemCallLeadsToTheRingAndTheDataArrives) {
  std::unique_ptr<BounceRing> ring = BounceRing::create();
  UniqueFd for_child = descriptor_for_child(*ring);
  Child receiver([&] {
    if (!forbid_process_vm_readv()) return 2;
    const std::shared_ptr<Connection> shm = reach_self("shm");
    const Tensor tensor;
    std::vector<float> into(kElements);
    const PullRoute route = tensor.pull(4096, into);  // never read from here
    auto program = std::make_shared<PullProgram>(shm, std::span(&route, 1), PullOptions{.digest = false});
    if (!program->wants_stream()) return 3;
    try {
      PullProgram(shm, std::span(&route, 1), PullOptions{.private_access = Access::kGet});
      return 4;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPermissionDenied) return 5;
    }
    WorkerPool pool(1, "pull");
    Completion done;
    PullRun run(program, pool, done.callback(), BounceRing::open(std::move(for_child), "trainer/0"));
    run.start(1);
    if (!done.wait() || !run.status().ok()) return 6;
    return into == tensor.values ? 0 : 7;
  });
  const Tensor tensor;
  const SourceRoute route = tensor.source();
  auto program = std::make_shared<SourceProgram>(std::span(&route, 1), SourceOptions{.digest = false});
  WorkerPool pool(1, "source");
  Completion done;
  SourceRun run(program, pool, done.callback(), "inference/0", std::move(ring));
  run.start(1);
  ASSERT_TRUE(done.wait());
  EXPECT_EQ(run.status(), Status());
  EXPECT_EQ(receiver.wait(), 0);
}

}  // namespace
}  // namespace tessera
