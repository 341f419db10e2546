#include "bus/lending/lent_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/socket.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/peer_memory.h"

namespace tessera::bus {
LentMemory::LentMemory(uint64_t bytes, const Incarnation& worker, std::string worker_name)
    : worker_(worker), name_(std::move(worker_name)), bytes_(bytes) {
  void* const data = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED)
    fail(ErrorCode::kResourceExhausted, "{}: {} bytes of addresses for what it lends: {}"_message, name_, bytes,
         std::strerror(errno));
  data_ = static_cast<std::byte*>(data);
}

LentMemory::~LentMemory() {
  TESSERA_CHECK(runs_.empty());
  ::munmap(data_, bytes_);
}

void LentMemory::set_tensors(std::vector<LocalTensor> tensors) {
  tensors_ = std::move(tensors);
  for (uint32_t i = 0; i < tensors_.size(); ++i)
    if (!tensors_[i].empty()) places_.emplace(tensors_[i].data, i);
}

void LentMemory::connect(Agent& agent, UniqueFd socket, std::function<void(const Status&)> on_lost) {
  agent_ = &agent;
  on_lost_ = std::move(on_lost);
  link_ = Link::adopt(agent.loop(), std::move(socket), name_);
  link_->set_limits({.payload_bytes = kMaxMessageBytes, .fds = 0});
  link_->set_handlers([this](Frame& frame) { handle(frame); },
                      [this](const Status& status) {
                        lose(status);
                        if (on_lost_) on_lost_(status);
                      });
  link_->watch_process(worker_);
}

void LentMemory::close() {
  on_lost_ = nullptr;
  if (link_) link_->close();
  lose(failed(ErrorCode::kCancelled, "{}: the batch is closed"_message, name_));
}

void LentMemory::lose(const Status& status) {
  const Status lost =
      failed(status.code(), "{}; what it lends is lost: register the batch again"_message, status.message());
  {
    const MutexLock lock(mutex_);
    if (!lost_.ok()) return;
    lost_ = lost;
  }
  changed_.notify_all();
  for (const auto& [number, run] : runs_) run->end(lost);
}

void LentMemory::end_if_stopped() {
  const auto under_way = [](const auto& entry) { return entry.second->running(); };
  if (Clock::steady().now() - heard_ < kSilence || std::ranges::none_of(runs_, under_way)) return;
  const Status status = stop_detector_.look(name_, worker_);
  if (status.ok()) return;
  for (const auto& [number, run] : runs_) {
    run->abort(status);
    run->end(status);  // when the worker continues, it may go on reading and writing its own memory
  }
}

void LentMemory::handle(Frame& frame) {
  heard_ = Clock::steady().now();
  switch (frame.type) {
    case kCode<RunProgress>: {
      const auto progress = parse<RunProgress>(frame.payload);
      LentRun* const run = find(progress.run);
      if (run != nullptr && run->running_ && run->epoch_ == progress.epoch) run->set_bytes_done(progress.bytes);
      return;
    }
    case kCode<RunEnded>:
      return handle_ended(parse<RunEnded>(frame.payload));
    case kCode<Synced>: {
      Synced synced = parse<Synced>(frame.payload);
      {
        const MutexLock lock(mutex_);
        synced_ = std::move(synced);
      }
      return changed_.notify_all();
    }
    default:
      fail(ErrorCode::kMismatch, "unexpected message {}"_message, frame.type);
  }
}

void LentMemory::handle_ended(RunEnded ended) {
  LentRun* const run = find(ended.run);
  if (run == nullptr || !run->running_ || run->epoch_ != ended.epoch) return;  // aborted in the meantime
  if (ended.status.ok() && ended.digests.size() != run->digests_.size())
    fail(ErrorCode::kMismatch, "RunEnded: {} digests where there are {}"_message, ended.digests.size(),
         run->digests_.size());
  if (ended.status.ok()) run->digests_ = std::move(ended.digests);
  run->set_bytes_done(ended.bytes);
  run->end(ended.status);
}

LentRun* LentMemory::find(uint32_t run) const {
  const auto it = runs_.find(run);
  return it == runs_.end() ? nullptr : it->second;
}

