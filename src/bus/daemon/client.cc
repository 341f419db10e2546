#include "bus/daemon/client.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "base/fail.h"
#include "base/fork_guard.h"
#include "base/log.h"
#include "base/mutex.h"
#include "bus/daemon/client_session.h"
#include "bus/daemon/messages.h"
#include "bus/daemon/worker_memory.h"
#include "bus/lending/lender.h"
#include "bus/registration/local_tensors.h"
#include "bus/registration/records.h"
#include "memory/host/shared_arena.h"

namespace tessera::bus {
namespace {

constexpr Timeout kCopying = std::chrono::minutes(10);  // for a commit, and for closing a batch whose transfer must end
constexpr Duration kPostTimeout = seconds(5);           // for room in the queue
constexpr Duration kWaits = std::chrono::hours(1);      // for another thread with the same operation
constexpr Duration kLook = seconds(10);                 // after which a silent agent is checked

class DaemonBus final : public BusClient, public std::enable_shared_from_this<DaemonBus> {
 public:
  explicit DaemonBus(BusOptions options) : session_(std::move(options)) {}

  const BusOptions& options() const override { return session_.options(); }
  void require_own_process() const override { session_.require_own_process(); }
  bool in_own_process() const override { return session_.in_own_process(); }
  bool alive() const override { return session_.alive(); }
  void interrupt() override { session_.interrupt(); }
  std::shared_ptr<PairClient> pair(const PairOptions& options) override;

  AgentSession& session() { return session_; }
  void mention_lending(uint64_t bytes) {
    if (mentioned_.exchange(true)) return;
    log_event(LogLevel::info, "memory.lent", {{"bytes", bytes}},
              "{}: tensors in private memory ({} bytes) go through streams that this process serves; those that "
              "SharedHeap allocates are moved by its agent",
              session_.identity().name(), bytes);
  }

 private:
  AgentSession session_;
  std::atomic<bool> mentioned_ = false;
};

// Posts commands for the transfers of one batch.
class DaemonBatch;

// A send, recv or stage that was posted.
class DaemonOperation final : public OperationClient {
 public:
  enum class Kind { kSend, kReceive, kStage };

  DaemonOperation(const std::shared_ptr<DaemonBatch>& batch, Kind kind, CommandCall call)
      : batch_(batch), kind_(kind), id_(call.id()), call_(std::move(call)) {}
  // Its batch is closed: no outcome will come any more.
  void give_up(const Status& why);

  int64_t wait() override;
  bool wait_for(Timeout timeout, std::stop_token stop) override;
  bool done() const override { return const_cast<DaemonOperation*>(this)->wait_for(Timeout(0), {}); }
  bool cancel() override;
  bool withdraw() override;
  Progress progress() const override { return state().progress; }
  int64_t version() const override { return state().version; }

