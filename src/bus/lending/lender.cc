#include "bus/lending/lender.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/socket.h"
#include "exec/pull/compiler.h"
#include "exec/pull/source.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/peer_memory.h"
#include "transport/transport.h"

namespace tessera::bus {
namespace {

constexpr Duration kReportPeriod = seconds(0.1);
constexpr size_t kMaxLentRuns = 1 << 16;
constexpr size_t kMaxLentRegions = 1 << 14;  // for one run

}  // namespace

Lender::Lender(std::string name, std::vector<LocalTensor> tensors, bool sends, int threads)
    : name_(std::move(name)), tensors_(std::move(tensors)), sends_(sends), threads_(threads), loop_("tessera-lend") {
  SocketPair sockets = socket_pair();
  agent_end_ = std::move(sockets.second);
  link_ = Link::adopt(loop_, std::move(sockets.first), "the agent of " + name_);
  link_->set_limits({.payload_bytes = kMaxMessageBytes, .fds = kMaxFdsPerMessage});
  link_->set_handlers([this](Frame& frame) { handle(frame); }, [this](const Status& status) { end(status); });
  loop_.start();
}

Lender::~Lender() {
  close();
  loop_.stop();
  for (auto& [number, entry] : runs_) entry.pool.reset();
  pull_pool_.reset();
  source_pool_.reset();
}

void Lender::quiesce() {
  bool asked = false;
  const bool posted = loop_.post([&] {
    link_->poll();
    end(failed(ErrorCode::kCancelled, "{}: the operation has ended"_message, name_));
    const MutexLock lock(mutex_);
    asked = true;
    idle_.notify_all();
  });
  if (!posted) return;
  const MutexLock lock(mutex_);
  idle_.wait(mutex_,
             [&]() REQUIRES(mutex_) { return asked && running_ == 0; });  // aborted runs end within a unit of work
}

void Lender::close() {
  loop_.post([this] { link_->close(); });
  quiesce();
}

void Lender::end(const Status& status) {
  for (auto& [number, entry] : runs_) abort(entry, status);
}

void Lender::abort(Entry& entry, const Status& status) {
  if (const auto next = std::exchange(entry.next, std::nullopt))
    link_->send(RunEnded{.run = entry.make.run, .epoch = next->epoch, .bytes = 0, .status = status, .digests = {}});
  if (!entry.running) return;
  entry.ending = true;
  entry.run->abort(status);
}

void Lender::handle(Frame& frame) {
  switch (frame.type) {
    case kCode<LendArenas>:
      return lend_arenas(parse<LendArenas>(frame.payload), std::move(frame.fds));
    case kCode<LendKeys>:
      return lend_keys(parse<LendKeys>(frame.payload), std::move(frame.fds));
    case kCode<MakeRun>:
      return make_run(parse<MakeRun>(frame.payload));
    case kCode<GiveStream>: {
      auto given = parse<GiveStream>(frame.payload);
      const uint32_t number = given.run;
      Entry& entry = this->entry(number);
      if (!entry.made || !entry.make.stream || entry.run || frame.fds.empty())
        fail(ErrorCode::kMismatch, "lent memory: GiveStream for run {} out of turn"_message, number);
      if (!entry.failed.ok()) return;
      return build(number, entry, {.transport = std::move(given.transport), .fds = std::move(frame.fds)});
    }
    case kCode<StartRun>: {
      return start(parse<StartRun>(frame.payload));
    }
    case kCode<AbortRun>: {
      const auto message = parse<AbortRun>(frame.payload);
      return abort(entry(message.run), message.status);
    }
    case kCode<DropRun>:
      return drop(parse<DropRun>(frame.payload).run);
    case kCode<Sync>:
      return link_->send(
          Synced{.number = parse<Sync>(frame.payload).number, .status = std::exchange(failed_, Status())});
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
  }
}

Lender::Entry& Lender::entry(uint32_t number) {
  const auto it = runs_.find(number);
  if (it == runs_.end() || it->second.dropped)
    fail(ErrorCode::kMismatch, "lent memory: run {} is unknown"_message, number);
  return it->second;
}

// --- making runs ---------------------------------------------------------------------------------

// A run for which memory has been lent, before it is made.
Lender::Entry& Lender::unmade(uint32_t number, size_t more) {
  if (runs_.size() >= kMaxLentRuns && !runs_.contains(number))
    fail(ErrorCode::kMismatch, "lent memory: more than {} runs"_message, kMaxLentRuns);
  Entry& entry = runs_[number];
  if (entry.made || entry.own.size() + entry.peer_keys.size() + more > kMaxLentRegions)
    fail(ErrorCode::kMismatch, "lent memory: {} regions for run {} out of turn"_message, more, number);
  return entry;
}

void Lender::lend_arenas(const LendArenas& lend, std::vector<UniqueFd> fds) {
  if (lend.arenas.size() != fds.size())
    fail(ErrorCode::kMismatch, "lent memory: {} arenas with {} descriptors"_message, lend.arenas.size(), fds.size());
  Entry& entry = unmade(lend.run, fds.size());
  for (size_t i = 0; i < fds.size(); ++i) {
    try {
      entry.own[lend.arenas[i]] = {SharedHeap::process().adopt(fds[i].get(), lend.writable, link_->name()),
                                   lend.writable};
    } catch (const Error& error) {
      entry.failed = Status(error.code(), error.what());
    }
  }
}

void Lender::lend_keys(LendKeys lend, std::vector<UniqueFd> fds) {
  Entry& entry = unmade(lend.run, lend.keys.size());
  attach_fds(lend.keys, std::move(fds));
  std::ranges::move(lend.keys, std::back_inserter(entry.peer_keys));
}

void Lender::make_run(MakeRun make) {
  if (runs_.size() >= kMaxLentRuns && !runs_.contains(make.run))
    fail(ErrorCode::kMismatch, "lent memory: more than {} runs"_message, kMaxLentRuns);
  const uint32_t number = make.run;
  Entry& entry = runs_[number];
  if (entry.made) fail(ErrorCode::kMismatch, "lent memory: run {} is made twice"_message, number);
  entry.made = true;
  entry.make = std::move(make);
  entry.done = std::make_unique<LoopSignal>(loop_, [this, number] { handle_done(number); });
  if (entry.failed.ok() && !entry.make.stream) return build(number, entry, {});
  if (!entry.failed.ok()) failed_ = entry.failed;
}

void Lender::build(uint32_t number, Entry& entry, StreamEnd end) {
  try {
    std::unique_ptr<ByteStream> stream;
    if (entry.make.stream)
      stream = TransportRegistry::builtin().open_stream(std::move(end), self(), self(), link_->name());
    entry.run = entry.make.kind == MakeRun::Kind::kSource ? source_run(entry, std::move(stream))
                                                          : pull_run(entry, std::move(stream));
  } catch (const std::exception&) {
    entry.failed = failed_ = status_of_current_exception();
    log_event(LogLevel::warn, "run.failed", {{"peer", link_->name()}}, "{}: run {} for {}: {}"_message, name_, number,
              link_->name(), entry.failed.message());
  }
  entry.make.routes = {};
}

WorkerPool& Lender::pool(std::unique_ptr<WorkerPool>& pool, const char* name) const {
  if (!pool) pool = std::make_unique<WorkerPool>(threads_, name);
  return *pool;
}

std::byte* Lender::resolve(const Entry& entry, const RouteRegion& what, DType dtype, LentPlace& place,
                           bool writes) const {
  if (place.kind == LentPlace::Kind::kTensor) {
    if (writes == sends_)
      fail(ErrorCode::kMismatch, "lent memory: tensor {} is {}, not {}"_message, place.tensor,
           sends_ ? "sent" : "received", writes ? "written" : "read");
    if (place.tensor >= tensors_.size() || tensors_[place.tensor].empty())
      fail(ErrorCode::kMismatch, "lent memory: tensor {} of {} is not lent"_message, place.tensor, tensors_.size());
    const LocalTensor& tensor = tensors_[place.tensor];
    if (tensor.dtype != dtype || static_cast<size_t>(tensor.array.owned.ndim()) != what.shape.size() ||
        tensor.array.owned.intersect(what.region) != what.region)
      fail(ErrorCode::kMismatch, "lent memory: tensor {}: {} of {} is not within {} of {}"_message, tensor.name,
           what.region.to_string(), to_string(dtype), tensor.array.owned.to_string(), to_string(tensor.dtype));
    place.array = tensor.array;
    return tensor.data;
  }
  const auto arena = entry.own.find(place.memory.key);
  if (place.kind != LentPlace::Kind::kAgent || arena == entry.own.end())
    fail(ErrorCode::kMismatch, "lent memory: tensor {}: memory in arena {}, which was not lent"_message, what.tensor,
         place.memory.key);
  const ByteExtent extent = extent_of(dtype, place.array.owned.extents(), place.array.strides);
  if (writes && !arena->second.writable)
    fail(ErrorCode::kMismatch, "lent memory: tensor {}: arena {} is not to be written"_message, what.tensor,
         place.memory.key);
  const uint64_t bytes = arena->second.memory->bytes();
  const auto before = static_cast<uint64_t>(-extent.begin);
  if (place.memory.offset > bytes || place.memory.bytes > bytes - place.memory.offset || place.origin != before ||
      static_cast<uint64_t>(extent.end) + before > place.memory.bytes)
    fail(ErrorCode::kMismatch, "lent memory: tensor {}: {} bytes at {} of an arena of {}"_message, what.tensor,
         place.memory.bytes, place.memory.offset, bytes);
  return arena->second.memory->data() + place.memory.offset + place.origin;
}

std::unique_ptr<TransferRun> Lender::source_run(Entry& entry, std::unique_ptr<ByteStream> stream) {
  const MakeRun& make = entry.make;
  std::vector<SourceRoute> routes;
  for (const LentRoute& route : make.routes) {
    LentPlace src = route.src;
    SourceRoute& made = routes.emplace_back();
    made.what = route.what;
    made.data = resolve(entry, route.what, route.what.dtype, src, false);
    made.src = std::move(src.array);
    made.streamed = route.streamed;
  }
  auto program = std::make_shared<SourceProgram>(routes, SourceOptions{.digest = make.digest});
  if (program->fills_stream() != make.stream)
    fail(ErrorCode::kMismatch, "lent memory: a run {} a stream, and its tensors want it otherwise"_message,
         make.stream ? "with" : "without");
  if (stream) entry.pool = std::make_unique<WorkerPool>(1, "tessera-fill");
  WorkerPool& pool = stream ? *entry.pool : this->pool(source_pool_, "tessera-src");
  return std::make_unique<SourceRun>(
      std::move(program), pool, [signal = entry.done.get()] { signal->raise(); }, make.peer_name, std::move(stream));
}

// A key that leads back into this process would give access to all of it, whoever the peer claims to be.
std::shared_ptr<const Connection> Lender::connect_to_peer(Entry& entry) const {
  const TransportRegistry& registry = TransportRegistry::builtin();
  const std::string_view within = registry.choose(self(), self()).name();
  auto memory = std::make_shared<PeerMemory>(
      registry, Endpoint{.process = entry.make.peer, .name = entry.make.peer_name}, self());
  for (uint32_t i = 0; i < entry.peer_keys.size(); ++i) {
    if (entry.peer_keys[i].transport == within)
      fail(ErrorCode::kMismatch, "lent memory: key {} of {} is for memory of this very process"_message, i,
           entry.make.peer_name);
    memory->add_key(i, std::move(entry.peer_keys[i]));
  }
  return memory;
}

std::unique_ptr<TransferRun> Lender::pull_run(Entry& entry, std::unique_ptr<ByteStream> stream) {
  const MakeRun& make = entry.make;
  const bool within = !make.pulls();
  const std::shared_ptr<const Connection> memory = within ? connect_to_self(self()) : connect_to_peer(entry);
  std::vector<PullRoute> routes;
  for (const LentRoute& route : make.routes) {
    if (within == (route.src.kind == LentPlace::Kind::kPeer))
      fail(ErrorCode::kMismatch, "lent memory: tensor {}: a source in the wrong place"_message, route.what.tensor);
    LentPlace src = route.src;
    LentPlace dst = route.dst;
    PullRoute& made = routes.emplace_back();
    made.what = route.what;
    if (within) {
      const std::byte* const data = resolve(entry, route.what, route.what.dtype, src, false);
      const ByteExtent extent = extent_of(route.what.dtype, src.array.owned.extents(), src.array.strides);
      src.memory = own_range(data + extent.begin, static_cast<size_t>(extent.end - extent.begin));
      src.origin = static_cast<uint64_t>(-extent.begin);
    }
    made.memory = src.memory;
    made.origin = src.origin;
    made.src = std::move(src.array);
    made.data = resolve(entry, route.what, route.dst_dtype, dst, true);
    made.dst = std::move(dst.array);
    made.dst_dtype = route.dst_dtype;
  }
  const auto path = within ? std::nullopt : std::optional(Access::kStream);
  auto program =
      std::make_shared<PullProgram>(memory, routes, PullOptions{.digest = make.digest, .private_access = path});
  if (program->wants_stream() != make.stream)
    fail(ErrorCode::kMismatch, "lent memory: a run {} a stream, and its tensors want it otherwise"_message,
         make.stream ? "with" : "without");
  return std::make_unique<PullRun>(
      std::move(program), pool(pull_pool_, "tessera-pull"), [signal = entry.done.get()] { signal->raise(); },
      std::move(stream));
}

// --- running them --------------------------------------------------------------------------------

void Lender::start(const StartRun& message) {
  const uint32_t number = message.run;
  Entry& entry = this->entry(number);
  if (!entry.failed.ok())
    return link_->send(
        RunEnded{.run = number, .epoch = message.epoch, .bytes = 0, .status = entry.failed, .digests = {}});
  if (!entry.run) fail(ErrorCode::kMismatch, "lent memory: run {} is started before it is made"_message, number);
  if (entry.next || (entry.running && !entry.ending))
    fail(ErrorCode::kMismatch, "lent memory: run {} is started twice"_message, number);
  entry.next = message;
  begin_deferred();
}

// An aborted run may write for a moment longer: no other begins before it has ended.
void Lender::begin_deferred() {
  if (std::ranges::any_of(runs_, [](const auto& other) { return other.second.ending; })) return;
  for (auto& [number, entry] : runs_)
    if (const auto next = std::exchange(entry.next, std::nullopt)) begin(entry, *next);
}

void Lender::begin(Entry& entry, const StartRun& message) {
  entry.running = true;
  entry.epoch = message.epoch;
  {
    const MutexLock lock(mutex_);
    ++running_;
  }
  entry.run->start(message.epoch, message.sample);
  if (report_timer_ == 0) report_timer_ = loop_.add_timer_after(kReportPeriod, [this] { report(); });
}

void Lender::report() {
  report_timer_ = 0;
  for (const auto& [number, entry] : runs_) {
    if (!entry.running) continue;
    link_->send(RunProgress{.run = number, .epoch = entry.epoch, .bytes = entry.run->bytes_done()});
    if (report_timer_ == 0) report_timer_ = loop_.add_timer_after(kReportPeriod, [this] { report(); });
  }
}

void Lender::handle_done(uint32_t number) {
  Entry& entry = runs_.at(number);
  entry.running = false;
  entry.ending = false;
  {
    const MutexLock lock(mutex_);  // before the agent is told: see fence()
    --running_;
    idle_.notify_all();
  }
  const Status status = entry.run->status();
  RunEnded ended{
      .run = number, .epoch = entry.epoch, .bytes = entry.run->bytes_done(), .status = status, .digests = {}};
  if (status.ok()) ended.digests.assign(entry.run->digests().begin(), entry.run->digests().end());
  link_->send(ended);
  if (entry.dropped) loop_.post([this, number] { runs_.erase(number); });  // the caller is its signal
  begin_deferred();
}

void Lender::drop(uint32_t number) {
  const auto it = runs_.find(number);
  if (it == runs_.end()) return;
  Entry& entry = it->second;
  entry.next.reset();
  if (!entry.running) {
    runs_.erase(it);
    return;
  }
  entry.dropped = true;
  abort(entry, failed(ErrorCode::kCancelled, "{}: the agent has given up a run"_message, name_));
}

}  // namespace tessera::bus
