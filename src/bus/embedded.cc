#include "bus/embedded.h"

#include <algorithm>
#include <type_traits>

#include "base/fail.h"
#include "base/fork_guard.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/observation.h"
#include "bus/batch/batch.h"
#include "bus/receiver/receiver_batch.h"
#include "bus/registration/rendezvous.h"
#include "bus/sender/sender_batch.h"
#include "exec/local_runs.h"
#include "peer/agent.h"
#include "peer/exchange/messages.h"
#include "peer/interruption.h"
#include "tessera/store.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

// A process' place on the bus. Pairs and batches keep it alive.
class EmbeddedBus final : public BusClient, public std::enable_shared_from_this<EmbeddedBus> {
 public:
  EmbeddedBus(BusOptions options, std::optional<Incarnation> worker) : options_(std::move(options)) {
    const Deadline deadline = Deadline::after(options_.timeout);
    store_ = open_store(options_.store, {.connect_timeout = options_.timeout, .stop = options_.stop});
    agent_ = std::make_unique<Agent>(
        Identity{options_.name_space, options_.job, options_.rank, options_.world},
        options_.threads > 0 ? options_.threads : std::max(1, usable_cpus() / std::max(1, options_.world)));
    rendezvous_ = std::make_unique<Rendezvous>(*store_, agent_->identity(),
                                               RankRecord{.incarnation = agent_->incarnation(),
                                                          .world = options_.world,
                                                          .address = agent_->address(),
                                                          .release = kVersion,
                                                          .worker = std::move(worker)},
                                               agent_->waits(), agent_->loop());
    exchanges_ = std::make_unique<BatchExchanges>(*rendezvous_);
    rendezvous_->claim({.deadline = deadline, .stop = options_.stop});
  }

  void require_own_process() const override { process_.require(agent_->identity().name()); }
  bool in_own_process() const override { return process_.here(); }

  const BusOptions& options() const override { return options_; }
  Store& store() { return *store_; }
  Agent& agent() { return *agent_; }
  Rendezvous& rendezvous() { return *rendezvous_; }
  BatchExchanges& exchanges() { return *exchanges_; }

  Interruption& interruption() { return interruption_; }

  bool alive() const override { return true; }
  void interrupt() override { interruption_.interrupt(); }
  std::shared_ptr<PairClient> pair(const PairOptions& options) override;

 private:
  const ForkGuard process_;
  const std::shared_ptr<Observation> observation_ = Observation::start();
  const BusOptions options_;
  Interruption interruption_{options_.stop};
  // In this order: the rendezvous uses the store, nobody uses the rendezvous when it goes.
  std::unique_ptr<Store> store_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<BatchExchanges> exchanges_;
};

// A call that begins now, and ends at its deadline, when the bus is interrupted, or once its caller stops it.
class LimitedCall {
 public:
  LimitedCall(EmbeddedBus& bus, Timeout timeout, const std::stop_token& stop = {})
      : stop_(bus.interruption().token(), stop), limits_{.deadline = Deadline::after(timeout), .stop = stop_.token()} {}

  const CallLimits& limits() const { return limits_; }

 private:
  const EitherStop stop_;
  const CallLimits limits_;
};

// Two jobs joined. A rank that goes while others may wait for what it registers tells them why.
class EmbeddedPair final : public PairClient, public std::enable_shared_from_this<EmbeddedPair> {
 public:
  EmbeddedPair(std::shared_ptr<EmbeddedBus> bus, PairView view, Layout layout)
      : bus_(std::move(bus)), view_(std::move(view)), layout_(std::move(layout)) {
    set_owing(unregistered());
  }
  ~EmbeddedPair() override {
    if (owing_.ok()) return;
    try {
      bus_->rendezvous().leave(view_, owing_, !interrupted_ && !bus_->options().stop.stop_requested());
    } catch (const Error& error) {
      log().info("{}: the others cannot be told that it leaves pair {}: {}", bus_->agent().identity().name(),
                 view_.name, error.what());
    }
  }
  EmbeddedPair(const EmbeddedPair&) = delete;
  EmbeddedPair& operator=(const EmbeddedPair&) = delete;

  const BusClient* bus() const override { return bus_.get(); }
  const std::string& name() const override { return view_.name; }
  const std::string& peer_job() const override { return view_.peer_job; }
  const Layout& layout() const override { return layout_; }
  int peer_world() const override { return static_cast<int>(view_.peer.size()); }
  uint64_t membership() const override { return membership_of(view_.own); }
  bool in_own_process() const override { return bus_->in_own_process(); }

  std::vector<ManifestEntry> manifest(const std::string& id, Timeout timeout, std::stop_token stop) override {
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
    if (batch_options.snapshots < 2 || batch_options.snapshots > static_cast<int>(kMaxSlots))
      fail(ErrorCode::kInvalidArgument, "batch {}: {} snapshots: 2 to {} are possible"_message, id,
           batch_options.snapshots, kMaxSlots);
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
                     .id = id,
                     .layout = layout_,
                     .options = batch_options,
                     .tensors = std::make_shared<const std::vector<TensorSpec>>(tensors.begin(), tensors.end()),
                     .runs = std::move(runs)};
    bus_->agent().claim_batch(view_.name, id);  // what the live one has published must not be overwritten
    std::shared_ptr<BatchImpl> batch;
    if (sends)
      batch = std::make_shared<SenderBatch>(std::move(setup));
    else
      batch = std::make_shared<ReceiverBatch>(std::move(setup));
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
  // A conversation about a batch that is to be registered.
  template <typename Conversation>
  std::invoke_result_t<const Conversation&> before_registration(const std::string& batch,
                                                                const Conversation& conversation) {
    bus_->require_own_process();
    check_name("batch", batch);
    set_owing(unregistered());
    try {
      return conversation();
    } catch (const Error& error) {
      // After a deadline it may be asked for again; all else ends the batch, for which the others are waiting.
      if (error.code() == ErrorCode::kDeadlineExceeded)
        set_owing(gave_up(status_of_current_exception()));
      else
        give_up(batch, status_of_current_exception());
      throw;
    }
  }

  // The others are waiting for this rank.
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
  const Layout layout_;  // of tensors that bring none
  Mutex mutex_;
  Status owing_
      GUARDED_BY(mutex_);  // not ok while the others may wait for a registration: what they are told if none comes
  bool interrupted_ GUARDED_BY(mutex_) = false;  // and for that reason: who comes later is not told
};

std::shared_ptr<PairClient> EmbeddedBus::pair(const PairOptions& options) {
  require_own_process();
  const LimitedCall call(*this, options.timeout);
  return std::make_shared<EmbeddedPair>(shared_from_this(),
                                        rendezvous().join(options.name, options.peer, call.limits()), options.layout);
}

}  // namespace

std::shared_ptr<BusClient> open_embedded(BusOptions options, std::optional<Incarnation> worker) {
  return std::make_shared<EmbeddedBus>(std::move(options), std::move(worker));
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