 private:
  // One thread at a time waits for the outcome and settles it; the others take turns.
  class Turn {
   public:
    Turn(DaemonOperation& operation, const Deadline& deadline, std::stop_token stop = {}) : operation_(operation) {
      const std::stop_callback wake(stop, [&] {
        {
          const MutexLock lock(operation_.mutex_);
        }  // a thread that has just looked is asleep by now
        operation_.turn_.notify_all();
      });
      const MutexLock lock(operation_.mutex_);
      operation_.turn_.wait_until(operation_.mutex_, deadline, [&]() REQUIRES(operation_.mutex_) {
        return !operation_.waited_for_ || stop.stop_requested();
      });
      taken_ = !operation_.waited_for_;
      if (taken_) operation_.waited_for_ = true;
    }
    ~Turn() {
      if (!taken_) return;
      const MutexLock lock(operation_.mutex_);
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

  bool settle(const Deadline& deadline, const std::stop_token& stop = {});  // REQUIRES: it is this thread's turn
  OperationState state() const;
  std::optional<OperationState> known() const;  // the operation's outcome
  void set_outcome(OperationState outcome);
  // The batch, unless the outcome is known or the batch is closed; then null.
  std::shared_ptr<DaemonBatch> working() const;
  bool agent_answers(const DaemonBatch& batch) const;
  std::string describe() const { return fmt::format("the handle of command {}", id_); }

  const ForkGuard process_;
  // Not owned: the batch owns its current operation. So a handle keeps nothing else alive.
  const std::weak_ptr<DaemonBatch> batch_;
  const Kind kind_;
  const uint64_t id_;
  const TimePoint posted_ = Clock::steady().now();
  std::optional<CommandCall> call_;  // used by the thread whose turn it is; until the outcome is known
  mutable Mutex mutex_;
  CondVar turn_;
  bool waited_for_ GUARDED_BY(mutex_) = false;
  OperationState outcome_ GUARDED_BY(mutex_);
};

class DaemonBatch final : public BatchClient, public std::enable_shared_from_this<DaemonBatch> {
 public:
  DaemonBatch(std::shared_ptr<DaemonBus> bus, std::shared_ptr<PairClient> pair, std::string id, bool sends,
              const Layout& layout, std::span<const TensorSpec> tensors, Timeout linger)
      : bus_(std::move(bus)),
        pair_(std::move(pair)),
        id_(std::move(id)),
        sends_(sends),
        linger_(linger),
        manifest_(manifest_of(session().identity(), tensors, layout)) {
    const std::vector<LocalTensor> local = registered_tensors(manifest_, tensors, session().identity().rank);
    placement_ = place_tensors(manifest_, tensors, local, sends);
    if (placement_.lent_bytes == 0) return;
    bus_->mention_lending(placement_.lent_bytes);
    lender_ = std::make_unique<Lender>(session().identity().name(), local, sends,
                                       session().options().threads > 0
                                           ? session().options().threads
                                           : std::max(1, usable_cpus() / session().options().world));
  }
  ~DaemonBatch() override {
    try {
      close(Timeout(0));
    } catch (const std::exception& error) {
      log_event(LogLevel::info, "close.failed", {}, "{}: closing it: {}", describe(), error.what());
    }
  }

  void open(uint32_t pair, Timeout timeout, const BatchOptions& options) {
    const RegisterCall call{.session = session().number(),
                            .pair = pair,
                            .batch = id_,
                            .sends = sends_,
                            .timeout = timeout,
                            .options = options,
                            .lent_bytes = placement_.lent_bytes,
                            .tensors = std::move(placement_.tensors)};
    std::vector<int> fds;
    for (const auto& arena : placement_.arenas) fds.push_back(arena->fd_for_agent());
    UniqueFd socket;
    if (lender_) fds.push_back((socket = lender_->take_agent_end()).get());
    number_ = session().call<Registered>(AgentMessage::kRegister, call, timeout, fds, options.stop).batch;
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
    fence();
    try {
      const int64_t version = number(AgentMessage::kCommit, 0, kCopying);
      fence();
      return version;
    } catch (const Error&) {
      // If another operation is under way, this one was refused, and that one goes on. The runs of a lost agent belong
      // to nobody.
      if (!alive() || !under_way()) quiesce();
      throw;
    }
  }
  void relocate(std::span<const TensorSpec>) override {
    fail(ErrorCode::kUnimplemented,
         "tensors that are registered with {} cannot be moved: close the batch first"_message, session().agent_name());
  }
  int64_t version() const override { return state().version; }
  int64_t newest() const override { return state().newest; }
  int64_t wait_version(int64_t version, Timeout timeout) override {
    return number(AgentMessage::kWaitVersion, version, timeout);
  }
  std::vector<BatchPeer> peers() const override {
    return session().call<PeerList>(AgentMessage::kPeers, object(0, {}), {}).peers;
  }
  void wait_peers(int jobs, int64_t version, Timeout timeout) override {
    const WaitPeersCall call{
        .session = session().number(), .batch = number_, .jobs = jobs, .version = version, .timeout = timeout};
    session().call<Number>(AgentMessage::kWaitPeers, call, timeout);
  }
  bool torn() const override { return state().torn; }
  bool undecided() const override { return state().undecided; }
  BatchStats stats() const override {
    return read_message<BatchFigures>(session().ask(AgentCommand::kStats, BatchNumber{number_}), session().agent_name())
        .stats;
  }
  std::vector<TensorDigest> digests() const override {
    return session().call<DigestList>(AgentMessage::kDigests, object(0, {}), {}).digests;
  }
  Untaken close(std::optional<Timeout> linger) override {
    if (!open_.exchange(false)) return {};
    Untaken untaken;
    try {
      const Timeout limit = linger.value_or(linger_);
      await_beginning();
      untaken = session().call<BatchClosed>(AgentMessage::kCloseBatch, object(0, limit), limit + kCopying).untaken;
    } catch (const Error& error) {
      log_event(LogLevel::info, "close.failed", {}, "{}: closing it: {}", describe(), error.what());
    }
    const MutexLock lock(mutex_);
    if (current_ && !current_->wait_for(kAnswerGrace, {})) {
      if (lender_) lender_->close();
      current_->give_up(failed(ErrorCode::kCancelled,
                               "{}: {} has closed it, and {} has not reported the outcome"_message, describe(),
                               session().identity().name(), session().agent_name()));
    }
    current_.reset();
    if (lender_) lender_->close();  // now the tensors may be freed, whatever the agent does
    return untaken;
  }
  bool in_own_process() const override { return bus_->in_own_process(); }

