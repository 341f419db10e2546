#include "tessera/bus.h"

#include <algorithm>
#include <mutex>

#include "base/config.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/observation.h"
#include "bus/agent.h"
#include "bus/batch.h"
#include "bus/own_process.h"
#include "bus/receiver.h"
#include "bus/rendezvous.h"
#include "bus/sender.h"
#include "tessera/store.h"

namespace tessera {
namespace bus {

// A process' place on the bus. Pairs and batches keep it alive.
class BusImpl {
 public:
  explicit BusImpl(BusOptions options) : options_(complete(std::move(options))) {
    const Deadline deadline = Deadline::after(options_.timeout);
    store_ = open_store(options_.store, {.connect_timeout = options_.timeout, .stop = options_.stop});
    agent_ = std::make_unique<Agent>(
        Identity{options_.name_space, options_.job, options_.rank, options_.world},
        options_.threads > 0 ? options_.threads : std::max(1, usable_cpus() / std::max(1, options_.world)));
    rendezvous_ = std::make_unique<Rendezvous>(*store_, agent_->identity(), agent_->address(), agent_->waits());
    rendezvous_->claim({.deadline = deadline, .stop = options_.stop});
  }

  void require_own_process() const { process_.require(agent_->identity().name()); }
  bool in_own_process() const { return process_.here(); }

  const BusOptions& options() const { return options_; }
  Store& store() { return *store_; }
  Agent& agent() { return *agent_; }
  Rendezvous& rendezvous() { return *rendezvous_; }

 private:
  static BusOptions complete(BusOptions options) {
    const Config& config = Config::get();
    if (options.store.empty()) options.store = config.store;
    if (options.name_space.empty()) options.name_space = config.name_space;
    check_name("job", options.job);
    check_name("namespace", options.name_space);
    if (options.world < 1 || options.world > kMaxWorld)
      fail(ErrorCode::kInvalidArgument, "world {}: at least 1 and at most {} are possible", options.world, kMaxWorld);
    if (options.rank < 0 || options.rank >= options.world)
      fail(ErrorCode::kInvalidArgument, "rank {}: a job of world {} has ranks 0 to {}", options.rank, options.world,
           options.world - 1);
    if (options.threads < 0 || options.threads > 1024)
      fail(ErrorCode::kInvalidArgument, "threads {}: 0 (choose) to 1024 are possible", options.threads);
    return options;
  }

  const OwnProcess process_;
  const std::shared_ptr<Observation> observation_ = Observation::start();
  const BusOptions options_;
  // In this order: the rendezvous uses the store, nobody uses the rendezvous when it goes.
  std::unique_ptr<Store> store_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Rendezvous> rendezvous_;
};

// Two jobs joined. A rank that goes while others may wait for what it registers tells them why.
class PairImpl {
 public:
  PairImpl(std::shared_ptr<BusImpl> bus, PairView view, Layout layout)
      : bus_(std::move(bus)), view_(std::move(view)), layout_(std::move(layout)) {
    set_owing(unregistered());
  }
  ~PairImpl() {
    if (owing_.ok()) return;
    try {
      bus_->rendezvous().leave(view_, owing_, !bus_->options().stop.stop_requested());
    } catch (const Error& error) {
      log().info("{}: the others cannot be told that it leaves pair {}: {}", bus_->agent().identity().name(),
                 view_.name, error.what());
    }
  }
  PairImpl(const PairImpl&) = delete;
  PairImpl& operator=(const PairImpl&) = delete;

  const std::shared_ptr<BusImpl>& bus() const { return bus_; }
  const PairView& view() const { return view_; }
  const Layout& layout() const { return layout_; }

  std::vector<ManifestEntry> manifest(const std::string& id, Timeout timeout) {
    bus_->require_own_process();
    check_name("batch", id);
    set_owing(unregistered());
    try {
      return bus_->rendezvous().peer_manifest(view_, id, patience(timeout)).entries;
    } catch (const Error& error) {
      // After a deadline it may be asked for again; all else ends the batch, for which the other side is waiting.
      if (error.code() == ErrorCode::kDeadlineExceeded)
        set_owing(gave_up(status_of_current_exception()));
      else
        give_up(id, status_of_current_exception());
      throw;
    }
  }

