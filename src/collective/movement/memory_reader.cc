#include "collective/movement/memory_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "base/fields.h"
#include "base/mutex.h"
#include "base/process.h"
#include "collective/movement/sequence.h"
#include "transport/peer_memory.h"
#include "transport/transport.h"

namespace tessera::collective {
namespace {

constexpr uint64_t kLeastBytes = uint64_t{4} << 20;  // of a thread's part
constexpr uint32_t kPrivateKey = 0;

// Of the private memory of process `of`, for whoever it serves: keys of private memory say no more than that.
RemoteKey private_key(const Endpoint& of, const Endpoint& reader) {
  return TransportRegistry::builtin().choose(of, reader).export_region({});
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Cuts them into at most `parts` of about equal bytes.
std::vector<std::vector<MemoryRead>> split(std::span<const MemoryRead> reads, int parts) {
  uint64_t bytes = 0;
  for (const MemoryRead& each : reads) bytes += each.from.bytes;
  const uint64_t share = std::max(kLeastBytes, bytes / static_cast<uint64_t>(parts) + 1);
  std::vector<std::vector<MemoryRead>> split(1);
  uint64_t room = share;
  for (MemoryRead rest : reads) {
    while (rest.from.bytes > 0) {
      if (room == 0) {
        split.emplace_back();
        room = share;
      }
      const uint64_t taken = std::min(rest.from.bytes, room);
      split.back().push_back(rest);
      split.back().back().from.bytes = taken;
      rest.from.offset += taken;
      rest.from.bytes -= taken;
      rest.to += taken;
      room -= taken;
    }
  }
  return split;
}

// Counts parts that are done, and keeps the first failure.
class Finish {
 public:
  explicit Finish(size_t parts) : left_(parts) {}
  void done(const Status& status) {
    const MutexLock lock(mutex_);
    if (status_.ok()) status_ = status;
    if (--left_ == 0) all_.notify_all();
  }
  Status wait() {
    const MutexLock lock(mutex_);
    all_.wait(mutex_, [this]() REQUIRES(mutex_) { return left_ == 0; });
    return status_;
  }

 private:
  Mutex mutex_;
  CondVar all_;
  size_t left_ GUARDED_BY(mutex_);
  Status status_ GUARDED_BY(mutex_);
};

template <typename Copy>
class Part final : public Job {
 public:
  Part(std::vector<MemoryRead> reads, const Copy& copy, Finish& finish)
      : reads_(std::move(reads)), copy_(copy), finish_(finish) {}
  void run(std::span<std::byte>) override { finish_.done(copy_(reads_)); }

 private:
  const std::vector<MemoryRead> reads_;
  const Copy& copy_;
  Finish& finish_;
};

}  // namespace

struct MemoryReader::Told {
  Incarnation process{};
  static void fields(auto& f, auto& self) { f("process", self.process); }
};

MemoryReader::MemoryReader(std::shared_ptr<Group> group, int threads)
    : group_(std::move(group)), consents_(TransportRegistry::builtin().consents()) {
  const Told own{.process = Incarnation::self()};
  connect(own, group_->exchange("processes of ranks", text_of(message_bytes(own))));
  std::string refused;
  for (size_t rank = 0; rank < ranks_.size() && refused.empty(); ++rank)
    if (!ranks_[rank]->caps().has(Access::kGet))
      refused = fmt::format("{} of {}: {}", group_->describe(group_->rank()), group_->describe(static_cast<int>(rank)),
                            ranks_[rank]->get_refused().message());
  if (refused.empty() && forced_access() == Access::kStream) refused = "TESSERA_FORCE_PULL=stream";
  for (std::string& each : group_->exchange("memory of ranks", refused))
    if (refused_.empty()) refused_ = std::move(each);
  if (threads == 0) threads = std::max(1, usable_cpus() / group_->size());
  if (threads > 1) pool_ = std::make_unique<WorkerPool>(threads, "tessera-read");
}

MemoryReader::~MemoryReader() = default;

void MemoryReader::connect(const Told& own, const std::vector<std::string>& blobs) {
  const Endpoint self{.process = own.process, .name = group_->describe(group_->rank())};
  for (int rank = 0; rank < group_->size(); ++rank) {
    const std::string name = group_->describe(rank);
    const auto told = read_message<Told>(std::as_bytes(std::span(blobs[static_cast<size_t>(rank)])), name);
    const Endpoint peer{.process = told.process, .name = name};
    auto memory = std::make_unique<PeerMemory>(TransportRegistry::builtin(), peer, self);
    memory->add_key(kPrivateKey, private_key(peer, self));
    ranks_.push_back(std::move(memory));
  }
}

MemoryRef MemoryReader::refer(const void* data, size_t bytes) const {
  if (!refused_.empty()) return group_->refer(data, bytes);
  return {.arena = kPrivateMemory, .offset = reinterpret_cast<uintptr_t>(data), .bytes = bytes};
}

void MemoryReader::read(std::span<const MemoryRead> reads) {
  for (const MemoryRead& each : reads)
    if (each.rank < 0 || each.rank >= group_->size() || each.from.bytes > uint64_t{INT64_MAX})
      fail(ErrorCode::kInvalidArgument, "group '{}': {} bytes of rank {} of {} are to be read"_message, group_->name(),
           each.from.bytes, each.rank, group_->size());
  const auto copies = [this](std::span<const MemoryRead> part) {
    try {
      return copy(part);
    } catch (...) {
      return status_of_current_exception();
    }
  };
  auto parts = split(reads, pool_ == nullptr ? 1 : pool_->threads());
  Finish finish(parts.size());
  std::vector<Part<decltype(copies)>> jobs;
  jobs.reserve(parts.size());
  for (auto& each : parts) jobs.emplace_back(std::move(each), copies, finish);
  for (size_t i = 1; i < jobs.size(); ++i) pool_->submit(jobs[i]);
  jobs.front().run({});
  const Status status = finish.wait();
  read_in_order();
  if (!status.ok()) throw Error(status.code(), status.message());
}

Status MemoryReader::copy(std::span<const MemoryRead> reads) const {
  std::vector<Piece> pieces;
  std::vector<std::span<std::byte>> out;
  for (size_t i = 0; i < reads.size(); ++i) {
    const MemoryRead& each = reads[i];
    if (each.from.arena != kPrivateMemory) {
      std::memcpy(each.to, group_->map(each.rank, each.from), each.from.bytes);
      continue;
    }
    pieces.push_back({.offset = each.from.offset, .bytes = each.from.bytes});
    out.emplace_back(each.to, each.from.bytes);
    if (i + 1 < reads.size() && reads[i + 1].rank == each.rank && reads[i + 1].from.arena == kPrivateMemory) continue;
    if (Status status = ranks_[static_cast<size_t>(each.rank)]->get(kPrivateKey, pieces, out); !status.ok())
      return status;
    pieces.clear();
    out.clear();
  }
  return {};
}

}  // namespace tessera::collective
