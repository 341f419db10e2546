#include "bus/lending/lender.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/socket.h"
#include "exec/pull/compiler.h"
#include "exec/pull/source.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/transport.h"

namespace tessera::bus {
namespace {

constexpr Duration kReportPeriod = seconds(0.1);
constexpr size_t kMaxLentRuns = 1 << 16;
constexpr size_t kMaxLentArenas = 1 << 14;

// Whether a peer that streams has it by the stream.
bool is_streamed(const SourceRoute& route, const Transport& transport) {
  const ByteExtent extent = extent_of(route.what.dtype, route.src.owned.extents(), route.src.strides);
  const MemoryDesc memory = describe_memory(route.data + extent.begin, static_cast<size_t>(extent.end - extent.begin));
  return !transport.exports(memory).has(Access::kMap);
}

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
    end(failed(ErrorCode::kCancelled, "{}: the operation has ended", name_));
    const MutexLock lock(mutex_);
    asked = true;
    idle_.notify_all();
  });
  if (!posted) return;
  const MutexLock lock(mutex_);
  idle_.wait(mutex_,
             [&]() REQUIRES(mutex_) { return asked && running_ == 0; });  // what is aborted ends within a unit of work
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
    link_->send(RunEnded{.run = entry.make.run, .epoch = *next, .bytes = 0, .status = status, .digests = {}});
  if (!entry.running) return;
  entry.ending = true;
  entry.run->abort(status);
}