  std::shared_ptr<BatchImpl> register_batch(const std::shared_ptr<PairImpl>& self, const std::string& id,
                                            std::span<const TensorSpec> tensors, bool sends, Timeout timeout,
                                            const BatchOptions& batch_options) {
    bus_->require_own_process();
    check_name("batch", id);
    if (batch_options.snapshots < 2 || batch_options.snapshots > static_cast<int>(kMaxSlots))
      fail(ErrorCode::kInvalidArgument, "batch {}: {} snapshots: 2 to {} are possible", id, batch_options.snapshots,
           kMaxSlots);
    const Deadline deadline = Deadline::after(timeout);
    const BusOptions& options = bus_->options();
    BatchSetup setup{.keep_alive = self,
                     .agent = &bus_->agent(),
                     .rendezvous = &bus_->rendezvous(),
                     .store = &bus_->store(),
                     .stop = options.stop,
                     .stall = options.stall,
                     .digest = options.digest,
                     .pair = view_.name,
                     .id = id,
                     .layout = layout_,
                     .options = batch_options,
                     .tensors = {tensors.begin(), tensors.end()}};
    bus_->agent().claim_batch(view_.name, id);  // what the live one has published must not be overwritten
    std::shared_ptr<BatchImpl> batch;
    if (sends)
      batch = std::make_shared<SenderBatch>(std::move(setup));
    else
      batch = std::make_shared<ReceiverBatch>(std::move(setup));
    bus_->rendezvous().begin(view_, id);
    try {
      batch->open(view_, deadline);
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
  // The others are waiting for this rank.
  void give_up(const std::string& batch, const Status& status) {
    set_owing(gave_up(status));
    try {
      bus_->rendezvous().report(view_, batch, status);
      bus_->rendezvous().withdraw(view_, batch);
    } catch (const Error& error) {
      log().info("{}: the others cannot be told that it gives batch {} up: {}", bus_->agent().identity().name(), batch,
                 error.what());
    }
  }

  Patience patience(Timeout timeout) const {
    return {.deadline = Deadline::after(timeout), .stop = bus_->options().stop};
  }

  void set_owing(Status reason) {
    const std::lock_guard lock(mutex_);
    owing_ = std::move(reason);
  }
  Status unregistered() const {
    return failed(ErrorCode::kPeerLost, "{} left before it had registered", bus_->agent().identity().name());
  }
  Status gave_up(const Status& why) const {
    const ErrorCode code = why.code() == ErrorCode::kCancelled ? ErrorCode::kPeerLost : why.code();  // to the others
    return failed(code, "{} gave up: {}", bus_->agent().identity().name(), why.message());
  }

  const std::shared_ptr<BusImpl> bus_;
  const PairView view_;
  const Layout layout_;  // of tensors that bring none
  std::mutex mutex_;
  Status owing_;  // not ok while the others may wait for a registration: what they are told if none comes
};

namespace {

// The tensors of all pairs as those of the first one, in alphabetical order, so that both jobs meet there.
struct Joined {
  std::shared_ptr<PairImpl> pair;
  std::vector<TensorSpec> tensors;
};

Joined join_parts(const BusImpl* bus, const std::string& batch,
                  std::vector<std::pair<std::shared_ptr<PairImpl>, std::span<const TensorSpec>>> parts) {
  if (parts.empty()) fail(ErrorCode::kInvalidArgument, "batch {}: it names no pair", batch);
  std::ranges::sort(parts, {}, [](const auto& part) { return part.first->view().name; });
  const PairView& first = parts.front().first->view();
  Joined joined{.pair = parts.front().first, .tensors = {}};
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [pair, tensors] = parts[i];
    const PairView& view = pair->view();
    if (pair->bus().get() != bus)
      fail(ErrorCode::kInvalidArgument, "batch {}: pair {} is another bus'", batch, view.name);
    if (i > 0 && view.name == parts[i - 1].first->view().name)
      fail(ErrorCode::kInvalidArgument, "batch {}: pair {} is named twice", batch, view.name);
    if (view.peer_job != first.peer_job)
      fail(ErrorCode::kInvalidArgument,
           "batch {}: pair {} is with job {}, pair {} with job {}: register one batch for each job", batch, first.name,
           first.peer_job, view.name, view.peer_job);
    for (TensorSpec tensor : tensors) {
      if (parts.size() > 1) tensor.name = fmt::format("{}/{}", view.name, tensor.name);
      if (tensor.layout == Layout{}) tensor.layout = pair->layout();
      joined.tensors.push_back(std::move(tensor));
    }
  }
  return joined;
}

// Lets an object go without running its destructor: it belongs to the parent of this forked child.
template <typename T>
void abandon(std::shared_ptr<T> object) {
  new std::shared_ptr<T>(std::move(object));
}

}  // namespace
}  // namespace bus

// --- Bus and Pair
// -----------------------------------------------------------------------------------------------------

Bus::Bus(BusOptions options) : impl_(std::make_shared<bus::BusImpl>(std::move(options))) {}
Bus::Bus(Bus&&) noexcept = default;
Bus& Bus::operator=(Bus&&) noexcept = default;
Bus::~Bus() {
  if (impl_ && !impl_->in_own_process()) bus::abandon(std::move(impl_));
}

Pair Bus::pair(const PairOptions& options) {
  impl_->require_own_process();
  bus::check_name("pair", options.name);
  bus::check_name("peer job", options.peer);
  if (options.peer == impl_->options().job)
    fail(ErrorCode::kInvalidArgument, "pair {}: job {} cannot be paired with itself", options.name, options.peer);
  return Pair(std::make_shared<bus::PairImpl>(
      impl_,
      impl_->rendezvous().join(options.name, options.peer,
                               {.deadline = Deadline::after(options.timeout), .stop = impl_->options().stop}),
      options.layout));
}

Batch Bus::register_parts(const std::string& batch_id, std::span<const BatchPart> parts, bool sends, Timeout timeout,
                          const BatchOptions& options) {
  std::vector<std::pair<std::shared_ptr<bus::PairImpl>, std::span<const TensorSpec>>> with;
  for (const BatchPart& part : parts) {
    if (part.pair == nullptr) fail(ErrorCode::kInvalidArgument, "batch {}: a part without a pair", batch_id);
    with.emplace_back(part.pair->impl_, part.tensors);
  }
  const bus::Joined joined = bus::join_parts(impl_.get(), batch_id, std::move(with));
  return Batch(joined.pair->register_batch(joined.pair, batch_id, joined.tensors, sends, timeout, options));
}

Batch Bus::offer(const std::string& batch_id, std::span<const BatchPart> parts, Timeout timeout,
                 const BatchOptions& options) {
  return register_parts(batch_id, parts, true, timeout, options);
}

Batch Bus::accept(const std::string& batch_id, std::span<const BatchPart> parts, Timeout timeout,
                  const BatchOptions& options) {
  return register_parts(batch_id, parts, false, timeout, options);
}

Pair::Pair(std::shared_ptr<bus::PairImpl> impl) : impl_(std::move(impl)) {}
Pair::Pair(Pair&&) noexcept = default;
Pair& Pair::operator=(Pair&&) noexcept = default;
Pair::~Pair() {
  if (impl_ && !impl_->bus()->in_own_process()) bus::abandon(std::move(impl_));
}

int Pair::peer_world() const {
  return static_cast<int>(impl_->view().peer.size());
}

Batch Pair::offer(const std::string& batch_id, std::span<const TensorSpec> tensors, Timeout timeout,
                  const BatchOptions& options) {
  return Batch(impl_->register_batch(impl_, batch_id, tensors, true, timeout, options));
}

Batch Pair::accept(const std::string& batch_id, std::span<const TensorSpec> tensors, Timeout timeout,
                   const BatchOptions& options) {
  return Batch(impl_->register_batch(impl_, batch_id, tensors, false, timeout, options));
}

std::vector<ManifestEntry> Pair::manifest(const std::string& batch_id, Timeout timeout) {
  return impl_->manifest(batch_id, timeout);
}

// --- Batch
// ------------------------------------------------------------------------------------------------------------

Batch::Batch(std::shared_ptr<bus::BatchImpl> impl) : impl_(std::move(impl)) {}
Batch::Batch(Batch&&) noexcept = default;
Batch& Batch::operator=(Batch&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Batch::~Batch() {
  if (!impl_) return;
  if (impl_->in_own_process())
    impl_->close();
  else
    bus::abandon(std::move(impl_));
}

Handle Batch::send(std::optional<int64_t> version, Timeout timeout) {
  return Handle(impl_->send(version, timeout));
}
Handle Batch::recv(std::optional<int64_t> min_version, Timeout timeout) {
  return Handle(impl_->recv(min_version, timeout));
}
Handle Batch::stage(std::optional<int64_t> min_version, Timeout timeout) {
  return Handle(impl_->stage(min_version, timeout));
}
int64_t Batch::commit() {
  return impl_->commit();
}
int64_t Batch::version() const {
  return impl_->version();
}
int64_t Batch::newest() const {
  return impl_->newest();
}
int64_t Batch::wait_version(int64_t version, Timeout timeout) {
  return impl_->wait_version(version, timeout);
}
bool Batch::undecided() const {
  return impl_->undecided();
}
bool Batch::torn() const {
  return impl_->torn();
}
BatchStats Batch::stats() const {
  return impl_->stats();
}
std::vector<TensorDigest> Batch::digests() const {
  return impl_->digests();
}
void Batch::close() {
  impl_->close();
}

// --- Handle
// -----------------------------------------------------------------------------------------------------------

Handle::Handle(std::shared_ptr<bus::Operation> operation) : operation_(std::move(operation)) {}
Handle::Handle(Handle&&) noexcept = default;
Handle& Handle::operator=(Handle&&) noexcept = default;
Handle::~Handle() = default;

int64_t Handle::wait() {
  return operation_->wait();
}
bool Handle::wait_for(Timeout timeout) {
  return operation_->wait_for(timeout);
}
bool Handle::done() const {
  return operation_->done();
}
bool Handle::cancel() {
  return operation_->cancel();
}
bool Handle::withdraw() {
  return operation_->withdraw();
}
Progress Handle::progress() const {
  return operation_->progress();
}
int64_t Handle::version() const {
  return operation_->version();
}

std::string TensorDigest::to_string() const {
  return fmt::format("{:016x}{:016x}", d0, d1);
}

}  // namespace tessera
