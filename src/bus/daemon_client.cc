#include "bus/daemon_client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/fail.h"
#include "base/framing.h"
#include "base/log.h"
#include "base/process.h"
#include "base/runtime_dir.h"
#include "base/socket.h"
#include "base/thread.h"
#include "bus/agent_protocol.h"
#include "bus/command_client.h"
#include "bus/local_tensors.h"
#include "bus/mirror.h"
#include "bus/own_process.h"
#include "bus/records.h"
#include "device/shared_arena.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

constexpr Timeout kGrace = std::chrono::seconds(10);    // beyond a call's own timeout, for the agent to answer
constexpr Timeout kCopying = std::chrono::minutes(10);  // a commit; closing a batch whose transfer must end
constexpr Duration kQueueTimeout = seconds(5);          // a command that is answered at once
constexpr Duration kWaits = std::chrono::hours(1);      // of another thread for the same operation
constexpr Duration kLook = seconds(10);                 // after which an agent that says nothing is asked
constexpr Duration kLookForSocket = seconds(0.05);
constexpr Duration kRemindAfter = seconds(10);

// Grows without overflow.
Timeout longer(Timeout timeout, Timeout by) {
  return timeout > Timeout::max() - by ? Timeout::max() : timeout + by;
}

class DaemonBus final : public BusClient, public std::enable_shared_from_this<DaemonBus> {
 public:
  explicit DaemonBus(BusOptions options)
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

  ~DaemonBus() override {
    on_stop_.reset();
    const uint64_t one = 1;
    (void)!::write(end_.get(), &one, sizeof(one));
    watcher_.join();
    commands_.reset();
    if (!lost().ok()) return;
    try {  // what this rank holds in the store goes before this returns
      tell(AgentMessage::kClose);
      wait_frame(socket_.get(), reader_, Deadline::after(kGrace));
    } catch (const Error& error) {
      log().info("{}: closing: {}", agent_name_, error.what());
    }
  }

  const BusOptions& options() const override { return options_; }
  void require_own_process() const override { process_.require(identity_.name()); }
  bool in_own_process() const override { return process_.here(); }
  bool alive() const override { return lost().ok(); }
  std::shared_ptr<PairClient> pair(const PairOptions& options) override;

  const Identity& identity() const { return identity_; }
  const std::string& agent_name() const { return agent_name_; }
  CommandClient& commands() { return *commands_; }
  uint64_t session() const { return session_; }

  // Sends `message` as a `type` on a connection of its own and waits for its answer. Throws what the agent answered.
  template <typename Answer, typename Message>
  Answer call(AgentMessage type, const Message& message, Timeout timeout,
              std::span<const std::shared_ptr<SharedArena>> arenas = {}) {
    const Frame frame = exchange(type, message_bytes(message), Answer::kType, timeout, arenas);
    return read_message<Answer>(frame.payload, agent_name_);
  }
  // A command that is answered at once.
  template <typename Message>
  std::vector<std::byte> ask(AgentCommand command, const Message& message) {
    require_own_process();
    return commands_->call(static_cast<uint16_t>(command), message_bytes(message), Deadline::after(kQueueTimeout));
  }

  void mention_copies(uint64_t bytes) {
    if (mentioned_.exchange(true)) return;
    log().info(
        "{}: tensors in private memory ({} bytes) are copied to and from what its agent sees; tensors that "
        "SharedHeap allocates are not",
        identity_.name(), bytes);
  }

