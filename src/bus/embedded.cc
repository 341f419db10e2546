#include "bus/embedded.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <type_traits>

#include "base/fail.h"
#include "base/fork_guard.h"
#include "base/log.h"
#include "base/mutex.h"
#include "bus/batch/batch.h"
#include "bus/receiver/receiver_batch.h"
#include "bus/registration/participant.h"
#include "bus/sender/in_place_sender.h"
#include "bus/sender/staged_sender.h"
#include "exec/local_runs.h"
#include "peer/agent.h"
#include "peer/exchange/messages.h"
#include "peer/interruption.h"

namespace tessera::bus {
namespace {

std::shared_ptr<BatchImpl> make_batch(BatchSetup setup, bool sends) {
  if (!sends) return std::make_shared<ReceiverBatch>(std::move(setup));
  if (setup.options.mode == Mode::kStaged) return std::make_shared<StagedSender>(std::move(setup));
  return std::make_shared<InPlaceSender>(std::move(setup));
}

// The implementation of a Bus. Pairs and batches keep it alive.
class EmbeddedBus final : public BusClient, public std::enable_shared_from_this<EmbeddedBus> {
 public:
  EmbeddedBus(BusOptions options, std::shared_ptr<Participant> participant)
      : options_(std::move(options)), participant_(std::move(participant)) {}

  void require_own_process() const override { process_.require(participant_->agent().identity().name()); }
  bool in_own_process() const override { return process_.here(); }

  const BusOptions& options() const override { return options_; }
  Store& store() { return participant_->store(); }
  Agent& agent() { return participant_->agent(); }
  Rendezvous& rendezvous() { return participant_->rendezvous(); }
  BatchExchanges& exchanges() { return participant_->exchanges(); }

  Interruption& interruption() { return interruption_; }

  bool alive() const override { return true; }
  void interrupt() override { interruption_.interrupt(); }
  std::shared_ptr<PairClient> pair(const PairOptions& options) override;

 private:
  const ForkGuard process_;
  const BusOptions options_;
  Interruption interruption_{options_.stop};
  const std::shared_ptr<Participant> participant_;
};

// A call that begins now, and ends at its deadline, when the bus is interrupted, or when its caller stops it.
class LimitedCall {
 public:
  LimitedCall(EmbeddedBus& bus, Timeout timeout, const std::stop_token& stop = {})
      : stop_(bus.interruption().token(), stop), limits_{.deadline = Deadline::after(timeout), .stop = stop_.token()} {}

  const CallLimits& limits() const { return limits_; }

 private:
  const EitherStop stop_;
  const CallLimits limits_;
};

// Two jobs joined. A rank that leaves while others may wait for its registration tells them why.
class EmbeddedPair final : public PairClient, public std::enable_shared_from_this<EmbeddedPair> {
 public:
  EmbeddedPair(std::shared_ptr<EmbeddedBus> bus, PairView view, Layout layout)
      : bus_(std::move(bus)), view_(std::move(view)), layout_(std::move(layout)) {
    set_owing(unregistered());
    bus_->rendezvous().keep(view_);
  }
  ~EmbeddedPair() override {
    tell_why_it_leaves();
    bus_->rendezvous().drop(view_);
  }
  EmbeddedPair(const EmbeddedPair&) = delete;
  EmbeddedPair& operator=(const EmbeddedPair&) = delete;

  const BusClient* bus() const override { return bus_.get(); }
  const std::string& name() const override { return view_.name; }
  std::string peer_job() const override {
    return view_.jobs.empty() ? view_.peer_job : fmt::format("{}", fmt::join(view_.jobs, "+"));
  }
  const Layout& layout() const override { return layout_; }
  int peer_world() const override { return static_cast<int>(view_.peer.size()); }
  uint64_t membership() const override { return membership_of(view_.own); }
  bool in_own_process() const override { return bus_->in_own_process(); }