  // After a failed operation, all that the agent had this process do to the tensors ends before the user is told. A
  // lost agent sends nothing more; it may also be stopped, and ask for more once it continues.
  void quiesce() const {
    if (!lender_) return;
    if (alive())
      lender_->quiesce();
    else
      lender_->close();
  }
  bool alive() const { return session().alive(); }
  // Orders the user's accesses to the tensors and those that the agent has this process make.
  void fence() const {
    if (lender_) lender_->fence();
  }

  AgentSession& session() const { return bus_->session(); }
  std::string describe() const { return fmt::format("batch {} of pair {}", id_, pair_->name()); }
  int64_t number(AgentMessage type, int64_t version, Timeout timeout) const {
    return session().call<Number>(type, object(version, timeout), timeout).value;
  }

 private:
  bool under_way() {
    const MutexLock lock(mutex_);
    return current_ && !current_->wait_for(Timeout(0), {});
  }
  // A call to close may overtake what the queue holds: asks for something behind the operation that was posted last.
  void await_beginning() {
    if (!under_way()) return;
    try {
      state();
    } catch (const Error& error) {
      log_event(LogLevel::info, "close.failed", {}, "{}: closing it: {}", describe(), error.what());
    }
  }
  ObjectCall object(int64_t version, Timeout timeout) const {
    return {.session = session().number(), .object = number_, .version = version, .timeout = timeout};
  }
  BatchState state() const {
    return read_message<BatchState>(session().ask(AgentCommand::kState, BatchNumber{number_}), session().agent_name());
  }

  std::shared_ptr<OperationClient> post(AgentCommand command, DaemonOperation::Kind kind,
                                        std::optional<int64_t> version, Timeout timeout) {
    bus_->require_own_process();
    const MutexLock lock(mutex_);
    if (!open_) fail(ErrorCode::kCancelled, "{}: {} has closed it"_message, describe(), session().identity().name());
    if (current_ && !current_->wait_for(Timeout(0), {}))
      fail(ErrorCode::kInvalidArgument, "{}: an operation of {} is still under way: wait for its handle first"_message,
           describe(), session().identity().name());
    fence();
    CommandCall call = session().commands().post(
        static_cast<uint16_t>(command),
        message_bytes(TransferCommand{.batch = number_, .version = version, .timeout = timeout}),
        Deadline::after(kPostTimeout));
    current_ = std::make_shared<DaemonOperation>(shared_from_this(), kind, std::move(call));
    return current_;
  }

