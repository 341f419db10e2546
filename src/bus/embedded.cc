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
      : bus_(std::move(bus)),
        name_(view.name),
        jobs_(view.named()),
        several_(!view.jobs.empty()),
        peer_world_(static_cast<int>(view.peer.size())),
        layout_(std::move(layout)),
        view_(std::move(view)) {
    set_owing(unregistered());
    bus_->rendezvous().keep(this->view());
  }
  ~EmbeddedPair() override {
    tell_why_it_leaves();
    bus_->rendezvous().drop(view());
  }
  EmbeddedPair(const EmbeddedPair&) = delete;
  EmbeddedPair& operator=(const EmbeddedPair&) = delete;

  const BusClient* bus() const override { return bus_.get(); }
  const std::string& name() const override { return name_; }
  std::string peer_job() const override { return fmt::format("{}", fmt::join(jobs_, "+")); }
  const Layout& layout() const override { return layout_; }
  int peer_world() const override { return peer_world_; }
  uint64_t membership() const override { return membership_of(view().own); }
  bool in_own_process() const override { return bus_->in_own_process(); }

  std::vector<ManifestEntry> manifest(const std::string& id, Timeout timeout, std::stop_token stop) override {
    require_one_job(id);
    return before_registration(id, LimitedCall(*bus_, timeout, stop).limits(),
                               [&](BatchExchange& exchange, const PairView& view, const CallLimits& limits) {
                                 return exchange.peer_manifest(view, limits).entries;
                               });
  }

  std::vector<std::string> all_gather(const std::string& id, const std::string& value, Timeout timeout,
                                      std::stop_token stop) override {
    const LimitedCall call(*bus_, timeout, stop);
    const auto gather = [&](BatchExchange& exchange, const PairView& view, const CallLimits& limits) {
      return exchange.all_gather(view, value, limits);
    };
    const size_t note = id.find(':');
    if (note == std::string::npos) return before_registration(id, call.limits(), gather);
    // Nobody waits for a registration of a note, and the next call under its name is about other values.
    bus_->require_own_process();
    check_name("batch", std::string_view(id).substr(0, note));
    check_name("note", std::string_view(id).substr(note + 1));
    const PairView present = view();
    BatchExchange& exchange = bus_->exchanges().of(present, id);
    std::vector<std::string> values = gather(exchange, present, call.limits());
    exchange.withdraw();
    return values;
  }

  void give_up(const std::string& id, const Status& why) override {
    bus_->require_own_process();
    check_name("batch", id);
    for (const std::string& job : jobs_) {
      if (!bus_->agent().claim_batch_of(name_, id, job, {})) continue;  // it is registered, or is just being
      exchange_with(job, id).begin();
      give_up(id, job, why);
      bus_->agent().release_batch(name_, id, job);
    }
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
                     .pair = name_,
                     .named = jobs_,
                     .several = several_,
                     .id = id,
                     .layout = layout_,
                     .options = batch_options,
                     .tensors = std::make_shared<const std::vector<TensorSpec>>(tensors.begin(), tensors.end()),
                     .runs = std::move(runs)};
    bus_->agent().claim_batch(name_, id, setup.named);  // the records of a live batch must not be overwritten
    const std::shared_ptr<BatchImpl> batch = make_batch(std::move(setup), sends);
    bus_->exchanges().of(view(), id).begin();
    try {
      batch->open(present_view(call.limits()), call.limits());
    } catch (...) {
      note_failure();
      give_up(id, jobs_.front(), status_of_current_exception());
      batch->part({});
      throw;
    }
    set_owing({});
    return batch;
  }

 private:
  void require_one_job(const std::string& batch) const {
    if (several_)
      fail(
          ErrorCode::kInvalidArgument,
          "pair {}, batch {}: it is received from one job, and the pair names {}: join a pair with the one that sends"_message,
          name_, batch, fmt::join(jobs_, ", "));
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
      bus_->rendezvous().leave(view(), why, lasting);
    } catch (const Error& error) {
      log_event(LogLevel::info, "departure.untold", {{"pair", name_}},
                "{}: the others cannot be told that it leaves pair {}: {}", bus_->agent().identity().name(), name_,
                error.what());
    }
  }

  PairView view() const {
    const MutexLock lock(mutex_);
    return view_;
  }

  // The ranks of both jobs as they are now: processes may have been replaced since all had joined. After a failure it
  // waits for those that have gone.
  PairView present_view(const CallLimits& limits) {
    PairView view;
    bool failed = false;
    {
      const MutexLock lock(mutex_);
      view = view_;
      failed = failed_;
    }
    if (!failed && !bus_->rendezvous().is_outdated(view, limits)) return view;
    view = bus_->rendezvous().rejoin(view, limits);
    const MutexLock lock(mutex_);
    failed_ = false;
    return view_ = view;
  }

  // Runs an exchange about a batch that is to be registered.
  template <typename Conversation>
  std::invoke_result_t<const Conversation&, BatchExchange&, const PairView&, const CallLimits&> before_registration(
      const std::string& batch, const CallLimits& limits, const Conversation& conversation) {
    bus_->require_own_process();
    check_name("batch", batch);
    set_owing(unregistered());
    try {
      const PairView view = present_view(limits);
      return conversation(bus_->exchanges().of(view, batch), view, limits);
    } catch (const Error& error) {
      note_failure();
      // After a deadline the user may try again; any other error ends the batch.
      if (error.code() == ErrorCode::kDeadlineExceeded)
        set_owing(gave_up(status_of_current_exception()));
      else
        give_up(batch, jobs_.front(), status_of_current_exception());
      throw;
    }
  }

  void note_failure() {
    const MutexLock lock(mutex_);
    failed_ = true;
  }

  BatchExchange& exchange_with(const std::string& job, const std::string& batch) {
    return bus_->exchanges().of({.name = name_, .peer_job = job, .own = {}, .peer = {}}, batch);
  }

  // The other ranks are waiting for this one.
  void give_up(const std::string& batch, const std::string& job, const Status& status) {
    set_owing(gave_up(status), status.code() == ErrorCode::kCancelled);
    try {
      BatchExchange& exchange = exchange_with(job, batch);
      exchange.report(status);
      exchange.withdraw();
      exchange.retract();
    } catch (const Error& error) {
      log_event(LogLevel::info, "departure.untold", {{"pair", view_.name}, {"batch", batch}},
                "{}: the others cannot be told that it gives batch {} up: {}", bus_->agent().identity().name(), batch,
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
    // The others were neither cancelled nor late.
    const bool own_affair = why.code() == ErrorCode::kCancelled || why.code() == ErrorCode::kDeadlineExceeded;
    return failed(own_affair ? ErrorCode::kPeerLost : why.code(), "{} gave up: {}"_message,
                  bus_->agent().identity().name(), why.message());
  }

  const std::shared_ptr<EmbeddedBus> bus_;
  const std::string name_;
  const std::vector<std::string> jobs_;  // the other ones; the first is the name under which own ranks meet
  const bool several_;                   // nobody waits for them
  const int peer_world_;                 // when all had joined
  const Layout layout_;                  // for tensors without one
  mutable Mutex mutex_;
  PairView view_ GUARDED_BY(mutex_);
  bool failed_ GUARDED_BY(mutex_) = false;  // a registration: somebody may have gone
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