 private:
  // A connection to the daemon that runs, or begins to.
  UniqueFd find(Deadline deadline) {
    const std::string name = agent_socket_name(options_.name_space, options_.job, options_.rank);
    const std::string root = RuntimeDir::prepare_root();
    TimePoint reminded = Clock::steady().now();
    while (true) {
      std::string what = fmt::format("no agent of namespace {} runs under {}", options_.name_space, root);
      for (const std::string& path : RuntimeDir::living_files(root, name)) {
        address_ = path;
        try {
          return connect(deadline);
        } catch (const Error& error) {  // one that has bound its socket does not listen yet; another may be ending
          if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kUnavailable) throw;
          what = error.what();
        }
      }
      const std::string missing =
          fmt::format("{}: {}: start tessera agent --job {} --rank {}, with the same TESSERA_RUNTIME_DIR",
                      identity_.name(), what, options_.job, options_.rank);
      if (options_.stop.stop_requested()) fail(ErrorCode::kCancelled, "{}: interrupted", missing);
      if (deadline.passed()) fail(ErrorCode::kUnavailable, "{}", missing);
      if (Clock::steady().now() - reminded >= kRemindAfter) {
        reminded = Clock::steady().now();
        log().warn("{}", missing);
      }
      std::this_thread::sleep_for(std::min(kLookForSocket, deadline.left()));
    }
  }

  UniqueFd connect(Deadline deadline) const {
    try {
      UniqueFd socket = connect_unix(address_, deadline);
      require_same_user(socket.get());
      return socket;
    } catch (const Error& error) {
      const Status why = lost();
      if (!why.ok()) throw Error(why.code(), why.message());
      throw Error(error.code() == ErrorCode::kNotFound ? ErrorCode::kPeerLost : error.code(),
                  fmt::format("{}: {}", agent_name_, error.what()));
    }
  }

  void open(UniqueFd socket) {
    const Incarnation self = Incarnation::next();
    const std::shared_ptr<CommandMemory> memory = CommandMemory::create(self.nonce);
    socket_ = std::move(socket);
    FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
    std::vector<UniqueFd> fds;
    fds.push_back(duplicate_fd(memory->fd()));
    const OpenSession open{.release = tessera::kVersion, .worker = self, .options = options_};
    writer.push(static_cast<uint16_t>(AgentMessage::kOpen), message_bytes(open), std::move(fds));
    const Deadline answer = Deadline::after(longer(options_.timeout, kGrace));
    writer.flush(socket_.get(), answer);
    std::optional<std::stop_callback<std::function<void()>>> stop;
    stop.emplace(options_.stop, [this] { tell(AgentMessage::kStop); });
    const Frame frame = wait_answer(socket_.get(), reader_, AgentMessage::kOpened, answer);
    stop.reset();
    const auto opened = read_message<SessionOpened>(frame.payload, agent_name_);
    if (opened.protocol != kAgentProtocol)
      fail(ErrorCode::kMismatch, "{}: it answers with protocol {}, release {}; this is release {} with protocol {}",
           agent_name_, opened.protocol, opened.release, tessera::kVersion, kAgentProtocol);
    session_ = opened.session;
    pidfd_ = open_pidfd(opened.agent);
    agent_name_ += fmt::format(" (pid {})", opened.agent.pid);
    commands_ = std::make_unique<CommandClient>(memory, agent_name_);
  }

  // A frame without contents on the session's connection. Never blocks for long; any thread.
  void tell(AgentMessage type) noexcept {
    const std::lock_guard lock(tell_mutex_);
    try {
      FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
      writer.push(static_cast<uint16_t>(type), {});
      writer.flush(socket_.get(), Deadline::after(seconds(1)));
    } catch (const Error& error) {
      log().info("{}: {}", agent_name_, error.what());
    }
  }

  Frame wait_answer(int socket, FrameReader& reader, AgentMessage expected, Deadline deadline) const {
    Frame frame;
    try {
      frame = wait_frame(socket, reader, deadline);
    } catch (const Error& error) {
      const char* hint = error.code() == ErrorCode::kDeadlineExceeded ? " does not answer; is it stopped?" : "";
      throw Error(error.code(), fmt::format("{}{}: {}", agent_name_, hint, error.what()));
    }
    if (frame.type == static_cast<uint16_t>(AgentMessage::kFailed))
      read_message<CallFailed>(frame.payload, agent_name_).status.throw_if_error();
    if (frame.type != static_cast<uint16_t>(expected))
      fail(ErrorCode::kMismatch, "{}: message {} where {} was to come", agent_name_, frame.type,
           static_cast<int>(expected));
    return frame;
  }

  Frame exchange(AgentMessage type, std::span<const std::byte> payload, AgentMessage expected, Timeout timeout,
                 std::span<const std::shared_ptr<SharedArena>> arenas) {
    require_own_process();
    lost().throw_if_error();
    const Deadline deadline = Deadline::after(longer(timeout, kGrace));
    const UniqueFd socket = connect(deadline);
    FrameWriter writer(kAgentMagic, kAgentProtocol, kMaxAgentFrame);
    for (size_t i = 0; i < arenas.size(); i += kMaxFdsPerMessage) {
      std::vector<UniqueFd> fds;
      for (const auto& arena : arenas.subspan(i, std::min(kMaxFdsPerMessage, arenas.size() - i)))
        fds.push_back(duplicate_fd(arena->fd_for_agent()));
      writer.push(static_cast<uint16_t>(AgentMessage::kArenas), message_bytes(Arenas{.session = session_}),
                  std::move(fds));
      writer.flush(socket.get(), deadline);
    }
    writer.push(static_cast<uint16_t>(type), payload);
    writer.flush(socket.get(), deadline);
    FrameReader reader(kAgentMagic, {.payload_bytes = kMaxAgentFrame});
    return wait_answer(socket.get(), reader, expected, deadline);
  }

  // Until the bus goes, or the agent does.
  void watch() {
    pollfd fds[] = {{end_.get(), POLLIN, 0}, {socket_.get(), POLLRDHUP, 0}, {pidfd_ ? pidfd_.get() : -1, POLLIN, 0}};
    while (true) {
      if (::poll(fds, 3, -1) < 0) continue;
      if (fds[0].revents != 0) return;
      if (fds[1].revents == 0 && fds[2].revents == 0) continue;
      Status status = failed(ErrorCode::kPeerLost, "{} {}: make a new Bus once one runs again", agent_name_,
                             fds[2].revents != 0 ? "has died" : "has ended the session");
      {
        const std::lock_guard lock(mutex_);
        lost_ = status;
      }
      log().warn("{}", status.message());
      commands_->close(status);
      return;
    }
  }

  Status lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
  }

  const OwnProcess process_;
  const BusOptions options_;
  const Identity identity_;
  std::string agent_name_;
  const UniqueFd end_;  // an eventfd: the watcher is to end
  std::string address_;
  UniqueFd socket_;  // of the session
  UniqueFd pidfd_;   // empty where the agent's pid is not visible
  FrameReader reader_{kAgentMagic, {.payload_bytes = kMaxAgentFrame}};
  uint64_t session_ = 0;
  std::unique_ptr<CommandClient> commands_;
  std::mutex tell_mutex_;
  mutable std::mutex mutex_;
  Status lost_;  // guarded by mutex_
  std::thread watcher_;
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
  std::atomic<bool> mentioned_ = false;
};

