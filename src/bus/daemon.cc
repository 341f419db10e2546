#include "bus/daemon.h"

#include <sys/epoll.h>
#include <sys/stat.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/fail.h"
#include "base/framing.h"
#include "base/log.h"
#include "base/process.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "base/thread.h"
#include "bus/agent_protocol.h"
#include "bus/batch.h"
#include "bus/command_server.h"
#include "bus/embedded.h"
#include "bus/local_tensors.h"
#include "bus/records.h"
#include "device/shared_arena.h"
#include "tessera/memory.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

constexpr Duration kAnswerTimeout = seconds(10);  // for a worker to read an answer
constexpr Duration kPauseOfAccepting = seconds(0.2);
constexpr size_t kMaxConnections = 256;
constexpr size_t kMaxArenasOfBatch = 1 << 14;  // of a registration

uint64_t draw_number() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

// Threads that each do one thing, joined as they end.
class Tasks {
 public:
  ~Tasks() { finish(); }
  void run(const std::string& name, std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    join_ended();
    const uint64_t id = next_id_++;
    threads_.emplace(id, start_thread(name, [this, id, task = std::move(task)] {
                       task();
                       const std::lock_guard ended_lock(mutex_);
                       ended_.push_back(id);
                     }));
  }
  // Waits for all. Nothing may be started any more.
  void finish() {
    while (true) {
      std::map<uint64_t, std::thread> threads;
      {
        const std::lock_guard lock(mutex_);
        threads = std::exchange(threads_, {});
        ended_.clear();
      }
      if (threads.empty()) return;
      for (auto& [id, thread] : threads) thread.join();
    }
  }

 private:
  void join_ended() {  // REQUIRES: mutex_ is held
    for (const uint64_t id : std::exchange(ended_, {})) {
      const auto it = threads_.find(id);
      if (it == threads_.end()) continue;
      it->second.join();  // it has nothing left to do
      threads_.erase(it);
    }
  }

  std::mutex mutex_;
  std::map<uint64_t, std::thread> threads_;
  std::vector<uint64_t> ended_;
  uint64_t next_id_ = 1;
};

// A connection of a worker. The loop reads from it, whoever handles its request writes.
struct Connection {
  explicit Connection(UniqueFd connected) : socket(std::move(connected)) {}
  UniqueFd socket;
  FrameReader reader{kAgentMagic, {.payload_bytes = kMaxAgentFrame, .fds = kMaxFdsPerMessage}};
  std::vector<UniqueFd> arenas;

  template <typename Message>
  void answer(const Message& message) noexcept {
    answer(Message::kType, message_bytes(message));
  }
  void answer(AgentMessage type, std::span<const std::byte> payload = {}) noexcept {
    try {
      FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
      writer.push(static_cast<uint16_t>(type), payload);
      writer.flush(socket.get(), Deadline::after(kAnswerTimeout));
    } catch (const Error& error) {
      log().info("agent: an answer cannot be given: {}", error.what());
    }
  }
};

// What a worker has opened: a bus, and what it registered there.
class WorkerSession : public std::enable_shared_from_this<WorkerSession> {
 public:
  WorkerSession(OpenSession open, std::shared_ptr<Connection> connection)
      : number_(draw_number()),
        worker_(std::move(open.worker)),
        options_(std::move(open.options)),
        connection_(std::move(connection)) {
    options_.agent = kEmbeddedAgent;
    options_.stop = stop_.get_token();
  }

  uint64_t number() const { return number_; }
  const Incarnation& worker() const { return worker_; }
  const std::shared_ptr<Connection>& connection() const { return connection_; }
  std::string name() const { return fmt::format("the worker {}", worker_.to_string()); }
  // Ends all that waits for other ranks to come.
  void request_stop() { stop_.request_stop(); }
  bool stop_requested() const { return stop_.stop_requested(); }
  // The worker has gone: no call is begun any more, and those that wait end.
  void retire() {
    {
      const std::lock_guard lock(mutex_);
      retired_ = true;
    }
    stop_.request_stop();
  }