void LentMemory::sync(const Deadline& deadline, const std::stop_token& stop) {
  uint32_t number = 0;
  agent_->run_on_loop([&] {
    const MutexLock lock(mutex_);
    number = ++last_sync_;
    link_->send(Sync{.number = number});
  });
  const MutexLock lock(mutex_);
  const auto over = [&]() REQUIRES(mutex_) { return !lost_.ok() || synced_.number >= number; };
  StopDetector detector;
  const auto next_look = [&] { return Deadline::after(std::min(deadline.left(), kStopPeriod)); };
  while (!changed_.wait_until(mutex_, stop, next_look(), over)) {
    if (stop.stop_requested()) fail(ErrorCode::kCancelled, "{}: the wait for it was interrupted"_message, name_);
    if (deadline.passed()) fail(ErrorCode::kDeadlineExceeded, "{}: it does not answer"_message, name_);
    detector.look(name_, worker_).throw_if_error();
  }
  lost_.throw_if_error();
  synced_.status.throw_if_error();
}

// --- making runs ---------------------------------------------------------------------------------

// Turns routes of this process into routes for the worker.
class LentMemory::Maker {
 public:
  Maker(LentMemory& memory, MakeRun::Kind kind, bool digest, bool stream) : memory_(memory) {
    make_.run = ++memory.last_run_;
    make_.kind = kind;
    make_.digest = digest;
    make_.stream = stream;
  }
  MakeRun& message() { return make_; }

  // The place of `data` in this process: a tensor of the worker's, or the agent's own memory.
  LentPlace place(DType dtype, const LocalArray& array, const std::byte* data, bool writes) {
    const ByteExtent extent = extent_of(dtype, array.owned.extents(), array.strides);
    const auto bytes = static_cast<size_t>(extent.end - extent.begin);
    if (const auto tensor = tensor_at(dtype, array, data))
      return {.kind = LentPlace::Kind::kTensor, .tensor = *tensor, .memory = {}, .array = {}};
    const auto found = SharedHeap::process().locate(data + extent.begin, bytes);
    if (!found) fail_internal("{}: a run over memory that is neither its nor its agent's", memory_.name_);
    arenas_[found->arena->id()].arena = found->arena;
    arenas_[found->arena->id()].writable |= writes;
    return {.kind = LentPlace::Kind::kAgent,
            .tensor = 0,
            .memory = {.key = found->arena->id(), .offset = found->offset, .bytes = bytes},
            .origin = static_cast<uint64_t>(-extent.begin),
            .array = array};
  }

  std::unique_ptr<LentRun> send(std::function<void()> done, const Peer* peer) {
    std::vector<std::pair<LendArenas, std::vector<UniqueFd>>> arenas = arena_frames();  // all that can fail is first
    std::vector<RemoteKey> keys;
    if (peer != nullptr)
      for (const RemoteKey& key : peer->keys) keys.push_back(key.duplicate());
    for (auto& [message, fds] : arenas) memory_.link_->send(message, std::move(fds));
    for (std::vector<RemoteKey>& part : split_by_fds(std::move(keys))) {
      if (part.empty()) continue;
      std::vector<UniqueFd> fds = detach_fds(part);
      memory_.link_->send(LendKeys{.run = make_.run, .keys = std::move(part)}, std::move(fds));
    }
    memory_.link_->send(make_);
    return std::unique_ptr<LentRun>(new LentRun(memory_.shared_from_this(), make_, std::move(done)));
  }

 private:
  std::optional<uint32_t> tensor_at(DType dtype, const LocalArray& array, const std::byte* data) const {
    const auto [first, last] = memory_.places_.equal_range(data);
    for (auto it = first; it != last; ++it) {
      const LocalTensor& tensor = memory_.tensors_[it->second];
      if (tensor.dtype == dtype && tensor.array.strides == array.strides && tensor.array.owned == array.owned)
        return it->second;
    }
    return std::nullopt;
  }
  // With copies of the arenas' descriptors.
  std::vector<std::pair<LendArenas, std::vector<UniqueFd>>> arena_frames() const {
    std::vector<std::pair<LendArenas, std::vector<UniqueFd>>> frames;
    for (const bool writable : {false, true}) {
      size_t room = 0;  // left in the last frame
      for (const auto& [id, lent] : arenas_) {
        if (lent.writable != writable) continue;
        if (room == 0) {
          frames.emplace_back(LendArenas{.run = make_.run, .writable = writable, .arenas = {}},
                              std::vector<UniqueFd>());
          room = kMaxFdsPerMessage;
        }
        frames.back().first.arenas.push_back(id);
        frames.back().second.push_back(duplicate_fd(lent.arena->fd_for_agent()));
        --room;
      }
    }
    return frames;
  }