// What posts commands for the transfers of one batch.
class DaemonBatch;

// A send, recv or stage that was posted.
class DaemonOperation final : public OperationClient {
 public:
  enum class Kind { kSend, kReceive, kStage };

  DaemonOperation(std::shared_ptr<DaemonBatch> batch, Kind kind, CommandCall call)
      : batch_(std::move(batch)), kind_(kind), id_(call.id()), call_(std::move(call)) {}

  int64_t wait() override;
  bool wait_for(Timeout timeout) override;
  bool done() const override { return const_cast<DaemonOperation*>(this)->wait_for(Timeout(0)); }
  bool cancel() override;
  bool withdraw() override;
  Progress progress() const override { return state().progress; }
  int64_t version() const override { return state().version; }

 private:
  // One thread at a time waits for the outcome and settles it; the others wait for their turn.
  class Turn {
   public:
    Turn(DaemonOperation& operation, const Deadline& deadline) : operation_(operation) {
      std::unique_lock lock(operation_.mutex_);
      taken_ = operation_.turn_.wait_until(lock, deadline.when(), [&] { return !operation_.waited_for_; });
      if (taken_) operation_.waited_for_ = true;
    }
    ~Turn() {
      if (!taken_) return;
      const std::lock_guard lock(operation_.mutex_);
      operation_.waited_for_ = false;
      operation_.turn_.notify_one();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    explicit operator bool() const { return taken_; }

   private:
    DaemonOperation& operation_;
    bool taken_ = false;
  };

