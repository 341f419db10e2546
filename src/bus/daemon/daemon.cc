#include "bus/daemon/daemon.h"

#include <poll.h>
#include <sys/epoll.h>

#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/fail.h"
#include "base/listener.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "base/thread.h"
#include "bus/daemon/messages.h"
#include "bus/daemon/worker_session.h"
#include "bus/registration/records.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

constexpr Duration kRequestTimeout = seconds(10);  // from accepting a connection to its complete request
constexpr size_t kMaxConnections = 256;            // being read; few have said who they are
constexpr size_t kMaxArenasOfBatch = 1 << 14;      // for one registration

// Threads that do one thing each, and are joined as they end.
class Tasks {
 public:
  ~Tasks() { finish(); }
  void run(const std::string& name, std::function<void()> task) {
    const MutexLock lock(mutex_);
    join_ended();
    const uint64_t id = next_id_++;
    threads_.emplace(id, start_thread(name, [this, id, task = std::move(task)] {
                       task();
                       const MutexLock ended_lock(mutex_);
                       ended_.push_back(id);
                     }));
  }
  // Waits for all. No more may be started.
  void finish() {
    while (true) {
      std::map<uint64_t, std::thread> threads;
      {
        const MutexLock lock(mutex_);
        threads = std::exchange(threads_, {});
        ended_.clear();
      }
      if (threads.empty()) return;
      for (auto& [id, thread] : threads) thread.join();
    }
  }

 private:
  void join_ended() REQUIRES(mutex_) {
    for (const uint64_t id : std::exchange(ended_, {})) {
      const auto it = threads_.find(id);
      if (it == threads_.end()) continue;
      it->second.join();  // its thread is about to end
      threads_.erase(it);
    }
  }

  Mutex mutex_;
  std::map<uint64_t, std::thread> threads_ GUARDED_BY(mutex_);
  std::vector<uint64_t> ended_ GUARDED_BY(mutex_);
  uint64_t next_id_ GUARDED_BY(mutex_) = 1;
};

}  // namespace

class Daemon::Impl {
 public:
  explicit Impl(DaemonOptions options)
      : options_(std::move(options)),
        name_(rank_name(options_.job, options_.rank)),
        runtime_dir_(RuntimeDir::open(RuntimeDir::default_root(), fmt::format("agent of {}", name_))),
        loop_("tessera-daemon") {
    check_name("job", options_.job);
    check_name("namespace", options_.name_space);
    const std::string socket = agent_socket_name(options_.name_space, options_.job, options_.rank);
    address_ = runtime_dir_.path(socket);
    listener_.emplace(loop_, listen_unix_in_place(address_ + '~', address_));
    // Checked once our own socket is there: of two daemons that start together, at least one sees the other.
    for (const std::string& other : RuntimeDir::living_files(runtime_dir_.root(), socket))
      if (other != address_)
        fail(ErrorCode::kAlreadyExists, "{} has an agent here already, which listens at {}"_message, name_, other);
    listener_->start([this](UniqueFd caller) { accept(std::move(caller)); },
                     [this](const Error& why) {
                       log_limited_event(LogLevel::warn, "connection.refused", {},
                                         "agent of {}: a connection is refused: {}"_message, name_, why.what());
                     });
    leaving_.start();
    loop_.start();
  }

  ~Impl() {
    loop_.post([this] {
      listener_->stop();
      while (!connections_.empty()) drop(connections_.begin()->first);
      std::shared_ptr<WorkerSession> of_one_that_has_gone;
      {
        const MutexLock lock(mutex_);
        of_one_that_has_gone = current_;
      }
      if (of_one_that_has_gone) of_one_that_has_gone->hasten();
      if (session_) leave(false);
    });
    loop_.stop();  // nothing more is started
    tasks_.finish();
    leaving_.stop();
  }

  const std::string& address() const { return address_; }

 private:
  // --- on the loop's thread ---

  void accept(UniqueFd socket) {
    require_same_user(socket.get());
    if (connections_.size() >= kMaxConnections) drop_oldest();
    const int fd = socket.get();
    auto connection = std::make_shared<WorkerConnection>(std::move(socket), next_connection_++);
    connections_.emplace(fd, connection);
    loop_.add_fd(fd, EPOLLIN | EPOLLRDHUP, [this, connection](uint32_t) { read(connection); });
    loop_.add_timer_after(kRequestTimeout, [this, waiting = std::weak_ptr(connection)] { give_up(waiting.lock()); });
  }

  // A connection that has sent no request and is not a session's: its worker has not said what it wants.
  void give_up(const std::shared_ptr<WorkerConnection>& connection) {
    if (!connection || is_sessions(connection)) return;
    const auto it = connections_.find(connection->socket.get());
    if (it == connections_.end() || it->second != connection) return;
    log_limited_event(LogLevel::warn, "connection.closed", {},
                      "agent of {}: a connection is closed: no complete request has come over it for {} s"_message,
                      name_, to_seconds(kRequestTimeout));
    drop(connection->socket.get());
  }

