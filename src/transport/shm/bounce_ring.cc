#include "transport/shm/bounce_ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <new>
#include <utility>

#include "base/fail.h"

namespace tessera {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHeaderBytes = 4096;
constexpr size_t kRingBytes = kHeaderBytes + BounceRing::kSlots * BounceRing::kSlotBytes;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

constexpr uint64_t position(uint32_t epoch, uint32_t count) {
  return uint64_t{epoch} << 32 | count;
}
constexpr uint32_t epoch_of(uint64_t position) {
  return static_cast<uint32_t>(position >> 32);
}
constexpr uint32_t count_of(uint64_t position) {
  return static_cast<uint32_t>(position);
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, Duration timeout) {
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec limit{.tv_sec = whole.count(), .tv_nsec = static_cast<long>((timeout - whole).count())};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

// What one side tells the other; written only by that side, except `bell`, which any waker increments.
struct alignas(kCacheLine) BounceRing::Side {
  std::atomic<uint64_t> done;  // epoch and frames published or released
  alignas(kCacheLine) std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> bell;
};

struct BounceRing::Header {
  Side producer;
  Side consumer;
  alignas(kCacheLine) std::atomic<uint32_t> frame_bytes[kSlots];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

BounceRing::BounceRing(UniqueFd fd, std::byte* data) : fd_(std::move(fd)), data_(data) {
  static_assert(sizeof(Header) <= kHeaderBytes);
}

BounceRing::~BounceRing() {
  ::munmap(data_, kRingBytes);
}

namespace {

std::byte* map_ring(int fd) {
  void* data = ::mmap(nullptr, kRingBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_errno("bounce ring: mmap");
  return static_cast<std::byte*>(data);
}

}  // namespace

std::unique_ptr<BounceRing> BounceRing::create() {
  UniqueFd fd(::memfd_create("tessera-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail_errno("bounce ring: memfd_create");
  if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(kRingBytes)) != 0) fail_errno("bounce ring: fallocate");
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail_errno("bounce ring: sealing");
  std::byte* data = map_ring(fd.get());
  return std::unique_ptr<BounceRing>(new BounceRing(std::move(fd), data));
}

std::unique_ptr<BounceRing> BounceRing::open(UniqueFd fd, std::string_view owner) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    fail(ErrorCode::kInvalidArgument, "bounce ring of {}: the descriptor is not sealed against shrinking"_message,
         owner);
  struct stat file{};
  if (::fstat(fd.get(), &file) != 0 || static_cast<uint64_t>(file.st_size) != kRingBytes)
    fail(ErrorCode::kInvalidArgument, "bounce ring of {}: {} bytes instead of {}"_message, owner, file.st_size,
         kRingBytes);
  std::byte* data = map_ring(fd.get());
  return std::unique_ptr<BounceRing>(new BounceRing(std::move(fd), data));
}

BounceRing::Header& BounceRing::header() const {
  return *std::launder(reinterpret_cast<Header*>(data_));
}

std::byte* BounceRing::slot(uint32_t frame) const {
  return data_ + kHeaderBytes + size_t{frame % kSlots} * kSlotBytes;
}

void BounceRing::begin(Side& own, Side& other, uint32_t epoch) {
  TESSERA_CHECK(epoch != 0);
  epoch_ = epoch;
  count_ = 0;
  {
    const MutexLock lock(mutex_);
    own_ = &own;
    status_ = {};
    interrupted_.store(false, std::memory_order_relaxed);
  }
  own.sleeping.store(0, std::memory_order_relaxed);
  own.done.store(position(epoch, 0), std::memory_order_seq_cst);
  wake(other);
}

void BounceRing::begin_produce(uint32_t epoch) {
  begin(header().producer, header().consumer, epoch);
}
void BounceRing::begin_consume(uint32_t epoch) {
  begin(header().consumer, header().producer, epoch);
}

// Sequentially consistent on both sides: either the sleeper sees our update before it sleeps, or we see that it sleeps.
void BounceRing::wake(Side& side) {
  if (side.sleeping.load(std::memory_order_seq_cst) == 0) return;
  side.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(side.bell);
}

template <typename Ready>
bool BounceRing::wait(Side& own, Ready ready, const Deadline& deadline) {
  if (ready()) return !interrupted_.load(std::memory_order_acquire);
  own.sleeping.store(1, std::memory_order_seq_cst);
  bool is_ready = false;
  while (true) {
    const uint32_t bell = own.bell.load(std::memory_order_seq_cst);
    if (interrupted_.load(std::memory_order_acquire)) break;
    is_ready = ready();
    if (is_ready) break;
    const Duration left = deadline.left();
    if (left == Duration::zero()) break;
    futex_wait(own.bell, bell, left);
  }
  own.sleeping.store(0, std::memory_order_relaxed);
  return is_ready;
}

std::span<std::byte> BounceRing::reserve(const Deadline& deadline) {
  Header& shared = header();
  const auto has_room = [&] {
    const uint64_t released = shared.consumer.done.load(std::memory_order_seq_cst);
    return epoch_of(released) == epoch_ && count_ - count_of(released) < kSlots;
  };
  if (!wait(shared.producer, has_room, deadline)) return {};
  return {slot(count_), kSlotBytes};
}

void BounceRing::publish(size_t bytes) {
  Header& shared = header();
  shared.frame_bytes[count_ % kSlots].store(static_cast<uint32_t>(bytes), std::memory_order_relaxed);
  shared.producer.done.store(position(epoch_, ++count_), std::memory_order_seq_cst);
  wake(shared.consumer);
}

std::span<const std::byte> BounceRing::acquire(const Deadline& deadline) {
  Header& shared = header();
  const auto has_frame = [&] {
    const uint64_t published = shared.producer.done.load(std::memory_order_seq_cst);
    return epoch_of(published) == epoch_ && count_of(published) != count_;
  };
  if (!wait(shared.consumer, has_frame, deadline)) return {};
  const uint32_t bytes = shared.frame_bytes[count_ % kSlots].load(std::memory_order_relaxed);
  if (bytes == 0 || bytes > kSlotBytes) {
    interrupt(failed(ErrorCode::kDataLoss, "bounce ring: a frame of {} bytes"_message, bytes));
    return {};
  }
  return {slot(count_), bytes};
}

void BounceRing::release() {
  Header& shared = header();
  shared.consumer.done.store(position(epoch_, ++count_), std::memory_order_seq_cst);
  wake(shared.producer);
}

void BounceRing::interrupt(const Status& status) {
  const MutexLock lock(mutex_);
  if (interrupted_.load(std::memory_order_relaxed)) return;
  status_ = status;
  interrupted_.store(true, std::memory_order_release);
  if (own_ == nullptr) return;
  own_->bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(own_->bell);
}

Status BounceRing::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

}  // namespace tessera