  bool settle(const Deadline& deadline);  // REQUIRES: it is this thread's turn
  OperationState state() const;
  bool agent_answers() const;

  const std::shared_ptr<DaemonBatch> batch_;
  const Kind kind_;
  const uint64_t id_;
  CommandCall call_;          // of whose turn it is
  bool settled_ = false;      // likewise
  mutable std::mutex mutex_;  // what follows
  std::condition_variable turn_;
  bool waited_for_ = false;
  OperationState outcome_;
};

class DaemonBatch final : public BatchClient, public std::enable_shared_from_this<DaemonBatch> {
 public:
  DaemonBatch(std::shared_ptr<DaemonBus> bus, std::shared_ptr<PairClient> pair, std::string id, bool sends,
              const Layout& layout, std::span<const TensorSpec> tensors)
      : bus_(std::move(bus)),
        pair_(std::move(pair)),
        id_(std::move(id)),
        sends_(sends),
        manifest_(manifest_of(bus_->identity(), tensors, layout)),
        mirror_(
            bus_->identity(), manifest_, tensors, sends,
            std::clamp(bus_->options().threads > 0 ? bus_->options().threads : usable_cpus() / bus_->options().world, 1,
                       4)) {
    if (mirror_.copied_bytes() > 0) bus_->mention_copies(mirror_.copied_bytes());
  }
  ~DaemonBatch() override { close(); }

  void open(uint32_t pair, Timeout timeout, const BatchOptions& options) {
    const auto tensors = mirror_.tensors();
    const RegisterCall call{.session = bus_->session(),
                            .pair = pair,
                            .batch = id_,
                            .sends = sends_,
                            .timeout = timeout,
                            .options = options,
                            .tensors = {tensors.begin(), tensors.end()}};
    number_ = bus_->call<Registered>(AgentMessage::kRegister, call, timeout, mirror_.arenas()).batch;
    open_ = true;
  }

  std::shared_ptr<OperationClient> send(std::optional<int64_t> version, Timeout timeout) override {
    return post(AgentCommand::kSend, DaemonOperation::Kind::kSend, version, timeout);
  }
  std::shared_ptr<OperationClient> recv(std::optional<int64_t> min_version, Timeout timeout) override {
    return post(AgentCommand::kRecv, DaemonOperation::Kind::kReceive, min_version, timeout);
  }
  std::shared_ptr<OperationClient> stage(std::optional<int64_t> min_version, Timeout timeout) override {
    return post(AgentCommand::kStage, DaemonOperation::Kind::kStage, min_version, timeout);
  }
  int64_t commit() override {
    const int64_t version = number(AgentMessage::kCommit, 0, kCopying);
    received(version);
    return version;
  }
  int64_t version() const override {
    if (!sends_ && mirror_.copied_bytes() > 0) return held_.load();
    return state().version;
  }
  int64_t newest() const override { return state().newest; }
  int64_t wait_version(int64_t version, Timeout timeout) override {
    return number(AgentMessage::kWaitVersion, version, timeout);
  }
  bool torn() const override { return state().torn; }
  bool undecided() const override { return state().undecided; }
  BatchStats stats() const override {
    const std::vector<std::byte> bytes = bus_->ask(AgentCommand::kStats, BatchNumber{number_});
    ByteReader in(bytes, bus_->agent_name());
    const BatchStats stats = read_stats(in);
    in.finish();
    return stats;
  }
  std::vector<TensorDigest> digests() const override {
    return bus_->call<DigestList>(AgentMessage::kDigests, object(0, {}), {}).digests;
  }
  void close() override {
    if (!open_.exchange(false)) return;
    try {
      number(AgentMessage::kCloseBatch, 0, kCopying);
    } catch (const Error& error) {
      log().info("{}: closing it: {}", describe(), error.what());
    }
    const std::lock_guard lock(mutex_);
    if (current_) current_->wait_for(kGrace);
    current_.reset();
  }
  bool in_own_process() const override { return bus_->in_own_process(); }

