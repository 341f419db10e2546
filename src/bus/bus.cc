#include "tessera/bus.h"

#include <algorithm>
#include <exception>

#include "base/config.h"
#include "base/escape.h"
#include "base/fail.h"
#include "bus/batch/client.h"
#include "bus/daemon/client.h"
#include "bus/embedded.h"
#include "bus/registration/records.h"
#include "codec/simd/kernel.h"
#include "transport/transport.h"

namespace tessera {

DigestMode DigestMode::parse(std::string_view text) {
  if (text == "full") return kFull;
  if (text == "sampled") return kSampled;
  if (text == "off") return kOff;
  fail(ErrorCode::kInvalidArgument, "digest {}: full, sampled and off are possible"_message, in_quotes(text));
}
namespace bus {

BusOptions complete(BusOptions options) {
  Config::require_valid();
  (void)active_kernel();  // refuses TESSERA_FORCE_KERNEL here, not on a thread
  require_forced_transport();
  const Config& config = Config::get();
  if (options.store.empty()) options.store = config.store;
  check_name("job", options.job);
  check_name(options.name_space.empty() ? "TESSERA_NAMESPACE" : "namespace",
             options.name_space.empty() ? config.name_space : options.name_space);
  if (options.name_space.empty()) options.name_space = config.name_space;
  if (options.world < 1 || options.world > kMaxWorld)
    fail(ErrorCode::kInvalidArgument, "world {}: at least 1 and at most {} are possible"_message, options.world,
         kMaxWorld);
  if (options.rank < 0 || options.rank >= options.world)
    fail(ErrorCode::kInvalidArgument, "rank {}: a job of world {} has ranks 0 to {}"_message, options.rank,
         options.world, options.world - 1);
  const std::string_view agent_source = options.agent.empty() ? "TESSERA_AGENT" : "agent";
  if (options.agent.empty()) options.agent = config.agent;
  if (options.agent != kEmbeddedAgent && options.agent != kDaemonAgent)
    fail(ErrorCode::kInvalidArgument, "{} {}: {} or {} are possible"_message, agent_source, in_quotes(options.agent),
         kEmbeddedAgent, kDaemonAgent);
  if (options.threads < 0 || options.threads > 1024)
    fail(ErrorCode::kInvalidArgument, "threads {}: 0 (choose) to 1024 are possible"_message, options.threads);
  return options;
}

BatchOptions complete(BatchOptions options, const std::string& batch, Timeout timeout) {
  if (!options.linger) options.linger = timeout;
  if (*options.linger < Timeout(0))
    fail(ErrorCode::kInvalidArgument, "batch {}: a linger of {} s: it cannot be negative"_message, batch,
         to_seconds(*options.linger));
  return options;
}

void check(const BusOptions& bus, const PairOptions& pair) {
  check_name("pair", pair.name);
  if (!pair.peers.empty() && !pair.peer.empty())
    fail(ErrorCode::kInvalidArgument, "pair {}: it names peer {} and a list of peers: give one of the two"_message,
         pair.name, pair.peer);
  if (pair.peers.size() > kMaxPeers)
    fail(ErrorCode::kInvalidArgument, "pair {}: {} peers: at most {} are possible"_message, pair.name,
         pair.peers.size(), kMaxPeers);
  std::vector<std::string> peers = pair.peers.empty() ? std::vector{pair.peer} : pair.peers;
  for (const std::string& peer : peers) {
    check_name("peer job", peer);
    if (peer == bus.job)
      fail(ErrorCode::kInvalidArgument, "pair {}: job {} cannot be paired with itself"_message, pair.name, peer);
  }
  std::ranges::sort(peers);
  if (const auto twice = std::ranges::adjacent_find(peers); twice != peers.end())
    fail(ErrorCode::kInvalidArgument, "pair {}: peer {} is named twice"_message, pair.name, *twice);
}

namespace {

std::shared_ptr<BusClient> open_client(BusOptions options) {
  return options.agent == kDaemonAgent ? open_daemon_client(std::move(options)) : open_embedded(std::move(options));
}

// The tensors of all pairs as if they were the first pair's, in alphabetical order, which both jobs share.
struct Joined {
  std::shared_ptr<PairClient> pair;
  std::vector<TensorSpec> tensors;
};

Joined join_parts(const BusClient* bus, const std::string& batch,
                  std::vector<std::pair<std::shared_ptr<PairClient>, std::span<const TensorSpec>>> parts) {
  if (parts.empty()) fail(ErrorCode::kInvalidArgument, "batch {}: it names no pair"_message, batch);
  std::ranges::sort(parts, {}, [](const auto& part) { return part.first->name(); });
  const PairClient& first = *parts.front().first;
  Joined joined{.pair = parts.front().first, .tensors = {}};
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [pair, tensors] = parts[i];
    if (pair->bus() != bus)
      fail(ErrorCode::kInvalidArgument, "batch {}: pair {} is another bus'"_message, batch, pair->name());
    if (i > 0 && pair->name() == parts[i - 1].first->name())
      fail(ErrorCode::kInvalidArgument, "batch {}: pair {} is named twice"_message, batch, pair->name());
    if (pair->peer_job() != first.peer_job())
      fail(ErrorCode::kInvalidArgument,
           "batch {}: pair {} is with job {}, pair {} with job {}: register one batch for each job"_message, batch,
           first.name(), first.peer_job(), pair->name(), pair->peer_job());
    for (TensorSpec tensor : tensors) {
      for (std::string* name : {&tensor.name, &tensor.source.name})
        if (parts.size() > 1 && !name->empty()) *name = fmt::format("{}/{}", pair->name(), *name);
      if (tensor.layout == Layout{}) tensor.layout = pair->layout();
      joined.tensors.push_back(std::move(tensor));
    }
  }
  return joined;
}

// Drops an object without running its destructor: it belongs to the parent of this forked child.
template <typename T>
void abandon(std::shared_ptr<T> object) {
  new std::shared_ptr<T>(std::move(object));
}

}  // namespace
}  // namespace bus