  // Connects and claims, and takes commands from then on. Blocks.
  void open(const std::shared_ptr<CommandMemory>& memory) {
    bus_ = open_embedded(complete(options_));
    log_ = std::make_shared<CommandLog>(memory->incarnation());
    commands_ = std::make_unique<CommandServer>(
        memory, log_, name(), [this](const Command& command, Replier& replier) { execute(command, replier); });
  }

  // A call of the worker, whose frame names this session. Blocks. Returns the answer's type and payload.
  void serve(Connection& connection, const Frame& frame) {
    ByteReader in(frame.payload, name());
    switch (static_cast<AgentMessage>(frame.type)) {
      case AgentMessage::kPair: {
        const auto call = read_message<PairCall>(frame.payload, name());
        check(options_, call.options);
        std::shared_ptr<PairClient> pair = bus_->pair(call.options);
        const int peer_world = pair->peer_world();
        const std::lock_guard lock(mutex_);
        pairs_.emplace(++last_number_, std::move(pair));
        return connection.answer(Paired{.pair = last_number_, .peer_world = peer_world});
      }
      case AgentMessage::kManifest: {
        const auto call = read_message<ManifestCall>(frame.payload, name());
        return connection.answer(Offered{.manifest = {.entries = pair(call.pair)->manifest(call.batch, call.timeout)}});
      }
      case AgentMessage::kRegister: {
        const uint32_t number = register_batch(read_message<RegisterCall>(frame.payload, name()), connection.arenas);
        return connection.answer(Registered{.batch = number});
      }
      case AgentMessage::kDigests: {
        const auto call = read_message<ObjectCall>(frame.payload, name());
        return connection.answer(DigestList{.digests = batch(call.object)->digests()});
      }
      default:
        return connection.answer(Number{.value = number_call(frame, read_message<ObjectCall>(frame.payload, name()))});
    }
  }

  // From now on sends that nobody has begun to take are not waited for: another worker has come.
  void hasten() {
    std::vector<std::shared_ptr<Operation>> operations;
    {
      const std::lock_guard lock(mutex_);
      hastened_ = true;
      for (const auto& [id, operation] : operations_) operations.push_back(operation);
    }
    for (const auto& operation : operations) cancel(*operation);
  }

  // Finishes what the worker had posted from shared memory and gives everything back. Blocks. REQUIRES: retired.
  void end() {
    if (commands_) commands_->close(failed(ErrorCode::kCancelled, "{} has gone", name()));
    std::map<uint32_t, Registered_> batches;
    std::vector<std::shared_ptr<Operation>> operations;
    {
      std::unique_lock lock(mutex_);
      idle_.wait(lock, [this] { return serving_ == 0; });  // all that waits has been told to stop
      batches = std::exchange(batches_, {});
      for (const auto& [id, operation] : operations_) operations.push_back(operation);
    }
    for (auto& [number, registered] : batches)
      if (!registered.sends) close(*registered.batch);
    for (const auto& operation : operations) {
      {
        const std::lock_guard lock(mutex_);
        if (!hastened_ && !operation->done())
          log().info("{} is gone; its send of version {} goes on", name(), operation->version());
      }
      if (hastened()) cancel(*operation);
      operation->wait_for(std::chrono::hours(1));  // each ends at its own deadline
    }
    operations.clear();
    for (auto& [number, registered] : batches) close(*registered.batch);
    batches.clear();
    commands_.reset();
    {
      const std::lock_guard lock(mutex_);
      pairs_.clear();
    }
    bus_.reset();
  }

  // Calls that are being served: none is begun once the session ends.
  bool begin_serving() {
    const std::lock_guard lock(mutex_);
    if (retired_) return false;
    ++serving_;
    return true;
  }
  void end_serving() {
    const std::lock_guard lock(mutex_);
    --serving_;
    idle_.notify_all();
  }

 private:
  struct Registered_ {
    std::shared_ptr<BatchImpl> batch;
    std::vector<std::shared_ptr<SharedArena>> arenas;  // what its tensors lie in
    bool sends = false;
  };

