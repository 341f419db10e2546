#include "bus/daemon/client_session.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/fail.h"
#include "base/folder_watch.h"
#include "base/log.h"
#include "base/process.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "base/thread.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

constexpr Duration kQueueTimeout = seconds(5);  // for a command that is answered immediately
constexpr Duration kRemindAfter = seconds(10);
constexpr Duration kForgetLook = seconds(1);  // two checks further apart say nothing about the time between them

// The sum, without overflow.
Timeout longer(Timeout timeout, Timeout by) {
  return timeout > Timeout::max() - by ? Timeout::max() : timeout + by;
}

Deadline earlier(const Deadline& deadline, Duration wait) {
  return Deadline::at(std::min(deadline.when(), Deadline::after(wait).when()));
}

}  // namespace

AgentSession::AgentSession(BusOptions options)
    : options_(std::move(options)),
      identity_{options_.name_space, options_.job, options_.rank, options_.world},
      agent_name_(fmt::format("the agent of {}", identity_.name())),
      end_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!end_) fail_errno("eventfd");
  const Deadline deadline = Deadline::after(options_.timeout);
  open(find(deadline));
  watcher_ = start_thread("tessera-watch", [this] { watch(); });
  on_stop_.emplace(options_.stop, [this] { tell(AgentMessage::kStop); });
}

AgentSession::~AgentSession() {
  on_stop_.reset();
  const uint64_t one = 1;
  (void)!::write(end_.get(), &one, sizeof(one));
  watcher_.join();
  commands_.reset();
  if (!lost().ok()) return;
  try {  // what this rank holds in the store is released before this returns
    tell(AgentMessage::kClose);
    wait_answer(socket_.get(), reader_, AgentMessage::kClosed, Deadline::after(kAnswerGrace));
  } catch (const Error& error) {
    log_event(LogLevel::info, "close.failed", {}, "{}: closing: {}", agent_name_, error.what());
  }
}

UniqueFd AgentSession::find(Deadline deadline) {
  const std::string name = agent_socket_name(options_.name_space, options_.job, options_.rank);
  const std::string root = RuntimeDir::prepare_root();
  Deadline reminder = Deadline::after(kRemindAfter);
  std::optional<FolderWatch> appears;
  while (true) {
    if (appears) RuntimeDir::watch(root, *appears);
    std::string what = fmt::format("no agent of namespace {} runs under {}"_message, options_.name_space, root);
    for (const std::string& path : RuntimeDir::living_files(root, name)) {
      address_ = path;
      try {
        return connect(deadline);
      } catch (const Error& error) {  // it may be ending
        if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kUnavailable) throw;
        what = error.what();
      }
    }
    const std::string missing =
        fmt::format("{}: {}: start tessera agent --job {} --rank {}, with the same TESSERA_RUNTIME_DIR"_message,
                    identity_.name(), what, options_.job, options_.rank);
    if (options_.stop.stop_requested()) fail(ErrorCode::kCancelled, "{}: interrupted"_message, missing);
    if (deadline.passed()) fail(ErrorCode::kUnavailable, "{}"_message, missing);
    if (reminder.passed()) {
      reminder = Deadline::after(kRemindAfter);
      log_event(LogLevel::warn, "agent.awaited", {{"job", options_.job}, {"rank", options_.rank}}, "{}", missing);
    }
    if (appears)
      appears->wait(Deadline::at(std::min(deadline.when(), reminder.when())), options_.stop);
    else
      appears.emplace();  // and look again: it may have come since
  }
}

UniqueFd AgentSession::connect(Deadline deadline) const {
  try {
    UniqueFd socket = connect_unix(address_, deadline);
    require_same_user(socket.get());
    return socket;
  } catch (const Error& error) {
    const Status why = lost();
    if (!why.ok()) throw Error(why.code(), why.message());
    // Its socket was there: it is about to exit, or has been killed.
    throw Error(error.code() == ErrorCode::kUnavailable ? ErrorCode::kPeerLost : error.code(),
                fmt::format("{}: {}", agent_name_, error.what()));
  }
}

void AgentSession::open(UniqueFd socket) {
  const Incarnation self = Incarnation::next();
  const std::shared_ptr<CommandMemory> memory = CommandMemory::create(self.nonce);
  socket_ = std::move(socket);
  agent_ = require_same_user(socket_.get());
  FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(memory->fd()));
  const OpenSession open{.release = tessera::kVersion, .worker = self, .options = options_};
  writer.push(static_cast<uint16_t>(AgentMessage::kOpen), message_bytes(open), std::move(fds));
  const Deadline answer = Deadline::after(longer(options_.timeout, kAnswerGrace));
  writer.flush(socket_.get(), answer);
  std::optional<std::stop_callback<std::function<void()>>> stop;
  stop.emplace(options_.stop, [this] { tell(AgentMessage::kStop); });
  const Frame frame = wait_answer(socket_.get(), reader_, AgentMessage::kOpened, answer);
  stop.reset();
  const auto opened = read_message<SessionOpened>(frame.payload, agent_name_);
  if (opened.protocol != kAgentProtocol)
    fail(ErrorCode::kMismatch,
         "{}: it answers with protocol {}, release {}; this is release {} with protocol {}"_message, agent_name_,
         opened.protocol, opened.release, tessera::kVersion, kAgentProtocol);
  number_ = opened.session;
  pidfd_ = open_pidfd(opened.agent);
  agent_name_ += fmt::format(" (pid {})", opened.agent.pid);
  commands_ = std::make_unique<CommandClient>(memory, agent_name_);
}