namespace {

// The ratio between `others` plus these elements in bf16 and `bytes`.
double ratio_to_bf16(int64_t bytes, int64_t elements, int64_t others) {
  const int64_t in_bf16 = others + bytes_of(DType::kBF16, elements);
  return in_bf16 == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(in_bf16);
}

}  // namespace

// --- Bus and Pair --------------------------------------------------------------------------------

Bus::Bus(BusOptions options) : impl_(bus::open_client(bus::complete(std::move(options)))) {}
Bus::Bus(Bus&&) noexcept = default;
Bus& Bus::operator=(Bus&&) noexcept = default;
Bus::~Bus() {
  if (impl_ && !impl_->in_own_process()) bus::abandon(std::move(impl_));
}

bool Bus::alive() const {
  return impl_->alive();
}

void Bus::interrupt() {
  if (impl_->in_own_process()) impl_->interrupt();  // in a forked child nothing waits
}

Pair Bus::pair(const PairOptions& options) {
  impl_->require_own_process();
  bus::check(impl_->options(), options);
  return Pair(impl_->pair(options));
}

Batch Bus::register_parts(const std::string& batch_id, std::span<const BatchPart> parts, bool sends, Timeout timeout,
                          const BatchOptions& options) {
  std::vector<std::pair<std::shared_ptr<bus::PairClient>, std::span<const TensorSpec>>> with;
  for (const BatchPart& part : parts) {
    if (part.pair == nullptr) fail(ErrorCode::kInvalidArgument, "batch {}: a part without a pair"_message, batch_id);
    with.emplace_back(part.pair->impl_, part.tensors);
  }
  const bus::Joined joined = bus::join_parts(impl_.get(), batch_id, std::move(with));
  return Batch(
      joined.pair->register_batch(batch_id, joined.tensors, sends, timeout, bus::complete(options, batch_id, timeout)));
}