  bool hastened() {
    const std::lock_guard lock(mutex_);
    return hastened_;
  }
  static void cancel(Operation& operation) {
    try {
      operation.cancel();
    } catch (const Error& error) {
      log().info("agent: {}", error.what());
    }
  }
  static void close(BatchImpl& batch) {
    try {
      batch.close();
    } catch (const Error& error) {
      log().warn("agent: {}", error.what());
    }
  }

  std::shared_ptr<PairClient> pair(uint32_t number) {
    const std::lock_guard lock(mutex_);
    const auto it = pairs_.find(number);
    if (it == pairs_.end()) fail(ErrorCode::kNotFound, "agent: {} has no pair {}", name(), number);
    return it->second;
  }
  std::shared_ptr<BatchImpl> batch(uint32_t number) {
    const std::lock_guard lock(mutex_);
    const auto it = batches_.find(number);
    if (it == batches_.end()) fail(ErrorCode::kNotFound, "agent: {} has no batch {}", name(), number);
    return it->second.batch;
  }

  int64_t number_call(const Frame& frame, const ObjectCall& call) {
    switch (static_cast<AgentMessage>(frame.type)) {
      case AgentMessage::kCommit:
        return batch(call.object)->commit();
      case AgentMessage::kWaitVersion:
        return batch(call.object)->wait_version(call.version, call.timeout);
      case AgentMessage::kWithdraw:
        return batch(call.object)->withdraw(call.version) ? 1 : 0;
      case AgentMessage::kCloseBatch: {
        batch(call.object)->close();
        Registered_ closed;
        const std::lock_guard lock(mutex_);
        closed = std::move(batches_.extract(call.object).mapped());
        return 1;
      }
      case AgentMessage::kClosePair: {
        std::shared_ptr<PairClient> closed = pair(call.object);
        const std::lock_guard lock(mutex_);
        pairs_.erase(call.object);
        return 1;
      }
      default:
        fail(ErrorCode::kInvalidArgument, "agent: message {} is no call", frame.type);
    }
  }