void AgentSession::tell(AgentMessage type) noexcept {
  const MutexLock lock(tell_mutex_);
  try {
    FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
    writer.push(static_cast<uint16_t>(type), {});
    writer.flush(socket_.get(), Deadline::after(seconds(1)));
  } catch (const Error& error) {
    log_event(LogLevel::info, "agent.untold", {}, "{}: {}", agent_name_, error.what());
  }
}

Frame AgentSession::wait_answer(int socket, FrameReader& reader, AgentMessage expected, Deadline deadline) {
  Frame frame;
  try {
    frame = patiently(deadline, [&](const Deadline& until) { return wait_frame(socket, reader, until); });
  } catch (const Error& error) {
    lost().throw_if_error();
    const char* hint = error.code() == ErrorCode::kDeadlineExceeded ? " does not answer; is it stopped?" : "";
    throw Error(error.code(), fmt::format("{}{}: {}", agent_name_, hint, error.what()));
  }
  if (frame.type == static_cast<uint16_t>(AgentMessage::kFailed))
    read_message<CallFailed>(frame.payload, agent_name_).status.throw_if_error();
  if (frame.type != static_cast<uint16_t>(expected))
    fail(ErrorCode::kMismatch, "{}: message {} where {} was expected"_message, agent_name_, frame.type,
         static_cast<int>(expected));
  return frame;
}

Frame AgentSession::exchange(AgentMessage type, std::span<const std::byte> payload, AgentMessage expected,
                             Timeout timeout, std::span<const int> fds, const std::stop_token& stop) {
  require_own_process();
  lost().throw_if_error();
  const Deadline deadline = Deadline::after(longer(timeout, kAnswerGrace));
  const UniqueFd socket = connect(deadline);
  FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
  const auto send = [&] { patiently(deadline, [&](const Deadline& until) { writer.flush(socket.get(), until); }); };
  for (size_t i = 0; i < fds.size(); i += kMaxFdsPerMessage) {
    std::vector<UniqueFd> copies;
    for (const int fd : fds.subspan(i, std::min(kMaxFdsPerMessage, fds.size() - i))) copies.push_back(duplicate_fd(fd));
    writer.push(static_cast<uint16_t>(AgentMessage::kArenas), message_bytes(Arenas{.session = number_}),
                std::move(copies));
    send();
  }
  writer.push(static_cast<uint16_t>(type), payload);
  send();
  const std::stop_callback give_up(stop, [&] { ::shutdown(socket.get(), SHUT_WR); });
  FrameReader reader(kAgentMagic, {.payload_bytes = kMaxAgentFrame});
  return wait_answer(socket.get(), reader, expected, deadline);
}

std::vector<std::byte> AgentSession::ask_bytes(AgentCommand command, std::span<const std::byte> payload) {
  require_own_process();
  const Deadline deadline = Deadline::after(kQueueTimeout);
  CommandCall call = commands_->post(static_cast<uint16_t>(command), payload, deadline);
  await(call, deadline);
  return call.wait(deadline);
}

bool AgentSession::await(CommandCall& call, const Deadline& deadline) {
  for (Duration period = kSilence; !call.await(earlier(deadline, period)); period = kStopPeriod) {
    if (deadline.passed()) return false;
    look_whether_stopped();
  }
  return true;
}

void AgentSession::look_whether_stopped() {
  if (agent_ == 0) return;
  Status stopped;
  {
    const MutexLock lock(mutex_);
    const TimePoint now = Clock::steady().now();
    if (now - looked_ < kStopPeriod) return;
    if (now - looked_ > kForgetLook) stop_detector_ = {};
    looked_ = now;
    stopped = stop_detector_.look(fmt::format("the agent of {}", identity_.name()), agent_);
  }
  if (!stopped.ok())
    lose(failed(stopped.code(), "{}; then make a new Bus: this one has given it up"_message, stopped.message()));
}

void AgentSession::lose(const Status& why) {
  {
    const MutexLock lock(mutex_);
    if (!lost_.ok()) return;
    lost_ = why;
  }
  log_event(LogLevel::warn, "agent.lost", {{"job", options_.job}, {"rank", options_.rank}}, "{}", why.message());
  if (commands_) commands_->close(why);
  ::shutdown(socket_.get(), SHUT_RDWR);  // an agent that continues sees that nobody waits for it any more
}

void AgentSession::watch() {
  pollfd fds[] = {{end_.get(), POLLIN, 0}, {socket_.get(), POLLRDHUP, 0}, {pidfd_ ? pidfd_.get() : -1, POLLIN, 0}};
  while (true) {
    if (::poll(fds, 3, -1) < 0) continue;
    if (fds[0].revents != 0) return;
    if (fds[1].revents == 0 && fds[2].revents == 0) continue;
    return lose(failed(ErrorCode::kPeerLost, "{} {}: make a new Bus once one runs again"_message, agent_name_,
                       fds[2].revents != 0 ? "has died" : "has ended the session"));
  }
}

Status AgentSession::lost() const {
  const MutexLock lock(mutex_);
  return lost_;
}

}  // namespace tessera::bus