  // An honest worker says at once what it wants.
  void drop_oldest() {
    const auto order = [this](const auto& entry) {
      return is_sessions(entry.second) ? UINT64_MAX : entry.second->number;
    };
    const auto oldest = std::ranges::min_element(connections_, {}, order);
    log_limited_event(LogLevel::warn, "connection.closed", {},
                      "agent of {}: a connection is closed: more than {} sent no request"_message, name_,
                      kMaxConnections);
    drop(oldest->first);
  }

  void drop(int fd) {
    loop_.remove_fd(fd);
    connections_.erase(fd);
  }

  bool is_sessions(const std::shared_ptr<WorkerConnection>& connection) const {
    return session_ && session_->connection() == connection;
  }

  void read(const std::shared_ptr<WorkerConnection>& connection) {
    try {
      const bool open = connection->reader.fill(connection->socket.get());
      Frame frame;
      while (connections_.contains(connection->socket.get()) && connection->reader.next(frame))
        handle(connection, std::exchange(frame, {}));
      if (open) return;
      if (is_sessions(connection))
        log_event(LogLevel::info, "worker.gone", {}, "agent of {}: {} has closed its connection", name_,
                  session_->name());
    } catch (const Error& error) {
      log_limited_event(LogLevel::warn, "connection.closed", {}, "agent of {}: a connection is closed: {}"_message,
                        name_, error.what());
      connection->answer(CallFailed{.status = Status(error.code(), error.what())});
    }
    drop(connection->socket.get());
    if (is_sessions(connection)) leave(true);  // also one that has just been opened
  }

  // Ends a session whose worker has closed its end, before the loop comes to that event: a worker that makes a new Bus
  // is not refused because of the one that it has given up.
  void end_session_that_was_left() {
    const auto left = [this] {
      return wait_ready(session_->connection()->socket.get(), POLLRDHUP, Deadline::after(seconds(0)));
    };
    while (session_ && left()) read(session_->connection());
  }

  void handle(const std::shared_ptr<WorkerConnection>& connection, Frame frame) {
    const auto type = static_cast<AgentMessage>(frame.type);
    if (is_sessions(connection)) {
      if (type == AgentMessage::kStop) {
        session_->request_stop();
        return wake();
      }
      if (type == AgentMessage::kInterrupt) return session_->interrupt();
      if (type != AgentMessage::kClose)
        fail(ErrorCode::kInvalidArgument, "message {} in a session"_message, frame.type);
      drop(connection->socket.get());
      return leave(false);
    }
    if (type == AgentMessage::kOpen) return open(connection, std::move(frame));
    ByteReader in(frame.payload, "a worker's call");
    const auto number = in.get<uint64_t>();
    if (!session_ || session_->number() != number)
      fail(ErrorCode::kNotFound, "agent of {}: there is no such session any more"_message, name_);
    if (type == AgentMessage::kArenas) {
      for (UniqueFd& fd : frame.fds) connection->arenas.push_back(std::move(fd));
      if (connection->arenas.size() > kMaxArenasOfBatch)
        fail(ErrorCode::kResourceExhausted, "more than {} arenas"_message, kMaxArenasOfBatch);
      return;
    }
    drop(connection->socket.get());  // the request is complete; the answer follows
    const auto serving = WorkerSession::Serving::begin(session_);
    if (!serving) fail(ErrorCode::kCancelled, "agent of {}: the session has ended"_message, name_);
    loop_.add_fd(connection->socket.get(), EPOLLRDHUP, [this, connection](uint32_t events) {
      loop_.remove_fd(connection->socket.get());
      if ((events & EPOLLHUP) == 0) connection->given_up.request_stop();  // the worker still receives the answer
    });
    // Shared, since a std::function is copied.
    const auto call = std::make_shared<const Frame>(std::move(frame));
    tasks_.run("tessera-call", [this, session = session_, serving, connection, call] {
      try {
        session->serve(*connection, *call);
      } catch (...) {
        connection->answer(CallFailed{.status = status_of_current_exception()});
      }
      loop_.post([this, connection] { loop_.remove_fd(connection->socket.get()); });
    });
  }

