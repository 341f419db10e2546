// What strangers send to the sockets of agent daemons.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <thread>

#include "base/fail.h"
#include "base/framing.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "bus/batch/client.h"
#include "bus/daemon/client_session.h"
#include "bus/daemon/messages.h"
#include "bus/daemon/worker_memory.h"
#include "bus/registration/local_tensors.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "tessera/version.h"
#include "tests/support/agents.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using Agent = JobsTest;

// A connection of a process that has found the agent's socket.
class Stranger {
 public:
  explicit Stranger(const std::string& job = "trainer") {
    const std::string name = bus::agent_socket_name("default", job, 0);
    std::vector<std::string> found;
    for (const Deadline deadline = Deadline::after(hang_limit()); found.empty(); std::this_thread::yield()) {
      found = RuntimeDir::living_files(RuntimeDir::default_root(), name);
      if (deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "there is no agent"_message);
    }
    for (const Deadline deadline = Deadline::after(hang_limit()); !socket_ && !deadline.passed();) {
      try {
        socket_ = connect_unix(found.front(), deadline);
      } catch (const Error&) {
        std::this_thread::yield();  // it does not listen yet
      }
    }
  }
  void send_bytes(std::span<const std::byte> bytes) const { (void)send_some(socket_.get(), bytes); }
  void send(bus::AgentMessage type, std::span<const std::byte> payload = {}, size_t fds = 0,
            uint32_t magic = bus::kAgentMagic) const {
    FrameWriter writer(magic, bus::kAgentProtocol, 1 << 20);
    std::vector<UniqueFd> copies;
    for (size_t i = 0; i < fds; ++i) copies.push_back(duplicate_fd(socket_.get()));
    writer.push(static_cast<uint16_t>(type), payload, std::move(copies));
    writer.flush(socket_.get(), Deadline::after(hang_limit()));
  }
  // Why it is refused; empty if the connection just ends.
  std::string refusal() const {
    FrameReader reader(bus::kAgentMagic, {.payload_bytes = 1 << 20, .fds = 0});
    try {
      const Frame frame = wait_frame(socket_.get(), reader, Deadline::after(hang_limit()));
      return read_message<bus::CallFailed>(frame.payload, "the agent").status.message();
    } catch (const Error& error) {
      return error.code() == ErrorCode::kDeadlineExceeded ? "no answer" : "";
    }
  }
  const UniqueFd& socket() const { return socket_; }

 private:
  UniqueFd socket_;
};

uint32_t descriptors_of(pid_t pid) {
  return Footprint::of(pid).fds;
}

// Nothing that anybody sends to its socket keeps it from its work or leaves anything behind.
TEST_F(Agent, OutlivesNonsense) {
  const pid_t agent = start_agent("trainer", 0);
  start("a stranger", [&] {
    {
      Bus(worker_of("trainer", store_));
    }  // what is made once is there
    const uint32_t before = descriptors_of(agent);
    std::mt19937 random(7);
    for (int round = 0; round < 20; ++round) {
      const Stranger noise;
      std::vector<std::byte> bytes(random() % 300 + kFrameHeaderBytes);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      noise.send_bytes(bytes);
      REQUIRE_HERE(noise.refusal() != "no answer");
    }
    const auto refused = [](const Stranger& stranger) { return stranger.refusal() != "no answer"; };
    {
      const Stranger other;
      other.send(bus::AgentMessage::kOpen, {}, 0, 0x12345678);
      REQUIRE_HERE(refused(other));
    }
    {
      const Stranger large;
      const uint32_t header[] = {bus::kAgentMagic, 0x00010001, 0, 0xffffffff, 0};
      large.send_bytes(std::as_bytes(std::span(header)));
      REQUIRE_HERE(refused(large));
    }
    for (const int type : {0, 2, 999}) {
      const Stranger unknown;
      unknown.send(static_cast<bus::AgentMessage>(type), std::vector<std::byte>(8));
      REQUIRE_HERE(refused(unknown));
    }
    for (const bus::AgentMessage type :
         {bus::AgentMessage::kPair, bus::AgentMessage::kRegister, bus::AgentMessage::kArenas,
          bus::AgentMessage::kCommit, bus::AgentMessage::kClose, bus::AgentMessage::kStop,
          bus::AgentMessage::kInterrupt}) {
      const Stranger early;
      early.send(type, std::vector<std::byte>(64));
      REQUIRE_HERE(refused(early));
    }
    {
      const Stranger generous;
      std::vector<int> fds(kMaxFdsPerMessage, generous.socket().get());
      const uint32_t header[] = {bus::kAgentMagic, 0x00010001, 0, 1000, 0};  // which announces none of them
      (void)send_some(generous.socket().get(), std::as_bytes(std::span(header)), fds);
      REQUIRE_HERE(refused(generous));
    }
    std::optional<Stranger> slow(std::in_place);
    const uint32_t half[] = {bus::kAgentMagic, 0x00010001};
    slow->send_bytes(std::as_bytes(std::span(half)));
    {
      Bus(worker_of("trainer", store_));
    }
    slow.reset();
    const Deadline deadline = Deadline::after(hang_limit());
    while (descriptors_of(agent) > before && !deadline.passed()) std::this_thread::yield();
    REQUIRE_HERE(descriptors_of(agent) <= before);
    return 0;
  });
  expect_all_well();
}