  std::vector<ManifestEntry> manifest(const std::string& id, Timeout timeout, std::stop_token stop) override {
    require_one_job(id);
    const LimitedCall call(*bus_, timeout, stop);
    return before_registration(
        id, [&] { return bus_->exchanges().of(view_, id).peer_manifest(view_, call.limits()).entries; });
  }

  std::vector<std::string> all_gather(const std::string& id, const std::string& value, Timeout timeout,
                                      std::stop_token stop) override {
    const LimitedCall call(*bus_, timeout, stop);
    return before_registration(id,
                               [&] { return bus_->exchanges().of(view_, id).all_gather(view_, value, call.limits()); });
  }

  std::shared_ptr<BatchClient> register_batch(const std::string& id, std::span<const TensorSpec> tensors, bool sends,
                                              Timeout timeout, const BatchOptions& batch_options) override {
    Agent& agent = bus_->agent();
    return register_batch(id, tensors, sends, timeout, batch_options,
                          std::make_shared<LocalRuns>(agent.identity().name(), agent.pull_pool(), agent.source_pool()));
  }

  std::shared_ptr<BatchImpl> register_batch(const std::string& id, std::span<const TensorSpec> tensors, bool sends,
                                            Timeout timeout, const BatchOptions& batch_options,
                                            std::shared_ptr<RunFactory> runs) {
    bus_->require_own_process();
    check_name("batch", id);
    if (!sends) require_one_job(id);
    if (batch_options.snapshots < 2 || batch_options.snapshots > static_cast<int>(kMaxSlots))
      fail(ErrorCode::kInvalidArgument, "batch {}: {} snapshots: 2 to {} are possible"_message, id,
           batch_options.snapshots, kMaxSlots);
    if (batch_options.grace < Timeout(0))
      fail(ErrorCode::kInvalidArgument, "batch {}: a grace of {} s: it cannot be negative"_message, id,
           to_seconds(batch_options.grace));
    const LimitedCall call(*bus_, timeout, batch_options.stop);
    const BusOptions& options = bus_->options();
    BatchSetup setup{.keep_alive = shared_from_this(),
                     .agent = &bus_->agent(),
                     .rendezvous = &bus_->rendezvous(),
                     .exchanges = &bus_->exchanges(),
                     .store = &bus_->store(),
                     .interruption = &bus_->interruption(),
                     .stall = options.stall,
                     .digest = options.digest,
                     .pair = view_.name,
                     .named = view_.named(),
                     .several = !view_.jobs.empty(),
                     .id = id,
                     .layout = layout_,
                     .options = batch_options,
                     .tensors = std::make_shared<const std::vector<TensorSpec>>(tensors.begin(), tensors.end()),
                     .runs = std::move(runs)};
    bus_->agent().claim_batch(view_.name, id, setup.named);  // the records of a live batch must not be overwritten
    const std::shared_ptr<BatchImpl> batch = make_batch(std::move(setup), sends);
    bus_->exchanges().of(view_, id).begin();
    try {
      batch->open(view_, call.limits());
    } catch (...) {
      const Status why = status_of_current_exception();
      give_up(id, why);
      batch->close();
      throw;
    }
    set_owing({});
    return batch;
  }

 private:
  void require_one_job(const std::string& batch) const {
    if (!view_.jobs.empty())
      fail(
          ErrorCode::kInvalidArgument,
          "pair {}, batch {}: it is received from one job, and the pair names {}: join a pair with the one that sends"_message,
          view_.name, batch, fmt::join(view_.jobs, ", "));
  }

  void tell_why_it_leaves() {
    Status why;
    bool lasting = false;
    {
      const MutexLock lock(mutex_);
      why = owing_;
      lasting = !interrupted_ && !bus_->options().stop.stop_requested();
    }
    if (why.ok()) return;
    try {
      bus_->rendezvous().leave(view_, why, lasting);
    } catch (const Error& error) {
      log().info("{}: the others cannot be told that it leaves pair {}: {}", bus_->agent().identity().name(),
                 view_.name, error.what());
    }
  }