  void open(const std::shared_ptr<WorkerConnection>& connection, Frame frame) {
    auto wanted = read_message<OpenSession>(frame.payload, "a worker's Open");
    if (!wanted.speaks_ours())
      fail(ErrorCode::kMismatch,
           "the agent is release {} with protocol {}, the worker release {} with protocols {} to {}"_message,
           tessera::kVersion, kAgentProtocol, wanted.release, wanted.protocol_min, wanted.protocol_max);
    const BusOptions& bus = wanted.options;
    if (bus.name_space != options_.name_space || bus.job != options_.job || bus.rank != options_.rank)
      fail(ErrorCode::kMismatch, "this is the agent of {} in namespace {}, not of {} in {}"_message, name_,
           options_.name_space, rank_name(bus.job, bus.rank), bus.name_space);
    if (frame.fds.size() != 1) fail(ErrorCode::kInvalidArgument, "Open with {} descriptors"_message, frame.fds.size());
    const std::shared_ptr<CommandMemory> memory = CommandMemory::open(std::move(frame.fds.front()), "the worker");
    end_session_that_was_left();
    if (session_)
      fail(ErrorCode::kAlreadyExists, "agent of {}: it works for {} already, and {} wants it, too"_message, name_,
           session_->name(), wanted.worker.to_string());
    const Timeout timeout = wanted.options.timeout;
    session_ = std::make_shared<WorkerSession>(std::move(wanted), connection);
    const UniqueFd& pidfd = pidfd_ = open_pidfd(session_->worker());
    if (pidfd)
      loop_.add_fd(pidfd.get(), EPOLLIN, [this](uint32_t) {
        log_event(LogLevel::info, "worker.gone", {}, "agent of {}: {} has died", name_, session_->name());
        drop(session_->connection()->socket.get());
        leave(true);
      });
    const auto serving = WorkerSession::Serving::begin(session_);
    tasks_.run("tessera-open", [this, session = session_, serving, memory, deadline = Deadline::after(timeout)] {
      try {
        await_turn(session, deadline);
        session->open(memory);
        session->connection()->answer(SessionOpened{.protocol = kAgentProtocol,
                                                    .release = tessera::kVersion,
                                                    .session = session->number(),
                                                    .agent = Incarnation::self()});
      } catch (...) {
        session->connection()->answer(CallFailed{.status = status_of_current_exception()});
        loop_.post([this, session] {
          if (session_ != session) return;
          drop(session->connection()->socket.get());
          leave(false);
        });
      }
    });
  }

  // The worker has gone, or is about to; `vanished`: without saying so.
  void leave(bool vanished) {
    const std::shared_ptr<WorkerSession> session = std::exchange(session_, nullptr);
    if (pidfd_) loop_.remove_fd(pidfd_.get());
    pidfd_.reset();
    session->retire();
    wake();
    leaving_.post([this, session, vanished] {
      try {
        session->end(vanished);
        session->connection()->answer(AgentMessage::kClosed);
      } catch (...) {
        log_event(LogLevel::err, "session.unended", {}, "agent of {}: {}: ending its session: {}"_message, name_,
                  session->name(), status_of_current_exception().message());
      }
      const MutexLock lock(mutex_);
      if (current_ == session) current_.reset();
      changed_.notify_all();
    });
  }

  // --- any thread ---

  void wake() {
    const MutexLock lock(mutex_);  // a thread that checks whether to wait holds it
    changed_.notify_all();
  }

  // Only one session at a time has the rank's place in the store.
  void await_turn(const std::shared_ptr<WorkerSession>& session, Deadline deadline) {
    const MutexLock lock(mutex_);
    if (const std::shared_ptr<WorkerSession> before = current_) {
      const MutexUnlock unlocked(mutex_);
      before->hasten();
    }
    const auto turn = [&]() REQUIRES(mutex_) { return current_ == nullptr || session->stop_requested(); };
    if (!changed_.wait_until(mutex_, deadline, turn))
      fail(ErrorCode::kDeadlineExceeded, "agent of {}: what {} had posted is still being sent"_message, name_,
           current_->name());
    if (session->stop_requested()) fail(ErrorCode::kCancelled, "agent of {}: interrupted"_message, name_);
    current_ = session;
  }

  const DaemonOptions options_;
  const std::string name_;
  RuntimeDir runtime_dir_;
  std::string address_;
  std::optional<Listener> listener_;
  // Ends sessions one after another, which blocks. The thread is made in advance, so that a rank is released even if
  // the process may start no more threads.
  EventLoop leaving_{"tessera-leave"};
  EventLoop loop_;
  Tasks tasks_;
  // On the loop's thread:
  uint64_t next_connection_ = 1;
  std::map<int, std::shared_ptr<WorkerConnection>> connections_;  // connections being read, by descriptor
  std::shared_ptr<WorkerSession> session_;                        // of the present worker
  UniqueFd pidfd_;                                                // the same worker's
  Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<WorkerSession> current_
      GUARDED_BY(mutex_);  // the session with the rank's place; its worker may have gone
};

Daemon::Daemon(DaemonOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Daemon::~Daemon() = default;

const std::string& Daemon::address() const {
  return impl_->address();
}

}  // namespace tessera::bus