  DaemonBus& bus() const { return *bus_; }
  std::string describe() const { return fmt::format("batch {} of pair {}", id_, pair_->name()); }
  int64_t number(AgentMessage type, int64_t version, Timeout timeout) const {
    return bus_->call<Number>(type, object(version, timeout), timeout).value;
  }
  // `version` is in the mirror: now in the registered memory, too.
  void received(int64_t version) {
    mirror_.copy_out();
    held_ = version;
  }

 private:
  ObjectCall object(int64_t version, Timeout timeout) const {
    return {.session = bus_->session(), .object = number_, .version = version, .timeout = timeout};
  }
  BatchState state() const {
    return read_message<BatchState>(bus_->ask(AgentCommand::kState, BatchNumber{number_}), bus_->agent_name());
  }

  std::shared_ptr<OperationClient> post(AgentCommand command, DaemonOperation::Kind kind,
                                        std::optional<int64_t> version, Timeout timeout) {
    bus_->require_own_process();
    const std::lock_guard lock(mutex_);
    if (!open_) fail(ErrorCode::kCancelled, "{}: {} has closed it", describe(), bus_->identity().name());
    // What was begun before is settled first: the mirror is one operation's at a time.
    if (current_ && !current_->wait_for(Timeout(0)))
      fail(ErrorCode::kInvalidArgument, "{}: an operation of {} is still under way: wait for its handle first",
           describe(), bus_->identity().name());
    if (sends_ && kind == DaemonOperation::Kind::kSend) mirror_.copy_in();
    CommandCall call =
        bus_->commands().post(static_cast<uint16_t>(command),
                              message_bytes(TransferCommand{.batch = number_, .version = version, .timeout = timeout}),
                              Deadline::after(kQueueTimeout));
    current_ = std::make_shared<DaemonOperation>(shared_from_this(), kind, std::move(call));
    return current_;
  }

  const std::shared_ptr<DaemonBus> bus_;
  const std::shared_ptr<PairClient> pair_;
  const std::string id_;
  const bool sends_;
  const Manifest manifest_;
  Mirror mirror_;
  uint32_t number_ = 0;
  std::atomic<bool> open_ = false;
  std::atomic<int64_t> held_ = 0;
  std::mutex mutex_;
  std::shared_ptr<DaemonOperation> current_;  // guarded by mutex_
};

class DaemonPair final : public PairClient, public std::enable_shared_from_this<DaemonPair> {
 public:
  DaemonPair(std::shared_ptr<DaemonBus> bus, PairOptions options, const Paired& paired)
      : bus_(std::move(bus)), options_(std::move(options)), number_(paired.pair), peer_world_(paired.peer_world) {}
  ~DaemonPair() override {
    try {
      bus_->call<Number>(AgentMessage::kClosePair, ObjectCall{.session = bus_->session(), .object = number_}, {});
    } catch (const Error& error) {
      log().info("pair {}: closing it: {}", name(), error.what());
    }
  }

  const BusClient* bus() const override { return bus_.get(); }
  const std::string& name() const override { return options_.name; }
  const std::string& peer_job() const override { return options_.peer; }
  const Layout& layout() const override { return options_.layout; }
  int peer_world() const override { return peer_world_; }
  bool in_own_process() const override { return bus_->in_own_process(); }

  std::vector<ManifestEntry> manifest(const std::string& batch, Timeout timeout) override {
    const ManifestCall call{.session = bus_->session(), .pair = number_, .batch = batch, .timeout = timeout};
    return bus_->call<Offered>(AgentMessage::kManifest, call, timeout).manifest.entries;
  }
  std::shared_ptr<BatchClient> register_batch(const std::string& id, std::span<const TensorSpec> tensors, bool sends,
                                              Timeout timeout, const BatchOptions& options) override {
    bus_->require_own_process();
    check_name("batch", id);
    auto batch = std::make_shared<DaemonBatch>(bus_, shared_from_this(), id, sends, options_.layout, tensors);
    batch->open(number_, timeout, options);
    return batch;
  }