  // Runs an exchange about a batch that is to be registered.
  template <typename Conversation>
  std::invoke_result_t<const Conversation&> before_registration(const std::string& batch,
                                                                const Conversation& conversation) {
    bus_->require_own_process();
    check_name("batch", batch);
    set_owing(unregistered());
    try {
      return conversation();
    } catch (const Error& error) {
      // After a deadline the user may try again; any other error ends the batch, since the other ranks are waiting for
      // it.
      if (error.code() == ErrorCode::kDeadlineExceeded)
        set_owing(gave_up(status_of_current_exception()));
      else
        give_up(batch, status_of_current_exception());
      throw;
    }
  }

  // The other ranks are waiting for this one.
  void give_up(const std::string& batch, const Status& status) {
    set_owing(gave_up(status), status.code() == ErrorCode::kCancelled);
    try {
      BatchExchange& exchange = bus_->exchanges().of(view_, batch);
      exchange.report(status);
      exchange.withdraw();
      exchange.retract();
    } catch (const Error& error) {
      log().info("{}: the others cannot be told that it gives batch {} up: {}", bus_->agent().identity().name(), batch,
                 error.what());
    }
  }

  void set_owing(Status reason, bool interrupted = false) {
    const MutexLock lock(mutex_);
    owing_ = std::move(reason);
    interrupted_ = interrupted;
  }
  Status unregistered() const {
    return failed(ErrorCode::kPeerLost, "{} left before it had registered"_message, bus_->agent().identity().name());
  }
  Status gave_up(const Status& why) const {
    const ErrorCode code = why.code() == ErrorCode::kCancelled ? ErrorCode::kPeerLost : why.code();  // to the others
    return failed(code, "{} gave up: {}"_message, bus_->agent().identity().name(), why.message());
  }

  const std::shared_ptr<EmbeddedBus> bus_;
  const PairView view_;
  const Layout layout_;  // for tensors without one
  Mutex mutex_;
  // Not ok while other ranks may wait for a registration: the reason that they get if none comes.
  Status owing_ GUARDED_BY(mutex_);
  bool interrupted_ GUARDED_BY(mutex_) = false;  // why owing_ is not ok; then ranks that come later are not told
};

std::shared_ptr<PairClient> EmbeddedBus::pair(const PairOptions& options) {
  require_own_process();
  const LimitedCall call(*this, options.timeout);
  std::vector<std::string> jobs = options.peers;
  std::ranges::sort(jobs);
  PairView view = jobs.empty() ? rendezvous().join(options.name, options.peer, call.limits())
                               : rendezvous().join(options.name, jobs, call.limits());
  return std::make_shared<EmbeddedPair>(shared_from_this(), std::move(view), options.layout);
}

}  // namespace

std::shared_ptr<BusClient> open_embedded(BusOptions options, std::optional<Incarnation> worker) {
  std::shared_ptr<Participant> participant =
      worker ? std::make_shared<Participant>(options, std::move(worker)) : Participant::of_process(options);
  return std::make_shared<EmbeddedBus>(std::move(options), std::move(participant));
}

std::shared_ptr<BatchImpl> register_with(const std::shared_ptr<PairClient>& pair, const std::string& id,
                                         std::span<const TensorSpec> tensors, bool sends, Timeout timeout,
                                         const BatchOptions& options, std::shared_ptr<RunFactory> runs) {
  return std::static_pointer_cast<EmbeddedPair>(pair)->register_batch(id, tensors, sends, timeout, options,
                                                                      std::move(runs));
}

Agent& embedded_agent(BusClient& bus) {
  return dynamic_cast<EmbeddedBus&>(bus).agent();
}

std::shared_ptr<BatchImpl> embedded_batch(const std::shared_ptr<BatchClient>& batch) {
  return std::static_pointer_cast<BatchImpl>(batch);
}

std::shared_ptr<Operation> embedded_operation(const std::shared_ptr<OperationClient>& operation) {
  return std::static_pointer_cast<Operation>(operation);
}

}  // namespace tessera::bus