  uint32_t register_batch(RegisterCall call, const std::vector<UniqueFd>& fds) {
    const std::shared_ptr<PairClient> with = pair(call.pair);
    std::vector<std::shared_ptr<SharedArena>> arenas;
    for (const UniqueFd& fd : fds) arenas.push_back(SharedHeap::process().adopt(fd.get(), !call.sends, name()));
    const Identity identity{options_.name_space, options_.job, options_.rank, options_.world};
    std::vector<TensorSpec> specs;
    for (RegisterCall::Tensor& tensor : call.tensors) {
      if (tensor.place) {
        if (tensor.place->arena >= arenas.size() || tensor.place->offset > arenas[tensor.place->arena]->bytes())
          fail(ErrorCode::kInvalidArgument, "tensor {}: it lies at {} of arena {}, which {} has not given",
               tensor.spec.name, tensor.place->offset, tensor.place->arena, name());
        tensor.spec.data = arenas[tensor.place->arena]->data() + tensor.place->offset;
      }
      specs.push_back(std::move(tensor.spec));
    }
    const std::vector<LocalTensor> tensors =
        registered_tensors(manifest_of(identity, specs, with->layout()), specs, identity.rank);
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].empty()) continue;
      const SharedArena& arena = *arenas[call.tensors[i].place->arena];
      const ByteExtent extent = tensors[i].extent();
      const auto offset = static_cast<int64_t>(call.tensors[i].place->offset);
      if (offset + extent.begin < 0 || extent.end > static_cast<int64_t>(arena.bytes()) - offset)
        fail(ErrorCode::kInvalidArgument, "tensor {}: its bytes {} to {} around {} are not within the {} of its arena",
             tensors[i].name, extent.begin, extent.end, offset, arena.bytes());
    }
    std::shared_ptr<BatchImpl> batch =
        embedded_batch(with->register_batch(call.batch, specs, call.sends, call.timeout, call.options));
    const std::lock_guard lock(mutex_);
    batches_.emplace(++last_number_, Registered_{std::move(batch), std::move(arenas), call.sends});
    return last_number_;
  }

  // --- commands, on the queue's thread ---

  void execute(const Command& command, Replier& replier) {
    switch (static_cast<AgentCommand>(command.type)) {
      case AgentCommand::kSend:
      case AgentCommand::kRecv:
      case AgentCommand::kStage:
        return transfer(command, replier);
      case AgentCommand::kCancel: {
        const auto operation = this->operation(read_message<CommandId>(command.payload, name()).id);
        return replier.succeed(message_bytes(Number{operation && operation->cancel() ? 1 : 0}));
      }
      case AgentCommand::kProgress: {
        const auto operation = this->operation(read_message<CommandId>(command.payload, name()).id);
        return replier.succeed(message_bytes(operation ? state_of(*operation) : ended_state()));
      }
      case AgentCommand::kState: {
        const auto found = batch(read_message<BatchNumber>(command.payload, name()).batch);
        return replier.succeed(message_bytes(BatchState{.version = found->version(),
                                                        .newest = found->newest(),
                                                        .torn = found->torn(),
                                                        .undecided = found->undecided()}));
      }
      case AgentCommand::kStats: {
        ByteWriter out;
        write_stats(batch(read_message<BatchNumber>(command.payload, name()).batch)->stats(), out);
        return replier.succeed(out.view());
      }
    }
    fail(ErrorCode::kInvalidArgument, "agent: command {} is unknown", command.type);
  }

  void transfer(const Command& command, Replier& replier) {
    const auto wanted = read_message<TransferCommand>(command.payload, name());
    const std::shared_ptr<BatchImpl> with = batch(wanted.batch);
    const auto type = static_cast<AgentCommand>(command.type);
    const std::shared_ptr<Operation> operation =
        embedded_operation(type == AgentCommand::kSend   ? with->send(wanted.version, wanted.timeout)
                           : type == AgentCommand::kRecv ? with->recv(wanted.version, wanted.timeout)
                                                         : with->stage(wanted.version, wanted.timeout));
    {
      const std::lock_guard lock(mutex_);
      operations_[command.id] = operation;
    }
    operation->on_end(
        [self = shared_from_this(), operation, id = command.id, owed = std::make_shared<Replier>(std::move(replier))] {
          owed->succeed(message_bytes(state_of(*operation)));
          const std::lock_guard lock(self->mutex_);
          self->operations_.erase(id);
        });
  }

  std::shared_ptr<Operation> operation(uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto it = operations_.find(id);
    return it == operations_.end() ? nullptr : it->second;
  }

  static OperationState ended_state() {
    OperationState state;
    state.done = true;
    return state;
  }
  static OperationState state_of(Operation& operation) {
    OperationState state;
    state.done = operation.done();
    if (state.done) {
      try {
        operation.wait();
      } catch (const Error& error) {
        state.status = Status(error.code(), error.what());
      }
    }
    state.version = operation.version();
    state.progress = operation.progress();
    return state;
  }

  const uint64_t number_;
  const Incarnation worker_;
  BusOptions options_;
  const std::shared_ptr<Connection> connection_;
  std::stop_source stop_;
  std::shared_ptr<BusClient> bus_;
  std::shared_ptr<CommandLog> log_;
  std::unique_ptr<CommandServer> commands_;
  std::mutex mutex_;  // what follows
  std::condition_variable idle_;
  int serving_ = 0;
  bool retired_ = false;
  bool hastened_ = false;
  uint32_t last_number_ = 0;
  std::map<uint32_t, std::shared_ptr<PairClient>> pairs_;
  std::map<uint32_t, Registered_> batches_;
  std::map<uint64_t, std::shared_ptr<Operation>> operations_;  // under way, by command
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
    listener_ = listen_unix(address_);
    // Looked for once the own one is there: of two that come at a time, one sees the other at least.
    for (const std::string& other : RuntimeDir::living_files(runtime_dir_.root(), socket))
      if (other != address_)
        fail(ErrorCode::kAlreadyExists, "{} has an agent here already, which listens at {}", name_, other);
    loop_.post([this] { listen(); });
    loop_.start();
  }

  ~Impl() {
    loop_.post([this] {
      loop_.remove_fd(listener_.get());
      while (!connections_.empty()) drop(connections_.begin()->first);
      std::shared_ptr<WorkerSession> of_one_that_has_gone;
      {
        const std::lock_guard lock(mutex_);
        of_one_that_has_gone = current_;
        stopped_ = true;
      }
      if (of_one_that_has_gone) of_one_that_has_gone->hasten();
      if (session_) leave();
      changed_.notify_all();
    });
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopped_; });  // a task of the loop: it does not block
    }
    tasks_.finish();
    loop_.stop();
  }

  const std::string& address() const { return address_; }

 private:
  // --- on the loop's thread ---

  void listen() {
    loop_.add_fd(listener_.get(), EPOLLIN, [this](uint32_t) { accept(); });
  }

  void accept() {
    try {
      while (UniqueFd socket = accept_connection(listener_.get())) {
        require_same_user(socket.get());
        if (connections_.size() >= kMaxConnections)
          fail(ErrorCode::kResourceExhausted, "agent: more than {} connections", kMaxConnections);
        const int fd = socket.get();
        auto connection = std::make_shared<Connection>(std::move(socket));
        connections_.emplace(fd, connection);
        loop_.add_fd(fd, EPOLLIN | EPOLLRDHUP, [this, connection](uint32_t) { read(connection); });
      }
    } catch (const Error& error) {
      log().warn("agent of {}: a connection is refused: {}", name_, error.what());
      if (error.code() != ErrorCode::kResourceExhausted) return;
      loop_.remove_fd(listener_.get());
      loop_.add_timer_after(kPauseOfAccepting, [this] { listen(); });
    }
  }

  void drop(int fd) {
    loop_.remove_fd(fd);
    connections_.erase(fd);
  }

  void read(const std::shared_ptr<Connection>& connection) {
    const bool in_session = session_ && session_->connection() == connection;
    try {
      const bool open = connection->reader.fill(connection->socket.get());
      Frame frame;
      while (connections_.contains(connection->socket.get()) && connection->reader.next(frame))
        handle(connection, std::exchange(frame, {}));
      if (open) return;
      if (in_session) log().info("agent of {}: {} has closed its connection", name_, session_->name());
    } catch (const Error& error) {
      log().warn("agent of {}: a connection is closed: {}", name_, error.what());
      connection->answer(CallFailed{.status = Status(error.code(), error.what())});
    }
    drop(connection->socket.get());
    if (in_session && session_) leave();
  }

  void handle(const std::shared_ptr<Connection>& connection, Frame frame) {
    const auto type = static_cast<AgentMessage>(frame.type);
    if (session_ && session_->connection() == connection) {
      if (type == AgentMessage::kStop) {
        session_->request_stop();
        return wake();
      }
      if (type != AgentMessage::kClose) fail(ErrorCode::kInvalidArgument, "message {} in a session", frame.type);
      drop(connection->socket.get());
      return leave();
    }
    if (type == AgentMessage::kOpen) return open(connection, std::move(frame));
    ByteReader in(frame.payload, "a worker's call");
    const auto number = in.get<uint64_t>();
    if (!session_ || session_->number() != number)
      fail(ErrorCode::kNotFound, "agent of {}: there is no such session any more", name_);
    if (type == AgentMessage::kArenas) {
      for (UniqueFd& fd : frame.fds) connection->arenas.push_back(std::move(fd));
      if (connection->arenas.size() > kMaxArenasOfBatch)
        fail(ErrorCode::kResourceExhausted, "more than {} arenas", kMaxArenasOfBatch);
      return;
    }
    drop(connection->socket.get());  // it has said all; the answer follows
    if (!session_->begin_serving()) fail(ErrorCode::kCancelled, "agent of {}: the session has ended", name_);
    // Shared, as a std::function is copied.
    const auto call = std::make_shared<const Frame>(std::move(frame));
    tasks_.run("tessera-call", [session = session_, connection, call] {
      try {
        session->serve(*connection, *call);
      } catch (...) {
        connection->answer(CallFailed{.status = status_of_current_exception()});
      }
      session->end_serving();
    });
  }

  void open(const std::shared_ptr<Connection>& connection, Frame frame) {
    auto wanted = read_message<OpenSession>(frame.payload, "a worker's Open");
    if (wanted.protocol_min > kAgentProtocol || wanted.protocol_max < kAgentProtocol)
      fail(ErrorCode::kMismatch,
           "the agent is release {} with protocol {}, the worker release {} with protocols {} to {}", tessera::kVersion,
           kAgentProtocol, wanted.release, wanted.protocol_min, wanted.protocol_max);
    const BusOptions& bus = wanted.options;
    if (bus.name_space != options_.name_space || bus.job != options_.job || bus.rank != options_.rank)
      fail(ErrorCode::kMismatch, "this is the agent of {} in namespace {}, not of {} in {}", name_, options_.name_space,
           rank_name(bus.job, bus.rank), bus.name_space);
    if (frame.fds.size() != 1) fail(ErrorCode::kInvalidArgument, "Open with {} descriptors", frame.fds.size());
    const std::shared_ptr<CommandMemory> memory = CommandMemory::open(std::move(frame.fds.front()), "the worker");
    if (session_)
      fail(ErrorCode::kAlreadyExists, "agent of {}: it works for {} already, and {} wants it, too", name_,
           session_->name(), wanted.worker.to_string());
    const Timeout timeout = wanted.options.timeout;
    session_ = std::make_shared<WorkerSession>(std::move(wanted), connection);
    const UniqueFd& pidfd = pidfd_ = open_pidfd(session_->worker());
    if (pidfd)
      loop_.add_fd(pidfd.get(), EPOLLIN, [this](uint32_t) {
        log().info("agent of {}: {} has died", name_, session_->name());
        drop(session_->connection()->socket.get());
        leave();
      });
    if (!session_->begin_serving()) return;
    tasks_.run("tessera-open", [this, session = session_, memory, deadline = Deadline::after(timeout)] {
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
          leave();
        });
      }
      session->end_serving();
    });
  }

  // The worker is not there any more, or will not be.
  void leave() {
    const std::shared_ptr<WorkerSession> session = std::exchange(session_, nullptr);
    if (pidfd_) loop_.remove_fd(pidfd_.get());
    pidfd_.reset();
    session->retire();
    wake();
    tasks_.run("tessera-leave", [this, session] {
      session->end();
      session->connection()->answer(AgentMessage::kClosed);
      const std::lock_guard lock(mutex_);
      if (current_ == session) current_.reset();
      changed_.notify_all();
    });
  }

  // --- any thread ---

  void wake() {
    const std::lock_guard lock(mutex_);  // whoever looks whether it is to wait has it
    changed_.notify_all();
  }

  // One session at a time has the rank's place in the store.
  void await_turn(const std::shared_ptr<WorkerSession>& session, Deadline deadline) {
    std::unique_lock lock(mutex_);
    if (current_) {
      const std::shared_ptr<WorkerSession> before = current_;
      lock.unlock();
      before->hasten();
      lock.lock();
    }
    const auto turn = [&] { return current_ == nullptr || session->stop_requested(); };
    if (!changed_.wait_until(lock, deadline.when(), turn))
      fail(ErrorCode::kDeadlineExceeded, "agent of {}: what {} had posted is still being sent", name_,
           current_->name());
    if (session->stop_requested()) fail(ErrorCode::kCancelled, "agent of {}: interrupted", name_);
    current_ = session;
  }

  const DaemonOptions options_;
  const std::string name_;
  RuntimeDir runtime_dir_;
  std::string address_;
  UniqueFd listener_;
  EventLoop loop_;
  Tasks tasks_;
  // On the loop's thread:
  std::map<int, std::shared_ptr<Connection>> connections_;  // that are read, by descriptor
  std::shared_ptr<WorkerSession> session_;                  // of the worker that is there
  UniqueFd pidfd_;                                          // of that worker
  std::mutex mutex_;                                        // what follows
  std::condition_variable changed_;
  std::shared_ptr<WorkerSession> current_;  // that has the rank's place, perhaps of a worker that has gone
  bool stopped_ = false;
};

Daemon::Daemon(DaemonOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Daemon::~Daemon() = default;

const std::string& Daemon::address() const {
  return impl_->address();
}

}  // namespace tessera::bus