Batch Bus::offer(const std::string& batch_id, std::span<const BatchPart> parts, Timeout timeout,
                 const BatchOptions& options) {
  return register_parts(batch_id, parts, true, timeout, options);
}

Batch Bus::accept(const std::string& batch_id, std::span<const BatchPart> parts, Timeout timeout,
                  const BatchOptions& options) {
  return register_parts(batch_id, parts, false, timeout, options);
}

Pair::Pair(std::shared_ptr<bus::PairClient> impl) : impl_(std::move(impl)) {}
Pair::Pair(Pair&&) noexcept = default;
Pair& Pair::operator=(Pair&&) noexcept = default;
Pair::~Pair() {
  if (impl_ && !impl_->in_own_process()) bus::abandon(std::move(impl_));
}

uint64_t Pair::membership() const {
  return impl_->membership();
}

int Pair::peer_world() const {
  return impl_->peer_world();
}

Batch Pair::offer(const std::string& batch_id, std::span<const TensorSpec> tensors, Timeout timeout,
                  const BatchOptions& options) {
  return Batch(impl_->register_batch(batch_id, tensors, true, timeout, bus::complete(options, batch_id, timeout)));
}

Batch Pair::accept(const std::string& batch_id, std::span<const TensorSpec> tensors, Timeout timeout,
                   const BatchOptions& options) {
  return Batch(impl_->register_batch(batch_id, tensors, false, timeout, bus::complete(options, batch_id, timeout)));
}

std::vector<ManifestEntry> Pair::manifest(const std::string& batch_id, Timeout timeout, std::stop_token stop) {
  return impl_->manifest(batch_id, timeout, std::move(stop));
}

void Pair::give_up(const std::string& batch_id, const Status& why) {
  impl_->give_up(batch_id, why);
}

std::vector<std::string> Pair::all_gather(const std::string& batch_id, const std::string& value, Timeout timeout,
                                          std::stop_token stop) {
  if (value.size() > kMaxGathered)
    fail(ErrorCode::kInvalidArgument, "batch {}: {} bytes would be gathered from a rank, but the limit is {}"_message,
         batch_id, value.size(), kMaxGathered);
  return impl_->all_gather(batch_id, value, timeout, std::move(stop));
}

// --- Batch ---------------------------------------------------------------------------------------

Batch::Batch(std::shared_ptr<bus::BatchClient> impl) : impl_(std::move(impl)) {}
Batch::Batch(Batch&&) noexcept = default;
Batch& Batch::operator=(Batch&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
Batch::~Batch() {
  if (!impl_) return;
  if (impl_->in_own_process())
    impl_->close(std::uncaught_exceptions() > 0 ? std::optional(Timeout(0)) : std::nullopt);
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
void Batch::relocate(std::span<const TensorSpec> tensors) {
  impl_->relocate(tensors);
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
std::vector<BatchPeer> Batch::peers() const {
  return impl_->peers();
}
void Batch::wait_peers(int jobs, int64_t version, Timeout timeout) {
  impl_->wait_peers(jobs, version, timeout);
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
double BatchStats::quantized_ratio() const {
  return ratio_to_bf16(quantized_bytes, quantized_elements, 0);
}
double BatchStats::batch_ratio() const {
  return ratio_to_bf16(bytes_moved, quantized_elements_moved, bytes_moved - quantized_bytes_moved);
}
std::vector<TensorDigest> Batch::digests() const {
  return impl_->digests();
}
Untaken Batch::close(std::optional<Timeout> linger) {
  return impl_->close(linger);
}

// --- Handle --------------------------------------------------------------------------------------

Handle::Handle(std::shared_ptr<bus::OperationClient> operation) : operation_(std::move(operation)) {}
Handle::Handle(Handle&&) noexcept = default;
Handle& Handle::operator=(Handle&&) noexcept = default;
Handle::~Handle() = default;

int64_t Handle::wait() {
  return operation_->wait();
}
bool Handle::wait_for(Timeout timeout, std::stop_token stop) {
  return operation_->wait_for(timeout, std::move(stop));
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