void Lender::handle(Frame& frame) {
  switch (frame.type) {
    case kCode<LendArenas>:
      return lend_arenas(parse<LendArenas>(frame.payload), std::move(frame.fds));
    case kCode<MakeRun>:
      return make_run(parse<MakeRun>(frame.payload));
    case kCode<GiveStream>: {
      const auto number = parse<GiveStream>(frame.payload).run;
      Entry& entry = this->entry(number);
      if (!entry.made || !entry.make.stream || entry.run || frame.fds.empty())
        fail(ErrorCode::kMismatch, "lent memory: GiveStream for run {} out of turn", number);
      if (!entry.failed.ok()) return;
      return build(number, entry, {.fds = std::move(frame.fds)});
    }
    case kCode<StartRun>: {
      const auto message = parse<StartRun>(frame.payload);
      return start(message.run, message.epoch);
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
      fail(ErrorCode::kMismatch, "unexpected message {}", frame.type);
  }
}

Lender::Entry& Lender::entry(uint32_t number) {
  const auto it = runs_.find(number);
  if (it == runs_.end() || it->second.dropped) fail(ErrorCode::kMismatch, "lent memory: run {} is unknown", number);
  return it->second;
}

// --- making runs ---------------------------------------------------------------------------------

void Lender::lend_arenas(LendArenas lend, std::vector<UniqueFd> fds) {
  if (lend.arenas.size() != fds.size())
    fail(ErrorCode::kMismatch, "lent memory: {} arenas with {} descriptors", lend.arenas.size(), fds.size());
  if (runs_.size() >= kMaxLentRuns && !runs_.contains(lend.run))
    fail(ErrorCode::kMismatch, "lent memory: more than {} runs", kMaxLentRuns);
  Entry& entry = runs_[lend.run];
  if (entry.made || entry.own.size() + entry.peer_fds.size() + fds.size() > kMaxLentArenas)
    fail(ErrorCode::kMismatch, "lent memory: {} arenas for run {} out of turn", fds.size(), lend.run);
  for (size_t i = 0; i < fds.size(); ++i) {
    if (!lend.own) {
      entry.peer_arenas.push_back(lend.arenas[i]);
      entry.peer_fds.push_back(std::move(fds[i]));
      continue;
    }
    try {
      entry.own[lend.arenas[i].id] = {SharedHeap::process().adopt(fds[i].get(), lend.writable, link_->name()),
                                      lend.writable};
    } catch (const Error& error) {
      entry.failed = Status(error.code(), error.what());
    }
  }
}

void Lender::make_run(MakeRun make) {
  if (runs_.size() >= kMaxLentRuns && !runs_.contains(make.run))
    fail(ErrorCode::kMismatch, "lent memory: more than {} runs", kMaxLentRuns);
  const uint32_t number = make.run;
  Entry& entry = runs_[number];
  if (entry.made) fail(ErrorCode::kMismatch, "lent memory: run {} is made twice", number);
  entry.made = true;
  entry.make = std::move(make);
  entry.done = std::make_unique<LoopSignal>(loop_, [this, number] { handle_done(number); });
  if (entry.failed.ok() && !entry.make.stream) return build(number, entry, {});
  if (!entry.failed.ok()) failed_ = entry.failed;
}

void Lender::build(uint32_t number, Entry& entry, StreamEnd end) {
  try {
    const Endpoint self{.process = Incarnation::self(), .name = name_};
    std::unique_ptr<ByteStream> stream;
    if (entry.make.stream)
      stream = TransportRegistry::builtin().streams(self, self).open(std::move(end), link_->name());
    entry.run = entry.make.kind == MakeRun::Kind::kSource ? source_run(entry, std::move(stream))
                                                          : pull_run(entry, std::move(stream));
  } catch (const std::exception&) {
    entry.failed = failed_ = status_of_current_exception();
    log_event(LogLevel::warn, "run.failed", {{"peer", link_->name()}}, "{}: run {} for {}: {}", name_, number,
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
      fail(ErrorCode::kMismatch, "lent memory: tensor {} is {}, not {}", place.tensor, sends_ ? "sent" : "received",
           writes ? "written" : "read");
    if (place.tensor >= tensors_.size() || tensors_[place.tensor].empty())
      fail(ErrorCode::kMismatch, "lent memory: tensor {} of {} is not lent", place.tensor, tensors_.size());
    const LocalTensor& tensor = tensors_[place.tensor];
    if (tensor.dtype != dtype || static_cast<size_t>(tensor.array.owned.ndim()) != what.shape.size() ||
        tensor.array.owned.intersect(what.region) != what.region)
      fail(ErrorCode::kMismatch, "lent memory: tensor {}: {} of {} is not within {} of {}", tensor.name,
           what.region.to_string(), to_string(dtype), tensor.array.owned.to_string(), to_string(tensor.dtype));
    place.array = tensor.array;
    return tensor.data;
  }
  const auto arena = entry.own.find(place.memory.arena);
  if (place.kind != LentPlace::Kind::kAgent || arena == entry.own.end())
    fail(ErrorCode::kMismatch, "lent memory: tensor {}: memory in arena {}, which was not lent", what.tensor,
         place.memory.arena);
  const ByteExtent extent = extent_of(dtype, place.array.owned.extents(), place.array.strides);
  if (writes && !arena->second.writable)
    fail(ErrorCode::kMismatch, "lent memory: tensor {}: arena {} is not to be written", what.tensor,
         place.memory.arena);
  const uint64_t bytes = arena->second.memory->bytes();
  const auto before = static_cast<uint64_t>(-extent.begin);
  if (place.memory.offset > bytes || place.memory.bytes > bytes - place.memory.offset || place.origin != before ||
      static_cast<uint64_t>(extent.end) + before > place.memory.bytes)
    fail(ErrorCode::kMismatch, "lent memory: tensor {}: {} bytes at {} of an arena of {}", what.tensor,
         place.memory.bytes, place.memory.offset, bytes);
  return arena->second.memory->data() + place.memory.offset + place.origin;
}

std::unique_ptr<TransferRun> Lender::source_run(Entry& entry, std::unique_ptr<ByteStream> stream) {
  const MakeRun& make = entry.make;
  const Endpoint self{.process = Incarnation::self(), .name = name_};
  const Transport& transport = TransportRegistry::builtin().streaming(self, self);
  std::vector<SourceRoute> routes;
  for (const LentRoute& route : make.routes) {
    LentPlace src = route.src;
    SourceRoute& made = routes.emplace_back();
    made.what = route.what;
    made.data = resolve(entry, route.what, route.what.dtype, src, false);
    made.src = std::move(src.array);
    made.streamed = make.stream && is_streamed(made, transport);
  }
  auto program = std::make_shared<SourceProgram>(routes, SourceOptions{.digest = make.digest});
  if (program->fills_stream() != make.stream)
    fail(ErrorCode::kMismatch, "lent memory: a run {} a stream, and its tensors want it otherwise",
         make.stream ? "with" : "without");
  if (stream) entry.pool = std::make_unique<WorkerPool>(1, "tessera-fill");
  WorkerPool& pool = stream ? *entry.pool : this->pool(source_pool_, "tessera-src");
  return std::make_unique<SourceRun>(
      std::move(program), pool, [signal = entry.done.get()] { signal->raise(); }, make.peer_name, std::move(stream));
}

std::unique_ptr<TransferRun> Lender::pull_run(Entry& entry, std::unique_ptr<ByteStream> stream) {
  const MakeRun& make = entry.make;
  const Endpoint self{.process = Incarnation::self(), .name = name_};
  const bool within = !make.pulls();
  const Endpoint peer = within ? self : Endpoint{.process = make.peer, .name = make.peer_name};
  const std::shared_ptr<Connection> memory = TransportRegistry::builtin().choose(peer, self).connect(peer);
  for (size_t i = 0; i < entry.peer_arenas.size(); ++i)
    memory->add_arena(entry.peer_arenas[i], std::move(entry.peer_fds[i]));
  std::vector<PullRoute> routes;
  for (const LentRoute& route : make.routes) {
    if (within == (route.src.kind == LentPlace::Kind::kPeer))
      fail(ErrorCode::kMismatch, "lent memory: tensor {}: a source in the wrong place", route.what.tensor);
    LentPlace src = route.src;
    LentPlace dst = route.dst;
    PullRoute& made = routes.emplace_back();
    made.what = route.what;
    if (within) {  // by address: the loopback transport reads this process' own memory
      const std::byte* const data = resolve(entry, route.what, route.what.dtype, src, false);
      const ByteExtent extent = extent_of(route.what.dtype, src.array.owned.extents(), src.array.strides);
      src.memory = {.kind = MemoryDesc::Kind::kPrivate,
                    .arena = 0,
                    .offset = reinterpret_cast<uintptr_t>(data + extent.begin),
                    .bytes = static_cast<uint64_t>(extent.end - extent.begin)};
      src.origin = static_cast<uint64_t>(-extent.begin);
    } else if (src.memory.kind == MemoryDesc::Kind::kPrivate) {
      src.memory.kind = MemoryDesc::Kind::kRingOnly;  // never by address, whoever the peer is said to be
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
    fail(ErrorCode::kMismatch, "lent memory: a run {} a stream, and its tensors want it otherwise",
         make.stream ? "with" : "without");
  return std::make_unique<PullRun>(
      std::move(program), pool(pull_pool_, "tessera-pull"), [signal = entry.done.get()] { signal->raise(); },
      std::move(stream));
}

// --- running them --------------------------------------------------------------------------------

void Lender::start(uint32_t number, uint32_t epoch) {
  Entry& entry = this->entry(number);
  if (!entry.failed.ok())
    return link_->send(RunEnded{.run = number, .epoch = epoch, .bytes = 0, .status = entry.failed, .digests = {}});
  if (!entry.run) fail(ErrorCode::kMismatch, "lent memory: run {} is started before it is made", number);
  if (entry.next || (entry.running && !entry.ending))
    fail(ErrorCode::kMismatch, "lent memory: run {} is started twice", number);
  entry.next = epoch;
  begin_deferred();
}

// What was given up may write for a moment longer: nothing begins before it has ended.
void Lender::begin_deferred() {
  if (std::ranges::any_of(runs_, [](const auto& other) { return other.second.ending; })) return;
  for (auto& [number, entry] : runs_)
    if (const auto next = std::exchange(entry.next, std::nullopt)) begin(entry, *next);
}

void Lender::begin(Entry& entry, uint32_t epoch) {
  entry.running = true;
  entry.epoch = epoch;
  {
    const MutexLock lock(mutex_);
    ++running_;
  }
  entry.run->start(epoch);
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
    const MutexLock lock(mutex_);  // before the agent hears of it: see fence()
    --running_;
    idle_.notify_all();
  }
  const Status status = entry.run->status();
  RunEnded ended{
      .run = number, .epoch = entry.epoch, .bytes = entry.run->bytes_done(), .status = status, .digests = {}};
  if (status.ok()) ended.digests.assign(entry.run->digests().begin(), entry.run->digests().end());
  link_->send(ended);
  if (entry.dropped) loop_.post([this, number] { runs_.erase(number); });  // its signal is what calls
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
  abort(entry, failed(ErrorCode::kCancelled, "{}: the agent has given a run up", name_));
}

}  // namespace tessera::bus