 private:
  const std::shared_ptr<DaemonBus> bus_;
  const PairOptions options_;
  const uint32_t number_;
  const int peer_world_;
};

std::shared_ptr<PairClient> DaemonBus::pair(const PairOptions& options) {
  const PairCall request{.session = session_, .options = options};
  const auto paired = call<Paired>(AgentMessage::kPair, request, options.timeout);
  return std::make_shared<DaemonPair>(shared_from_this(), options, paired);
}

// --- operations
// -------------------------------------------------------------------------------------------------------

// Whether the outcome is there, or comes until the deadline.
bool DaemonOperation::settle(const Deadline& deadline) {
  if (settled_) return true;
  OperationState outcome;
  try {
    outcome = read_message<OperationState>(call_.wait(deadline), batch_->bus().agent_name());
    if (outcome.status.ok() && kind_ == Kind::kReceive) batch_->received(outcome.version);
  } catch (const Error& error) {
    // Not an outcome: those of operations come in a result.
    if (error.code() == ErrorCode::kDeadlineExceeded && !outcome.done) return false;
    outcome.status = Status(error.code(), error.what());
  }
  outcome.done = true;
  settled_ = true;
  const std::lock_guard lock(mutex_);
  outcome_ = std::move(outcome);
  return true;
}

int64_t DaemonOperation::wait() {
  batch_->bus().require_own_process();
  const Turn turn(*this, Deadline::after(kWaits));
  if (!turn) fail(ErrorCode::kDeadlineExceeded, "{}: another thread waits for the same handle", batch_->describe());
  while (!settle(Deadline::after(kLook)))  // the agent ends every operation at its deadline
    if (!agent_answers())
      fail(ErrorCode::kDeadlineExceeded, "{}: {} does not answer; is it stopped?", batch_->describe(),
           batch_->bus().agent_name());
  const std::lock_guard lock(mutex_);
  outcome_.status.throw_if_error();
  return outcome_.version;
}

bool DaemonOperation::wait_for(Timeout timeout) {
  batch_->bus().require_own_process();
  const Deadline deadline = Deadline::after(timeout);
  const Turn turn(*this, deadline);
  return turn && settle(deadline);
}

// One that is lost answers in its way: the command's outcome is there then.
bool DaemonOperation::agent_answers() const {
  try {
    batch_->bus().ask(AgentCommand::kProgress, CommandId{id_});
    return true;
  } catch (const Error& error) {
    return error.code() != ErrorCode::kDeadlineExceeded;
  }
}

OperationState DaemonOperation::state() const {
  const auto outcome = [this]() -> std::optional<OperationState> {
    const std::lock_guard lock(mutex_);
    return outcome_.done ? std::optional(outcome_) : std::nullopt;
  };
  if (const auto known = outcome()) return *known;
  DaemonBus& bus = batch_->bus();
  auto state = read_message<OperationState>(bus.ask(AgentCommand::kProgress, CommandId{id_}), bus.agent_name());
  if (!state.done) return state;
  // Its outcome is in the queue already.
  if (const_cast<DaemonOperation*>(this)->wait_for(kGrace))
    if (const auto known = outcome()) return *known;
  return state;
}

bool DaemonOperation::cancel() {
  DaemonBus& bus = batch_->bus();
  return read_message<Number>(bus.ask(AgentCommand::kCancel, CommandId{id_}), bus.agent_name()).value != 0;
}

bool DaemonOperation::withdraw() {
  if (kind_ != Kind::kSend) return false;
  return batch_->number(AgentMessage::kWithdraw, version(), kGrace) != 0;
}

}  // namespace

std::shared_ptr<BusClient> open_daemon_client(BusOptions options) {
  return std::make_shared<DaemonBus>(std::move(options));
}

}  // namespace tessera::bus