  struct LentArena {
    std::shared_ptr<SharedArena> arena;
    bool writable = false;
  };
  LentMemory& memory_;
  MakeRun make_;
  std::map<uint32_t, LentArena> arenas_;
};

std::unique_ptr<LentRun> LentMemory::make_source(const std::string& peer_name, std::span<const SourceRoute> routes,
                                                 bool digest, bool stream, std::function<void()> done) {
  Maker maker(*this, MakeRun::Kind::kSource, digest, stream);
  maker.message().peer_name = peer_name;
  for (const SourceRoute& route : routes)
    maker.message().routes.push_back({.what = route.what,
                                      .src = maker.place(route.what.dtype, route.src, route.data, false),
                                      .streamed = stream && route.streamed,
                                      .dst = {},
                                      .dst_dtype = route.what.dtype});
  return maker.send(std::move(done), nullptr);
}

std::unique_ptr<LentRun> LentMemory::make_pull(const Peer& peer, std::span<const PullRoute> routes, bool digest,
                                               bool stream, std::function<void()> done) {
  Maker maker(*this, MakeRun::Kind::kPull, digest, stream);
  maker.message().peer = peer.process;
  maker.message().peer_name = peer.name;
  for (const PullRoute& route : routes)
    maker.message().routes.push_back({.what = route.what,
                                      .src = {.kind = LentPlace::Kind::kPeer,
                                              .tensor = 0,
                                              .memory = route.memory,
                                              .origin = route.origin,
                                              .array = route.src},
                                      .dst = maker.place(route.dst_dtype, route.dst, route.data, true),
                                      .dst_dtype = route.dst_dtype});
  return maker.send(std::move(done), &peer);
}

std::unique_ptr<LentRun> LentMemory::make_copy(std::span<const PullRoute> routes, std::function<void()> done) {
  Maker maker(*this, MakeRun::Kind::kPull, false, false);
  for (const PullRoute& route : routes) {
    const std::byte* const source = own_data(route.memory) + route.origin;
    maker.message().routes.push_back({.what = route.what,
                                      .src = maker.place(route.what.dtype, route.src, source, false),
                                      .dst = maker.place(route.dst_dtype, route.dst, route.data, true),
                                      .dst_dtype = route.dst_dtype});
  }
  return maker.send(std::move(done), nullptr);
}

// --- a run ---------------------------------------------------------------------------------------

LentRun::LentRun(std::shared_ptr<LentMemory> memory, const MakeRun& made, std::function<void()> done)
    : memory_(std::move(memory)),
      number_(made.run),
      done_(std::move(done)),
      digests_(made.digest ? made.routes.size() : 0) {
  for (const LentRoute& route : made.routes) bytes_ += bytes_of(route.what.dtype, route.what.region.size());
  memory_->runs_.emplace(number_, this);
}

LentRun::~LentRun() {
  TESSERA_CHECK(!running_);
  memory_->runs_.erase(number_);
  memory_->link_->send(DropRun{.run = number_});
}

void LentRun::set_bytes_done(int64_t bytes) {
  bytes_done_ = std::clamp<int64_t>(bytes, 0, bytes_);
}

void LentRun::give_stream(StreamEnd end) {
  memory_->link_->send(GiveStream{.run = number_, .transport = std::move(end.transport)}, std::move(end.fds));
}

void LentRun::start(uint32_t epoch, const SampleSeed& sample) {
  TESSERA_CHECK(!running_);
  status_ = {};
  bytes_done_ = 0;
  std::ranges::fill(digests_, Digest{});
  running_ = true;
  epoch_ = epoch;
  memory_->heard_ = Clock::steady().now();
  Status lost;
  {
    const MutexLock lock(memory_->mutex_);
    lost = memory_->lost_;
  }
  if (!lost.ok()) return end(lost);
  memory_->link_->send(StartRun{.run = number_, .epoch = epoch, .sample = sample});
}

void LentRun::abort(const Status& status) {
  if (running_) memory_->link_->send(AbortRun{.run = number_, .status = status});
}

void LentRun::end(const Status& status) {
  if (!std::exchange(running_, false)) return;
  status_ = status;
  done_();
}

}  // namespace tessera::bus