// A registration whose caller has gone before it was answered does not keep its name.
TEST_F(Agent, ClosesABatchThatNobodyWaitsFor) {
  const Signal over;
  start_agent("inference", 0);
  start("inference/0", [&] {
    const Side side = inference(0, 1);
    bus::AgentSession session(bus::complete(worker_of("inference", store_)));
    const auto paired = session.call<bus::Paired>(
        bus::AgentMessage::kPair,
        bus::PairCall{.session = session.number(), .options = {.name = "weights", .peer = "trainer"}},
        std::chrono::seconds(5));
    const SharedBuffer memory = SharedHeap::process().allocate(local_tensor(side).size() * sizeof(float));
    const TensorSpec spec = spec_of(side, reinterpret_cast<float*>(memory.data()));
    const bus::Manifest manifest = bus::manifest_of(session.identity(), {&spec, 1});
    const bus::MemoryPlacement placement =
        bus::place_tensors(manifest, {&spec, 1}, bus::registered_tensors(manifest, {&spec, 1}, 0), false);
    bus::RegisterCall call;
    call.session = session.number();
    call.pair = paired.pair;
    call.batch = "policy";
    call.timeout = std::chrono::seconds(5);
    call.tensors = placement.tensors;
    {
      const Stranger hasty("inference");
      FrameWriter writer(bus::kAgentMagic, bus::kAgentProtocol, 1 << 20);
      std::vector<UniqueFd> fds;
      fds.push_back(duplicate_fd(placement.arenas.front()->fd_for_agent()));
      writer.push(static_cast<uint16_t>(bus::AgentMessage::kArenas),
                  message_bytes(bus::Arenas{.session = session.number()}), std::move(fds));
      writer.push(static_cast<uint16_t>(bus::AgentMessage::kRegister), message_bytes(call));
      writer.flush(hasty.socket().get(), Deadline::after(hang_limit()));
    }
    const int fd = placement.arenas.front()->fd_for_agent();
    const Deadline deadline = Deadline::after(hang_limit());
    for (bool registered = false; !registered; std::this_thread::yield()) {
      REQUIRE_HERE(!deadline.passed());
      try {
        session.call<bus::Registered>(bus::AgentMessage::kRegister, call, call.timeout, {&fd, 1});
        registered = true;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kAlreadyExists && error.code() != ErrorCode::kPeerLost) throw;
      }
    }
    over.raise();
    return 0;
  });
  start(trainer(0, 1), [&](Batch&, std::vector<float>&) {
    over.wait();
    return 0;
  });
  expect_all_well();
}

TEST_F(Agent, OfAnotherReleaseIsNamedWithBoth) {
  start_agent("trainer", 0);
  start("a worker", [] {
    const Stranger newer;
    const bus::OpenSession open{.protocol_min = bus::kAgentProtocol + 1,
                                .protocol_max = bus::kAgentProtocol + 2,
                                .release = "99.1",
                                .worker = Incarnation::self(),
                                .options = {.job = "trainer", .rank = 0, .world = 1}};
    newer.send(bus::AgentMessage::kOpen, message_bytes(open), 1);
    const std::string why = newer.refusal();
    std::fprintf(stderr, "%s\n", why.c_str());
    REQUIRE_HERE(why.find(fmt::format("the agent is release {}", kVersion)) != std::string::npos);
    REQUIRE_HERE(why.find(fmt::format("the worker release 99.1 with protocols {} to {}", open.protocol_min,
                                      open.protocol_max)) != std::string::npos);
    return 0;
  });
  expect_all_well(hang_limit());
}

}  // namespace
}  // namespace tessera::test