  const std::shared_ptr<DaemonBus> bus_;
  const std::shared_ptr<PairClient> pair_;
  const std::string id_;
  const bool sends_;
  const Timeout linger_;
  const Manifest manifest_;
  MemoryPlacement placement_;       // until the agent is told
  std::unique_ptr<Lender> lender_;  // null if nothing is lent
  uint32_t number_ = 0;
  std::atomic<bool> open_ = false;
  Mutex mutex_;
  std::shared_ptr<DaemonOperation> current_ GUARDED_BY(mutex_);
};

class DaemonPair final : public PairClient, public std::enable_shared_from_this<DaemonPair> {
 public:
  DaemonPair(std::shared_ptr<DaemonBus> bus, PairOptions options, const Paired& paired)
      : bus_(std::move(bus)),
        options_(std::move(options)),
        number_(paired.pair),
        peer_world_(paired.peer_world),
        membership_(paired.membership) {}
  ~DaemonPair() override {
    try {
      session().call<Number>(AgentMessage::kClosePair, ObjectCall{.session = session().number(), .object = number_},
                             {});
    } catch (const Error& error) {
      log_event(LogLevel::info, "close.failed", {{"pair", name()}}, "pair {}: closing it: {}", name(), error.what());
    }
  }

  const BusClient* bus() const override { return bus_.get(); }
  const std::string& name() const override { return options_.name; }
  std::string peer_job() const override {
    return options_.peers.empty() ? options_.peer : fmt::format("{}", fmt::join(options_.peers, "+"));
  }
  const Layout& layout() const override { return options_.layout; }
  int peer_world() const override { return peer_world_; }
  uint64_t membership() const override { return membership_; }
  bool in_own_process() const override { return bus_->in_own_process(); }

  std::vector<ManifestEntry> manifest(const std::string& batch, Timeout timeout, std::stop_token stop) override {
    const ManifestCall call{.session = session().number(), .pair = number_, .batch = batch, .timeout = timeout};
    return session().call<Offered>(AgentMessage::kManifest, call, timeout, {}, stop).manifest.entries;
  }
  std::vector<std::string> all_gather(const std::string& batch, const std::string& value, Timeout timeout,
                                      std::stop_token stop) override {
    const AllGatherCall call{
        .session = session().number(), .pair = number_, .batch = batch, .value = value, .timeout = timeout};
    return session().call<Gathered>(AgentMessage::kAllGather, call, timeout, {}, stop).values;
  }
  void give_up(const std::string& batch, const Status& why) override {
    session().call<Number>(AgentMessage::kGiveUp,
                           GiveUpCall{.session = session().number(), .pair = number_, .batch = batch, .why = why}, {});
  }
  std::shared_ptr<BatchClient> register_batch(const std::string& id, std::span<const TensorSpec> tensors, bool sends,
                                              Timeout timeout, const BatchOptions& options) override {
    bus_->require_own_process();
    check_name("batch", id);
    auto batch = std::make_shared<DaemonBatch>(bus_, shared_from_this(), id, sends, options_.layout, tensors,
                                               options.linger.value_or(Timeout(0)));
    batch->open(number_, timeout, options);
    return batch;
  }

 private:
  AgentSession& session() const { return bus_->session(); }

  const std::shared_ptr<DaemonBus> bus_;
  const PairOptions options_;
  const uint32_t number_;
  const int peer_world_;
  const uint64_t membership_;
};

std::shared_ptr<PairClient> DaemonBus::pair(const PairOptions& options) {
  const PairCall request{.session = session_.number(), .options = options};
  const auto paired = session_.call<Paired>(AgentMessage::kPair, request, options.timeout);
  return std::make_shared<DaemonPair>(shared_from_this(), options, paired);
}

// --- operations ----------------------------------------------------------------------------------

std::optional<OperationState> DaemonOperation::known() const {
  const MutexLock lock(mutex_);
  return outcome_.done ? std::optional(outcome_) : std::nullopt;
}

void DaemonOperation::set_outcome(OperationState outcome) {
  outcome.done = true;
  const MutexLock lock(mutex_);
  if (!outcome_.done) outcome_ = std::move(outcome);
}

std::shared_ptr<DaemonBatch> DaemonOperation::working() const {
  return known() ? nullptr : batch_.lock();
}

void DaemonOperation::give_up(const Status& why) {
  OperationState outcome;
  outcome.status = why;
  set_outcome(std::move(outcome));
}

// Whether the outcome is there, or comes before the deadline and the stop.
bool DaemonOperation::settle(const Deadline& deadline, const std::stop_token& stop) {
  if (known()) {
    call_.reset();
    return true;
  }
  const std::shared_ptr<DaemonBatch> batch = batch_.lock();
  if (!batch) {  // it was closed: this operation is given up, or about to be
    give_up(failed(ErrorCode::kCancelled, "{}: the batch is closed"_message, describe()));
    return true;
  }
  AgentSession& session = batch->session();
  bool came = false;
  {
    const std::stop_callback interrupt(stop, [this] { call_->cancel(); });
    came = session.await(*call_, deadline);
  }
  if (stop.stop_requested()) came = call_->resume();
  if (!came) {
    // A caller that only polls learns of a stopped agent, too.
    if (Clock::steady().now() - posted_ >= kSilence) session.look_whether_stopped();
    return false;
  }
  OperationState outcome;
  try {
    outcome = read_message<OperationState>(call_->wait(deadline), session.agent_name());
  } catch (const Error& error) {
    outcome.status = Status(error.code(), error.what());
  }
  if (outcome.status.ok())
    batch->fence();
  else
    batch->quiesce();
  set_outcome(std::move(outcome));
  call_.reset();
  return true;
}

int64_t DaemonOperation::wait() {
  process_.require("a handle");
  const Turn turn(*this, Deadline::after(kWaits));
  if (!turn) fail(ErrorCode::kDeadlineExceeded, "{}: another thread waits for the same handle"_message, describe());
  while (!settle(Deadline::after(kLook))) {  // the agent ends every operation at its deadline
    const std::shared_ptr<DaemonBatch> batch = working();
    if (batch && !agent_answers(*batch))
      fail(ErrorCode::kDeadlineExceeded, "{}: {} does not answer; is it stopped?"_message, batch->describe(),
           batch->session().agent_name());
  }
  const MutexLock lock(mutex_);
  outcome_.status.throw_if_error();
  return outcome_.version;
}

bool DaemonOperation::wait_for(Timeout timeout, std::stop_token stop) {
  process_.require("a handle");
  const Deadline deadline = Deadline::after(timeout);
  const Turn turn(*this, deadline, stop);
  return turn && settle(deadline, stop);
}

bool DaemonOperation::agent_answers(const DaemonBatch& batch) const {
  try {
    batch.session().ask(AgentCommand::kProgress, CommandId{id_});
    return true;
  } catch (const Error& error) {
    return error.code() != ErrorCode::kDeadlineExceeded;
  }
}

OperationState DaemonOperation::state() const {
  process_.require("a handle");
  const std::shared_ptr<DaemonBatch> batch = working();
  if (!batch) return known().value_or(OperationState{});
  AgentSession& session = batch->session();
  auto state = read_message<OperationState>(session.ask(AgentCommand::kProgress, CommandId{id_}), session.agent_name());
  if (!state.done) return state;
  // Its outcome is already in the queue.
  const_cast<DaemonOperation*>(this)->wait_for(kAnswerGrace, {});
  return known().value_or(state);
}

bool DaemonOperation::cancel() {
  process_.require("a handle");
  const std::shared_ptr<DaemonBatch> batch = working();
  if (!batch) return false;
  AgentSession& session = batch->session();
  return read_message<Number>(session.ask(AgentCommand::kCancel, CommandId{id_}), session.agent_name()).value != 0;
}

bool DaemonOperation::withdraw() {
  process_.require("a handle");
  if (kind_ != Kind::kSend) return false;
  const std::shared_ptr<DaemonBatch> batch = batch_.lock();  // a staged send may have ended
  return batch && batch->number(AgentMessage::kWithdraw, version(), kAnswerGrace) != 0;
}

}  // namespace

std::shared_ptr<BusClient> open_daemon_client(BusOptions options) {
  return std::make_shared<DaemonBus>(std::move(options));
}

}  // namespace tessera::bus
